"""Seconds of a training step over those of the same work with TRL and with the bare products, as ratios within one run.

    python -m benchmarks.trl_step --config results/smollm2/config.yaml

It takes an experiment whose base model exists. A step of this project (rollout, rewards, all diagnostics, update, new
weights in the engine) takes turns with one of TRL's GRPOTrainer, which generates with transformers, and with the bare
products: vLLM's own API, and transformers with PyTorch's AdamW. All have the same prompts, as many responses and a
learning rate of 0. TRL is in envs/dev.txt.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from torch.utils.benchmark import timer  # waits for the GPU

from benchmarks.step import PlainTransformers, experiment_of, loops_of, run, vllm_alone
from dvp.core.batch import Batch
from dvp.data.verifier import grade
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.folder import ExperimentDir
from dvp.files import write_json
from dvp.provenance import git_commit
from dvp.rollout.vllm import configure_environment
from dvp.training.rollouts import prompt_rows

if TYPE_CHECKING:
    import trl

    from dvp.training.loop import Loop

FIRST = 2  # a run's first step has measurements of its own
WARM_UP = 1  # rounds that are not counted
PEERS = {"TRL": "TRL's GRPOTrainer", "bare": "vLLM and transformers alone"}


def bench(config: Path, output: Path, rounds: int, threads: int) -> None:
    """Measure, print a line for each product and write the JSON file."""
    configure_environment(threads)
    torch.set_num_threads(threads)
    if find_spec("trl") is None:
        raise DvpError("TRL is not installed; expected envs/dev.txt to be")
    directory = experiment_of(config)
    with TemporaryDirectory() as folder:
        # TRL before DeepSpeed, whose group of one process accelerate would take for a distributed run.
        turns = _Turns(directory, rounds)
        trainer = _grpo_trainer(directory, Path(folder), WARM_UP + rounds, turns)
        turns.prepare()
        trainer.train()
    measured = turns.rows[WARM_UP:]

    def column(name: str, key: str) -> list[float]:
        return [row[name][key] for row in measured]

    result = {
        "experiment": directory.experiment.name,
        "threads": threads,
        "responses": turns.responses,
        "git_commit": git_commit(),
        "rounds": rounds,
        "seconds": {name: median(column(name, "seconds")) for name in ("dvp", *PEERS)},
        "tokens": {name: median(column(name, "tokens")) for name in ("dvp", *PEERS)},
        "over_dvp": {
            name: [a / b for a, b in zip(column(name, "seconds"), column("dvp", "seconds"), strict=True)]
            for name in PEERS
        },
    }
    write_json(output, result)
    print(format_table(result))


def format_table(result: dict) -> str:
    """Format the seconds as text, a line for each product."""
    lines = [f"{result['experiment']}: {result['responses']} responses per step, {result['threads']} threads"]
    lines.append(f"{'dvp':<32}{result['seconds']['dvp']:>7.1f} s/step")
    for name, title in PEERS.items():
        ratios = result["over_dvp"][name]
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"{title:<32}{result['seconds'][name]:>7.1f} s/step  {median(ratios):.2f} times dvp's {spread}")
    return "\n".join(lines)


class _Turns:
    """Takes a step of each other product after one of TRL's, and keeps the seconds and sampled tokens of all."""

    def __init__(self, directory: ExperimentDir, rounds: int):
        """Keep what `prepare` needs; no model is loaded yet."""
        settings = directory.experiment.training
        self.directory, self.rounds = directory, rounds
        self.responses = settings.prompts_per_step * settings.group_size
        self.rows: list[dict[str, dict[str, float]]] = []
        self.trl_tokens = 0
        self.loop: Loop | None = None

    def prepare(self) -> None:
        """Load this project's trainer and engine, and the bare trainer."""
        self.loop = loops_of(self.directory)["plain"]
        self.bare = PlainTransformers(self.directory.base, self.directory.experiment)

    def take(self, trl_seconds: float) -> None:
        """Add a round, TRL's step of which took so many seconds."""
        row = {"TRL": {"seconds": trl_seconds, "tokens": self.trl_tokens}}
        for name, product in (("dvp", self._own), ("bare", self._bare)):
            started = timer()
            tokens = product(FIRST + len(self.rows))
            row[name] = {"seconds": timer() - started, "tokens": tokens}
        self.rows.append(row)
        said = ", ".join(f"{name} {one['seconds']:.1f} s for {one['tokens']} tokens" for name, one in row.items())
        print(f"round {len(self.rows)} of {WARM_UP + self.rounds}: {said}", file=sys.stderr)

    def _own(self, step: int) -> int:
        row = self.loop.step(step)
        return round(row["response_tokens_mean"] * self.responses)

    def _bare(self, step: int) -> int:
        loop, settings = self.loop, self.loop.config
        rows = prompt_rows(len(loop.problems.prompts), settings.prompts_per_step, step, loop.run.seed)
        loop.engine.load_weights(loop.trainer.weights())
        groups = vllm_alone(loop, rows, step)
        rewards_PG = torch.tensor(
            [
                [grade(one.text, loop.problems.answers[row]) for one in group]
                for row, group in zip(rows, groups, strict=True)
            ]
        ).float()
        prompts = [loop.problems.prompts[row] for row in rows for _ in range(settings.group_size)]
        batch = Batch.collate(prompts, [list(one.token_ids) for group in groups for one in group], loop.problems.pad)
        advantage_B = (rewards_PG - rewards_PG.mean(dim=1, keepdim=True)).flatten()
        self.bare.update(batch, advantage_B[:, None] * batch.response_BT)
        return int(batch.response_BT.sum())


def _grpo_trainer(directory: ExperimentDir, folder: Path, steps: int, turns: _Turns) -> "trl.GRPOTrainer":
    """Create TRL's trainer of the same model, prompts, rewards and sizes, with its defaults for all else."""
    import pandas as pd
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    experiment: Experiment = directory.experiment
    settings = experiment.training
    problems = pd.read_parquet(directory.data / "train.parquet")

    class InTurn(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.started = timer()

        def on_step_end(self, args, state, control, **kwargs):
            turns.take(timer() - self.started)

    def reward(completions, answer, completion_ids, **kwargs):
        turns.trl_tokens = sum(map(len, completion_ids))
        return [float(grade(text, expected)) for text, expected in zip(completions, answer, strict=True)]

    options = trl.GRPOConfig(
        output_dir=str(folder),
        use_cpu=not torch.cuda.is_available(),
        bf16=experiment.trainer_dtype == "bfloat16",
        learning_rate=0.0,
        temperature=settings.temperature,
        num_generations=settings.group_size,
        max_completion_length=settings.max_response_tokens,
        per_device_train_batch_size=settings.group_size,
        gradient_accumulation_steps=settings.prompts_per_step,
        max_steps=steps,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    return trl.GRPOTrainer(
        model=str(directory.base),
        reward_funcs=reward,
        args=options,
        train_dataset=Dataset.from_dict({"prompt": list(problems["prompt"]), "answer": list(problems["answer"])}),
        processing_class=AutoTokenizer.from_pretrained(directory.base),
        callbacks=[InTurn()],
    )


if __name__ == "__main__":
    run(bench, "Measure a training step against TRL, vLLM and transformers.", Path("results/bench/trl_step.json"), 6)
