"""DeepSpeed checkpoint → safetensors Hugging Face directory, and the proof that nothing changed on the way."""

import contextlib
import io
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dvp.core.batch import Batch
from dvp.errors import DvpError
from dvp.files import atomic_path, checksums
from dvp.training import checkpoint
from dvp.training.backend import TAG, Policy
from dvp.training.probe import read_probe

TOLERANCE = 1e-5  # nats, fp32
PREFIX = "model."  # Policy holds the Hugging Face model under this name


def convert(checkpoint_folder: Path, base: Path, probe: Path, folder: Path, temperature: float) -> dict:
    """Write the model of a verified checkpoint to `folder` and prove it.

    base : the Hugging Face directory that gives architecture and tokenizer.
    probe : what `write_probe` (dvp.training.probe) wrote at the end of training.
    temperature : the one at which the trainer scored the probe.
    Returns the proof: max |Δ log p| of the probe's tokens between the converted model, read back from disk, and (a) the
    live trainer at the end of training, (b) the weights of the checkpoint.
    Raises DvpError for a damaged checkpoint, weights that do not fit the base, or a difference above 1e-5.
    """
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    checkpoint.verify(checkpoint_folder)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        state = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint_folder), TAG)
    weights = {name.removeprefix(PREFIX): value.clone() for name, value in state.items()}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    for name, value in weights.items():
        if name in shapes and value.shape != shapes[name]:
            raise DvpError(
                f"{checkpoint_folder}: parameter '{name}' is {tuple(value.shape)}, but {tuple(shapes[name])} in {base}"
            )
    problem = model.load_state_dict(weights, strict=False)
    missing = set(problem.missing_keys) - set(model.all_tied_weights_keys)
    if missing or problem.unexpected_keys:
        name = sorted(missing | set(problem.unexpected_keys))[0]
        raise DvpError(f"{checkpoint_folder}: parameter '{name}' does not fit the base model {base}")
    model.tie_weights()
    batch, live_N = read_probe(probe)
    from_checkpoint_N = _score(model, batch, temperature)
    with atomic_path(folder) as temporary:
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(base).save_pretrained(temporary)
        converted_N = _score(AutoModelForCausalLM.from_pretrained(temporary, dtype=torch.float32), batch, temperature)
        proof = {
            "tokens_scored": len(converted_N),
            "max_abs_delta_log_prob": (converted_N - from_checkpoint_N).abs().max().item(),
            "max_abs_delta_log_prob_live": (converted_N - live_N).abs().max().item(),
            "tolerance": TOLERANCE,
        }
        for key in ("max_abs_delta_log_prob", "max_abs_delta_log_prob_live"):
            if not proof[key] <= TOLERANCE:
                raise DvpError(
                    f"{checkpoint_folder}: the converted model differs: {key} is {proof[key]:.3g}, "
                    f"at most {TOLERANCE:g} is allowed"
                )
    return proof | {"files": checksums(folder)}


@torch.no_grad()
def _score(model: PreTrainedModel, batch: Batch, temperature: float) -> torch.Tensor:
    return Policy(model.eval())(batch, safe=None, temperature=temperature).log_prob
