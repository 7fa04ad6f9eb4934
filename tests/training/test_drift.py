"""How far trainer and engine have moved: against independent models in float64, real DeepSpeed, no vLLM."""

import copy
import json
import math
import os
import signal

import pytest
import torch
from test_loop import ScriptedEngine, build_loop, rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from dvp.errors import DvpError, Stopped
from dvp.training import drift
from dvp.training.loop import run_loop

pytestmark = pytest.mark.slow
SMALL, LARGE = 2.0**-12, 2.0**-4
"""Of a weight: far below the rounding of bfloat16, and above it."""


class RoundedEngine(ScriptedEngine):
    """Its weights have 16 bits, as vLLM's in bfloat16."""

    def load_weights(self, weights):
        super().load_weights((name, value.bfloat16().float()) for name, value in weights)


@pytest.fixture(scope="module")
def stored(tiny_model, tmp_path_factory):
    """The tiny model with weights that were stored in bfloat16."""
    folder = tmp_path_factory.mktemp("stored")
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def log_probs(model, contexts):
    """log p (N, V) after each context, in float64."""
    model = copy.deepcopy(model).double()
    with torch.no_grad():
        return torch.stack([model(torch.tensor([ids])).logits[0, -1].log_softmax(0) for ids in contexts])


def kl(q_NV, p_NV):
    return (q_NV.exp() * (q_NV - p_NV)).sum(dim=1)


@pytest.mark.parametrize("change", [SMALL, LARGE])
def test_distances_are_those_of_independent_models(stored, root, change):
    loop = build_loop(stored, root, engine=RoundedEngine, drift_every=1)
    loop.engine.load_weights(loop.trainer.weights())
    loop.drift.start()
    contexts = loop.drift._contexts
    assert {len(context) for context in contexts} > {2}
    before = AutoModelForCausalLM.from_pretrained(stored, dtype=torch.float32)
    now = copy.deepcopy(before)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for (_, weight), other in zip(loop.trainer.weights(), now.parameters(), strict=True):
            factor = 1 + change * torch.randint(0, 2, weight.shape, generator=generator)
            weight.mul_(factor)
            other.mul_(factor)
    loop.engine.load_weights(loop.trainer.weights())
    found = loop.drift.measure()

    seen = copy.deepcopy(now)
    with torch.no_grad():
        for weight in seen.parameters():
            weight.copy_(weight.bfloat16())
    start_NV, trainer_NV, engine_NV = (log_probs(model, contexts) for model in (before, now, seen))
    expected = {
        "trainer": kl(trainer_NV, start_NV),
        "engine": kl(engine_NV, start_NV),
        "apart": kl(engine_NV, trainer_NV),
    }
    for name, values_N in expected.items():
        assert found[f"drift_{name}"] == pytest.approx(values_N.mean().item(), rel=1e-3, abs=1e-10)
        error = values_N.std().item() / math.sqrt(len(contexts))
        assert found[f"drift_{name}_se"] == pytest.approx(error, rel=1e-3, abs=1e-10)
    assert found["drift_share"] == pytest.approx(found["drift_engine"] / found["drift_trainer"])
    assert found["drift_apart_start"] < 1e-10
    assert (found["drift_share"] < 1e-6) == (change == SMALL)
    # By the chain rule: what is left of the KL without that of the safe vocabularies, renormalised.
    safe_NV = trainer_NV.exp() >= math.exp(-13) * trainer_NV.exp().amax(dim=1, keepdim=True)
    q_NV, p_NV = engine_NV.exp() * safe_NV, trainer_NV.exp() * safe_NV
    q_N, p_N = q_NV.sum(dim=1, keepdim=True), p_NV.sum(dim=1, keepdim=True)
    inside_N = (q_NV * ((q_NV / q_N) / (p_NV / p_N)).log().nan_to_num()).sum(dim=1)
    assert found["drift_apart_outside"] == pytest.approx(1 - (inside_N.sum() / values_N.sum()).item(), abs=1e-3)


@pytest.fixture
def run(stored, root):
    """Train in a folder, with drift at steps 1, 2 and 4 and a checkpoint at step 2; return the loop and its metrics."""

    def run(folder, on_step=lambda row: None, engine=None):
        loop = build_loop(stored, root, drift_every=2, engine=engine)
        run_loop(loop, folder, folder / "checkpoints", on_step)
        return loop, rows(folder)

    return run


def stop_after_3(row):
    if row["step"] == 3:
        raise KeyboardInterrupt


def test_it_is_in_the_rows_of_its_steps(run, tmp_path, monkeypatch):
    """Also of a run that resumes, with the contexts and the start of before, whatever the engine samples by now."""
    loop, whole = run(tmp_path / "whole")
    assert [row["step"] for row in whole if "drift_share" in row] == [1, 2, 4]
    assert 0 < whole[1]["drift_trainer"] < whole[3]["drift_trainer"]
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", stop_after_3)
    monkeypatch.setattr(drift, "derived_seed", lambda *_: 5)
    resumed, metrics = run(tmp_path / "cut")
    assert metrics == whole
    assert resumed.drift._contexts == loop.drift._contexts
    assert all(torch.equal(one, other) for one, other in zip(resumed.drift._start, loop.drift._start, strict=True))


def test_a_checkpoint_without_contexts_is_named(run, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stop_after_3)
    (checkpoint,) = tmp_path.glob("checkpoints/step-*")
    listed = json.loads((checkpoint / "manifest.json").read_text())
    del listed["files"][drift.FILE]
    (checkpoint / "manifest.json").write_text(json.dumps(listed))
    (checkpoint / drift.FILE).unlink()
    with pytest.raises(DvpError, match=r"step-000002/drift.safetensors: missing \(an older version did not write it\)"):
        run(tmp_path)


class DyingEngine(ScriptedEngine):
    """Its own processes get the stop signal of step 4 while it is measured, and die of it."""

    def generate(self, prompts, sampling, seeds):
        if sampling.whole_vocabulary and len(prompts) > 2 and len(self.pushed) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError("EngineDeadError")
        return super().generate(prompts, sampling, seeds)


def test_an_engine_that_dies_of_a_stop_signal_while_it_is_measured(run, tmp_path):
    """The step is lost, and not saved as the one before."""
    _, whole = run(tmp_path / "whole")
    with pytest.raises(Stopped, match="stopped by SIGTERM after step 3; run again to continue from step 2"):
        run(tmp_path / "stopped", engine=DyingEngine)
    assert len(rows(tmp_path / "stopped")) == 3
    assert run(tmp_path / "stopped")[1] == whole
