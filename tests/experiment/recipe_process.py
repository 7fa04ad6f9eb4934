"""Run by test_methods.py where the package has a new advantage and a new rule for ρ: recipe_process.py MODEL."""

import json
import sys
from pathlib import Path

import dvp
from dvp.experiment.loading import load_experiment
from dvp.experiment.training import EngineConfig, Noise, TrainingConfig

assert Path(dvp.__file__).is_relative_to(Path.cwd())
experiment = load_experiment("own")
assert "torch" not in sys.modules

import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from dvp.analysis.looks import family  # noqa: E402
from dvp.experiment.grid import Run  # noqa: E402
from dvp.experiment.tools import Dictionary  # noqa: E402
from dvp.measurement.gradients import Estimator  # noqa: E402
from dvp.rollout.engine import Sampling, make_engine  # noqa: E402
from dvp.rollout.vllm import prove_safe_vocabulary  # noqa: E402
from dvp.tools import make_tool  # noqa: E402
from dvp.training.backend import Trainer  # noqa: E402
from dvp.training.loop import Loop  # noqa: E402
from dvp.training.responses import ResponseRecorder  # noqa: E402
from noisy_engine import NoisyEngine  # noqa: E402

model = Path(sys.argv[1])
settings = {
    "steps": 2,
    "prompts_per_step": 2,
    "group_size": 4,
    "tokens_per_micro_batch": 128,
    "learning_rate": 1e-3,
    "max_response_tokens": 8,
    "checkpoint_every": 2,
    "deepspeed": "zero1",
}
noisy = EngineConfig(dtype="float32", noise=Noise(sigma=0.05))  # what the engine below is, whatever a run asks for
experiment = experiment.model_copy(update={"training": TrainingConfig(**settings)})
options = json.loads(Path("config/deepspeed/zero1.json").read_text())
tokenizer = AutoTokenizer.from_pretrained(model)
engine = NoisyEngine(AutoModelForCausalLM.from_pretrained(model), tokenizer, sigma=0.05, answers=True)
plain = make_engine(model, experiment.engines["plain"], max_model_len=64, max_num_seqs=8, seed=0)
prove_safe_vocabulary(plain, [[10, 20]], experiment.sides_of(experiment.runs[-1]).engine)
plain.load_weights([(name, torch.zeros_like(weight)) for name, weight in plain._model.state_dict().items()])
[[drawn]] = plain.generate([[10, 20]], Sampling(max_tokens=3), [0])
assert np.allclose(drawn.log_probs, -np.log(len(tokenizer)))
assert make_tool(Dictionary(kind="dictionary")).answers(["abc"])[0].text == "cba"


def trained(run: Run) -> Loop:
    loop = Loop(
        experiment,
        run,
        pd.DataFrame({"id": range(4), "answer": ["7"] * 4}),
        [[10 + row, 20 + row] for row in range(4)],
        1,
        Trainer(model, experiment.training, options),
        engine,
        ResponseRecorder(experiment.training.keep_responses, experiment.training.steps, tokenizer),
    )
    loop.agreement._config = noisy
    return loop


for run in experiment.runs[1:]:
    loop = trained(run)
    rows = [loop.step(step) for step in (1, 2)]
    assert all(row["pruned_mass_mean"] > 0 for row in rows)
    assert any(row["gradient_norm"] for row in rows)
assert type(loop.safe.trainer).__name__ == "Confident"
assert Estimator(experiment, "own", "0.1").safe.engine == loop.safe.engine
assert experiment.methods["own"].importance.corrects
assert family(experiment.methods["own"].model_copy(update={"advantage": "rloo", "mask": None})) == "other correction"
print(f"{len(rows)} steps")
