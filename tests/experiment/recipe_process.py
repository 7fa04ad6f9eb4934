"""Run by test_methods.py where the package has a new advantage and a new rule for ρ: recipe_process.py MODEL."""

import json
import sys
from pathlib import Path

import dvp
from dvp.experiment.loading import load_experiment
from dvp.experiment.training import TrainingConfig

assert Path(dvp.__file__).is_relative_to(Path.cwd())
experiment = load_experiment("own")
assert "torch" not in sys.modules

import pandas as pd  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from dvp.measurement.gradients import Estimator  # noqa: E402
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
experiment = experiment.model_copy(update={"training": TrainingConfig(**settings)})
options = json.loads(Path("config/deepspeed/zero1.json").read_text())
tokenizer = AutoTokenizer.from_pretrained(model)
engine = NoisyEngine(AutoModelForCausalLM.from_pretrained(model), tokenizer, sigma=0.05, answers=True)
loop = Loop(
    experiment,
    experiment.runs[-1],
    pd.DataFrame({"id": range(4), "answer": ["7"] * 4}),
    [[10 + row, 20 + row] for row in range(4)],
    1,
    Trainer(model, experiment.training, options),
    engine,
    ResponseRecorder(experiment.training.keep_responses, experiment.training.steps, tokenizer),
)
rows = [loop.step(step) for step in (1, 2)]
assert all(row["pruned_mass_mean"] > 0 for row in rows)
assert any(row["gradient_norm"] for row in rows)
assert type(loop.safe.trainer).__name__ == "Confident"
assert Estimator(experiment, "own", "0.1").safe.engine == loop.safe.engine
print(f"{len(rows)} steps")
