"""A run's weights → a Hugging Face directory, and the proof that nothing changed on the way.

Training wrote the weights as safetensors, with their SHA-256: the same file becomes the model's. What no checksum
finds, such as another architecture or a head that was not tied, the log-probs do: the written model, read back as any
user would, gives the tokens of fixed prompts those that the trainer gave them, within what rounding explains.
"""

import os
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from dvp.errors import DvpError
from dvp.files import atomic_files, checksums
from dvp.training import checkpoint
from dvp.training.backend import Policy
from dvp.training.weights import MODEL, Probe, read_probe

GENERATION = "generation_config.json"
SAME_DEVICE, OTHER_DEVICE = 8, 64


def convert(weights: Path, base: Path, probe: Path, folder: Path, temperature: float) -> dict:
    """Write the model of verified weights to `folder` and prove it.

    weights : what training kept of a step.
    base : the Hugging Face directory that gives architecture and tokenizer.
    probe : what the trainer said of them (`write_probe` in dvp.training.weights).
    temperature : the one at which the trainer scored the probe.
    Returns the proof: how many weights are the trainer's, the SHA-256 of their file, and the largest |Δ log p| of the
    probe's tokens between trainer and converted model, with its tolerance.
    Raises DvpError for damaged weights; for weights that do not fit the base, naming the first one; or for a difference
    of log-probs above the tolerance.
    """
    checkpoint.verify(weights)
    config = AutoConfig.from_pretrained(base)
    known = read_probe(probe)
    with atomic_files(folder) as temporary:
        _link(weights / MODEL, temporary / MODEL)
        config.dtype = torch.float32
        config.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(base).save_pretrained(temporary)
        if (base / GENERATION).is_file():
            shutil.copyfile(base / GENERATION, temporary / GENERATION)
        model, found = AutoModelForCausalLM.from_pretrained(
            temporary, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
        misfits = {*found["missing_keys"], *found["unexpected_keys"], *(name for name, *_ in found["mismatched_keys"])}
        if misfits:
            raise DvpError(f"{weights}: parameter '{min(misfits)}' does not fit the base model {base}")
        with torch.no_grad():
            now_N = Policy(model.eval())(known.batch, safe=None, temperature=temperature).log_prob
        delta, allowed = (now_N - known.log_prob_N).abs().max().item(), tolerance(config, known)
        if not delta <= allowed:
            raise DvpError(
                f"{weights}: the converted model has the trainer's weights and scores differently: the "
                f"log-prob of a token of {probe.name} differs by {delta:.3g} nats, at most {allowed:.3g} is rounding"
            )
        files = checksums(temporary)
    return {
        "identical_weights": len(list(model.parameters())),
        "parameters": model.num_parameters(),
        "weights_sha256": files[MODEL],
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


def _link(source: Path, target: Path) -> None:
    """The same file under a second name, so that weights take their space once; a copy where there can be none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    os.utime(target)  # a stage's outputs are newer than its inputs
