"""Run the stage `convert`: write a run's weights as a Hugging Face directory and prove that nothing changed.

Training wrote the weights as safetensors, with their SHA-256: the same file becomes the model's. A checksum does not
detect another architecture or a head that was not tied, so log-probs are compared as well: the written model, loaded as
any user would load it, must give the tokens of fixed prompts the trainer's log-probs, within rounding.
"""

import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from dvp.core.batch import Batch
from dvp.errors import DvpError
from dvp.experiment.folder import ExperimentDir
from dvp.experiment.grid import whole_run
from dvp.files import atomic_files, checksums, read_json
from dvp.stage import run_stage
from dvp.training import checkpoint
from dvp.training.backend import Policy
from dvp.training.checkpoint import MODEL, PROBE

GENERATION = "generation_config.json"
SAME_DEVICE, OTHER_DEVICE = 8, 64


def convert(config: Path, path: str, threads: int) -> None:
    """Write the model that a run had after a step, or at its end, to models/RUN/, with conversion.json as the proof.

    path : of the run, or of the run after a step: RUN/step~16.
    Raises DvpError as `run_stage` and `write_model`, or if the step's weights were not kept.
    """
    torch.set_num_threads(threads)
    directory = ExperimentDir(config)
    job = directory.experiment.job("convert", path)
    trained, result = directory.result("train", whole_run(path)), directory.result("convert", path)
    inputs = {"train": trained, "base": directory.result("base")}
    config_hash = directory.experiment.config_hash("convert", path)
    with run_stage("convert", directory, result, config_hash, inputs, run=path) as stage:
        if stage.reuse():
            return
        temperature = directory.experiment.training_of(job.run).temperature
        proof = write_model(_kept(trained, job.run.step), directory.base, result.parent, temperature)
        stage.tracked.log_result({key: proof[key] for key in ("identical_weights", "max_abs_delta_log_prob")})
        stage.tracked.log_model(result.parent)
        stage.finish({"run": path, **proof})


def _kept(result: Path, step: int | None) -> Path:
    """Return the folder of the weights that a training run kept of a step, None for the last step. Raises DvpError."""
    record = read_json(result, "steps", "kept")
    step, kept = step or record["steps"], record["kept"]
    if str(step) not in kept:
        raise DvpError(f"{result}: the weights after step {step} were not kept; `dvp train` writes the last ones")
    return result.parent / kept[str(step)]


def write_model(weights: Path, base: Path, folder: Path, temperature: float) -> dict:
    """Write verified weights as a Hugging Face model to `folder` and prove that it scores as the trainer did.

    weights : what training kept of a step (`keep_weights` in dvp.training.checkpoint).
    base : the Hugging Face directory that gives architecture and tokenizer.
    temperature : the one at which the trainer scored the probe.
    Returns the proof: how many weights are the trainer's, the SHA-256 of their file, and the largest |Δ log p| of the
    probe's tokens between trainer and converted model, with its tolerance.
    Raises DvpError for damaged weights; for weights that do not fit the base, naming the first one; or for a difference
    of log-probs above the tolerance.
    """
    checkpoint.verify(weights)
    config = AutoConfig.from_pretrained(base)
    with safe_open(weights / PROBE, "pt") as known:
        batch, log_prob_N = Batch(known.get_tensor("tokens"), known.get_tensor("scored")), known.get_tensor("log_prob")
        device = known.metadata()["device"]
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
            now_N = Policy(model.eval())(batch, safe=None, temperature=temperature).log_prob
        delta, allowed = (now_N - log_prob_N).abs().max().item(), tolerance(config, device)
        if not delta <= allowed:
            raise DvpError(
                f"{weights}: the converted model has the trainer's weights and scores differently: the "
                f"log-prob of a token of {PROBE} differs by {delta:.3g} nats, at most {allowed:.3g} is rounding"
            )
        files = checksums(temporary)
    return {
        "identical_weights": len(list(model.parameters())),
        "parameters": model.num_parameters(),
        "weights_sha256": files[MODEL],
        "tokens_scored": len(now_N),
        "max_abs_delta_log_prob": delta,
        "tolerance": allowed,
        "devices": {"trained": device, "converted": "cpu"},
        "files": files,
    }


def tolerance(config: PretrainedConfig, device: str) -> float:
    """Return how much rounding may change a token's log-prob, in nats, between the trainer in fp32 and this process.

    device : cpu or cuda, the trainer's.

    Two orders of summing n products in fp32 differ by about u √n, u = 2^-24, relative to the sum. Each of L layers adds
    two such sums over the width d to the residual stream, with independent errors: together u √(2 L d), for logits of
    order 1. That is 1e-6 for a model of 2 layers of 64 and 3e-5 for one of 36 layers of 4,096, where 3e-5 to 9e-5 were
    measured (root mean square, random weights) and 2e-4 to 6e-4 for the worst of some thousand tokens. On another kind
    of device every sum has another order: 64 times that is allowed, 6 for the worst token and 10 for the wider logits
    of a trained model. On the same kind the same programs run, and only the batch may be split differently: 8 times.
    """
    text = config.get_text_config()
    times = SAME_DEVICE if device == "cpu" else OTHER_DEVICE
    return times * 2**-24 * (2 * text.num_hidden_layers * text.hidden_size) ** 0.5


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, so that weights take their space once; copy it where links are impossible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    os.utime(target)  # a stage's outputs are newer than its inputs
