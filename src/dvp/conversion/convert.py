"""DeepSpeed checkpoint → safetensors Hugging Face directory, and the proof that nothing changed on the way.

The proof has two parts. Every weight has the same name, type, shape and SHA-256 in the trainer when it saved, in the
checkpoint and in the file that was written. And the written model, read back as any user would, gives the tokens of
fixed prompts the log-probs that the trainer gave them at the end of training, within what rounding explains: this
finds what no checksum of weights does, such as another architecture or a head that was not tied.

One weight at a time is in memory, until the whole model is read back once to be scored.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from dvp.conversion.shards import read_weights
from dvp.errors import DvpError
from dvp.files import atomic_files, checksums, read_json, sha256_json
from dvp.training import checkpoint
from dvp.training.backend import TAG, Policy
from dvp.training.probe import Probe, read_probe
from dvp.training.weights import MODEL, WEIGHTS, Fingerprint, difference, fingerprint, write_weights

GENERATION = "generation_config.json"
SAME_DEVICE, OTHER_DEVICE = 8, 64


def convert(checkpoint_folder: Path, base: Path, probe: Path, folder: Path, temperature: float) -> dict:
    """Write the model of a verified checkpoint to `folder` and prove it.

    checkpoint_folder : a checkpoint, or the weights that training kept of a step.
    base : the Hugging Face directory that gives architecture and tokenizer.
    probe : what `write_probe` (dvp.training.probe) wrote at the end of training.
    temperature : the one at which the trainer scored the probe.
    Returns the proof: how many weights are identical in trainer, checkpoint and converted model, the SHA-256 of the
    list of their checksums, and the largest |Δ log p| of the probe's tokens between trainer and converted model, with
    its tolerance.
    Raises DvpError for a damaged checkpoint; for weights that do not fit the base or are not the trainer's, naming the
    first one; or for a difference of log-probs above the tolerance.
    """
    checkpoint.verify(checkpoint_folder)
    expected: dict[str, Fingerprint] = read_json(checkpoint_folder / WEIGHTS)
    config = AutoConfig.from_pretrained(base)
    _check_fit(expected, config, checkpoint_folder, base)
    known = read_probe(probe)
    with atomic_files(folder) as temporary:
        if (checkpoint_folder / MODEL).is_file():
            _link(checkpoint_folder / MODEL, temporary / MODEL)
        else:
            write_weights(temporary / MODEL, expected, _read(expected, checkpoint_folder))
        _check_file(temporary / MODEL, expected)
        _write_the_rest(temporary, config, base)
        model = AutoModelForCausalLM.from_pretrained(temporary, dtype=torch.float32).eval()
        with torch.no_grad():
            now_N = Policy(model)(known.batch, safe=None, temperature=temperature).log_prob
        delta, allowed = (now_N - known.log_prob_N).abs().max().item(), tolerance(config, known)
        if not delta <= allowed:
            raise DvpError(
                f"{checkpoint_folder}: the converted model has the trainer's weights and scores differently: the "
                f"log-prob of a token of {probe.name} differs by {delta:.3g} nats, at most {allowed:.3g} is rounding"
            )
        files = checksums(temporary)
    return {
        "identical_weights": len(expected),
        "parameters": model.num_parameters(),
        "weights_sha256": sha256_json(expected),
        "tokens_scored": len(now_N),
        "max_abs_delta_log_prob": delta,
        "tolerance": allowed,
        "devices": {"trained": known.device, "converted": "cpu"},
        "files": files,
    }


def tolerance(config: PretrainedConfig, probe: Probe) -> float:
    """How much rounding may change a token's log-prob, in nats, between the trainer in fp32 and this process.

    Two orders of summing n products in fp32 differ by about u √n, u = 2^-24, relative to the sum. Each of L layers adds
    two such sums over the width d to the residual stream, with independent errors: together u √(2 L d), for logits of
    order 1. That is 1e-6 for a model of 2 layers of 64 and 3e-5 for one of 36 layers of 4,096, where 3e-5 to 9e-5 were
    measured (root mean square, random weights) and 2e-4 to 6e-4 for the worst of some thousand tokens. On another kind
    of device every sum has another order: 64 times that is allowed, 6 for the worst token and 10 for the wider logits
    of a trained model. On the same kind the same programs run, and only the batch may be cut otherwise: 8 times.
    """
    text = config.get_text_config()
    times = SAME_DEVICE if probe.device == "cpu" else OTHER_DEVICE
    return times * 2**-24 * (2 * text.num_hidden_layers * text.hidden_size) ** 0.5


def _check_fit(expected: dict[str, Fingerprint], config: PretrainedConfig, checkpoint_folder: Path, base: Path) -> None:
    """Raise DvpError, naming a parameter, unless these weights are all that the base's architecture has."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    for name, known in expected.items():
        if name in shapes and known["shape"] != shapes[name]:
            raise DvpError(f"{checkpoint_folder}: parameter '{name}' is {known['shape']}, but {shapes[name]} in {base}")
    misfits = (set(shapes) - set(expected) - set(model.all_tied_weights_keys)) | (set(expected) - set(shapes))
    if misfits:
        raise DvpError(f"{checkpoint_folder}: parameter '{min(misfits)}' does not fit the base model {base}")


def _read(expected: dict[str, Fingerprint], checkpoint_folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a checkpoint one by one, each proved to be the trainer's."""
    weights = read_weights(checkpoint_folder / TAG)
    for name in sorted(set(weights) ^ set(expected)):
        raise DvpError(f"{checkpoint_folder}: parameter '{name}' is in one of {TAG}/ and {WEIGHTS} only")
    for name, known in expected.items():
        value = weights[name]()
        if differs := difference({name: known}, {name: fingerprint(value)}):
            raise DvpError(f"{checkpoint_folder}: its weights are not those that the trainer had: {differs}")
        yield name, value


def _link(source: Path, target: Path) -> None:
    """The same file under a second name, so that weights take their space once; a copy where there can be none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    os.utime(target)  # a stage's outputs are newer than its inputs


def _check_file(file: Path, expected: dict[str, Fingerprint]) -> None:
    """Read the weights back, one at a time. Raises DvpError, naming the first that differs."""
    with safe_open(file, "pt") as weights:
        written = {name: fingerprint(weights.get_tensor(name)) for name in weights.keys()}  # noqa: SIM118
    if differs := difference(expected, written):
        raise DvpError(f"{file}: what was written is not what is read back: {differs}")


def _write_the_rest(folder: Path, config: PretrainedConfig, base: Path) -> None:
    """Architecture, tokenizer and what the base says of generation."""
    config.dtype = torch.float32
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    if (base / GENERATION).is_file():
        shutil.copyfile(base / GENERATION, folder / GENERATION)
