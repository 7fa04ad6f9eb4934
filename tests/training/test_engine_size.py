"""How many responses a training run's engine has room for."""

import pytest
import torch

from dvp.experiment.training import EngineConfig, TrainingConfig
from dvp.training import ranks
from dvp.training.stage import sequences


@pytest.mark.parametrize(
    ("gpu", "count", "parallel", "expected"),
    [
        (True, 1, 1, 48),
        (True, 4, 1, 16),  # two prompts for the one that has most
        (True, 4, 2, 24),
        (True, 8, 2, 16),
        (False, 4, 2, 16),  # on a CPU each rank has an engine
    ],
)
def test_it_is_what_its_share_of_the_prompts_takes(gpu, count, parallel, expected, monkeypatch):
    training = TrainingConfig(
        steps=1,
        prompts_per_step=6,
        group_size=8,
        gpus=count,
        tokens_per_micro_batch=64,
        max_response_tokens=64,
        learning_rate=1e-3,
        deepspeed="zero3",
        checkpoint_every=1,
    )
    engine = EngineConfig(dtype="bfloat16", tensor_parallel=parallel)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert sequences(training, engine) == expected
    span = parallel if gpu else 1
    monkeypatch.setattr(ranks, "count", lambda: count)
    monkeypatch.setattr(ranks, "rank", lambda: 0)  # none has more
    assert sequences(training, engine) == 8 * len(ranks.share(range(6), span))
