"""Whether a few positions tell other weights from 8-bit values that round the other way by chance."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from dvp.core.batch import Batch
from dvp.experiment.training import EngineConfig
from dvp.training.agreement import PROMPTS, TOKENS, compare, own_logits
from dvp.training.engine_rounding import engine_rounding

COARSE = EngineConfig(dtype="bfloat16", weight_rounding="int4", kv_cache_dtype="fp8_e4m3")


def compared(folder, positions, *, away):
    """Compare with an engine that rounds as the trainer's emulation does, but for logits that are off by `away`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [[20 + number, 30, 40] for number in range(PROMPTS)]
    responses = [[50 + number + place for place in range(TOKENS)] for number in range(PROMPTS)]
    with torch.no_grad(), engine_rounding(model, COARSE, activations=True):
        logits_NV = own_logits(model, Batch.collate(prompts, responses, pad=0))
    noise_NV = away * torch.randn(logits_NV.shape, generator=torch.Generator().manual_seed(0))
    logits_NV[positions] += noise_NV[positions]
    log_probs = logits_NV.log_softmax(-1).split(TOKENS)
    answers = [
        [SimpleNamespace(token_ids=response, vocabulary_log_probs_TV=own)]
        for response, own in zip(responses, log_probs, strict=True)
    ]
    engine = SimpleNamespace(generate=lambda *_: answers, sleep=lambda **_: None)
    return compare(model, engine, COARSE, prompts, seed=0, tokens=TOKENS, bf16=False)


def test_one_value_that_rounds_the_other_way_is_no_other_model(tiny_model):
    of_one, of_none = compared(tiny_model, [5], away=2.0), compared(tiny_model, [], away=2.0)
    # Alone it has more KL than ten times the rounding allows on average: the mean would refuse the engine.
    assert (of_one.kl - of_none.kl) > of_one.limit
    assert of_one.problem() is None


@pytest.mark.parametrize("away", [0.3, 2.0])
def test_what_is_off_everywhere_is_another_model(tiny_model, away):
    assert "computes another Qwen3ForCausalLM" in compared(tiny_model, slice(None), away=away).problem()
