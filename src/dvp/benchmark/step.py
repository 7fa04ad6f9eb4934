"""What a training step costs over the same work without this project, as ratios within one run: `make bench`.

    python -m dvp.benchmark.step --config results/tiny/config.yaml

It takes an experiment whose base model is made, and its own engine, trainer and problems. Beside them stand vLLM as
anybody would call it, and transformers with PyTorch's AdamW and whole logits. What is compared takes turns, round by
round, so that a busy machine slows all of it; ratios are medians over the rounds.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from dvp.cli import quiet
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.folder import ExperimentDir
from dvp.experiment.grid import Run
from dvp.experiment.methods import Method
from dvp.files import write_json
from dvp.provenance import git_commit
from dvp.rollout.vllm import configure_environment

if TYPE_CHECKING:
    from dvp.core.batch import Rollout
    from dvp.training.loop import Loop

PLAIN = Method(label="RLOO", advantage="rloo")
FULL = Method(label="DVP + OTB", advantage="otb", safe_vocabulary="fixed")
RHO = "exp(-13)"
WARM_UP = 2  # rounds that are not counted: libraries take their memory, and choose their kernels
# What each ratio is of, in the order of the table.
RATIOS = {
    "update": "update, tokens/s: this trainer over plain transformers",
    "rollout": "rollout, tokens/s: in the loop over vLLM alone",
    "step": "step, seconds a token: DVP + OTB + diagnostics over plain log-probs",
}


def bench(config: Path, output: Path, rounds: int, threads: int) -> None:
    """Measure, print the table, write the JSON file. Raises DvpError if the experiment's base model is not made."""
    configure_environment(threads)
    torch.set_num_threads(threads)
    directory = ExperimentDir(config)
    if not directory.result("base").is_file():
        raise DvpError(f"{directory.result('base')}: no such file; `dvp base` makes the model to measure with")
    plain, full = _loops(directory)
    rival = PlainTransformers(directory.base, directory.experiment)
    measured = [_round(plain, full, rival, step) for step in range(1, WARM_UP + rounds + 1)][WARM_UP:]
    settings = directory.experiment.training
    result = {
        "experiment": directory.experiment.name,
        "threads": threads,
        "responses": settings.prompts_per_step * settings.group_size,
        "git_commit": git_commit(),
        "rounds": rounds,
        "ratios": {
            name: {"median": median(values), "values": values}
            for name in RATIOS
            for values in [[turn[name] for turn in measured]]
        },
        "padding": median(turn["padding"] for turn in measured),
        "seconds": {name: median(turn["seconds"][name] for turn in measured) for name in measured[0]["seconds"]},
    }
    write_json(output, result)
    print(format_table(result))
    print(f"\nwritten to {output}")


def format_table(result: dict) -> str:
    """The ratios as text, a line each: median (lowest to highest)."""
    lines = [
        f"{result['experiment']}: {result['responses']} responses a step, {result['threads']} threads; "
        f"{result['rounds']} rounds",
        "",
        f"{'':<72}{'ratio':>6}{'(range)':>15}",
    ]
    for name, title in RATIOS.items():
        ratio = result["ratios"][name]
        low, high = min(ratio["values"]), max(ratio["values"])
        lines.append(f"{title:<72}{ratio['median']:>6.2f}{f'({low:.2f}–{high:.2f})':>15}")
    return "\n".join([*lines, f"padding is {result['padding']:.1%} of the positions that the trainer computes"])


class PlainTransformers:
    """The update as transformers and PyTorch alone do it: whole logits, log-probs of the sampled tokens, AdamW."""

    def __init__(self, base: Path, experiment: Experiment):
        from transformers import AutoModelForCausalLM

        self._settings = experiment.training
        self._model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self._model.to("cuda" if torch.cuda.is_available() else "cpu")
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=self._settings.learning_rate, weight_decay=self._settings.weight_decay
        )

    def _log_prob(self, rollout: "Rollout", rows_b: torch.Tensor) -> torch.Tensor:
        """log p of the response tokens, flattened."""
        batch = rollout.batch.rows(rows_b).to(self._model.device)
        logits_bTV = self._model(batch.tokens_BT[:, :-1], use_cache=False).logits.float() / self._settings.temperature
        log_prob_bT = logits_bTV.log_softmax(dim=2).gather(2, batch.tokens_BT[:, 1:, None])[..., 0]
        return log_prob_bT[batch.response_BT[:, 1:]]

    def update(self, rollout: "Rollout", coefficient_BT: torch.Tensor) -> None:
        """The old log-probs of all responses, the gradient of those with a coefficient, a step."""
        tokens, batch = self._settings.tokens_per_micro_batch, rollout.batch
        with torch.no_grad():
            for rows_b in batch.micro_batches(tokens):
                self._log_prob(rollout, rows_b)
        self._optimizer.zero_grad()
        for rows_b in batch.micro_batches(tokens, coefficient_BT.any(dim=1).nonzero()[:, 0]):
            coefficient_N = coefficient_BT[rows_b][batch.response_BT[rows_b]].to(self._model.device)
            (-(coefficient_N * self._log_prob(rollout, rows_b)).sum()).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()


def _loops(directory: ExperimentDir) -> tuple["Loop", "Loop"]:
    """The loops of naive RLOO and of DVP + OTB, on one trainer and one engine."""
    import pandas as pd
    from transformers import AutoTokenizer

    from dvp.training.loop import Loop
    from dvp.training.responses import ResponseRecorder
    from dvp.training.stage import set_up

    experiment = directory.experiment
    methods = {"bench_plain": PLAIN, "bench_full": FULL}
    directory.experiment = experiment.model_copy(update={"methods": experiment.methods | methods})
    engine = experiment.runs[0].engine
    full, _ = set_up(directory, Run(method="bench_full", engine=engine, rho=RHO, seed=0))
    problems = pd.DataFrame({"id": full.ids, "answer": full.problems.answers})
    plain = Loop(
        directory.experiment,
        Run(method="bench_plain", engine=engine, rho=None, seed=0),
        problems,
        full.problems.prompts,
        full.problems.pad,
        full.trainer,
        full.engine,
        ResponseRecorder(
            experiment.training.keep_responses,
            experiment.training.steps,
            AutoTokenizer.from_pretrained(directory.base),
        ),
    )
    return plain, full


def _round(plain: "Loop", full: "Loop", rival: PlainTransformers, step: int) -> dict[str, Any]:
    """The ratios of one step's work, each way."""
    from dvp.training.rollouts import prompt_rows

    settings = plain.config
    rows = prompt_rows(len(plain.problems.prompts), settings.prompts_per_step, step, seed=0)
    seconds, tokens = {}, {}

    def timed(name: str, function: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - started
        return result

    for name, sample in {
        "rollout, vLLM alone": lambda: _vllm_alone(plain, rows, step),
        "rollout": lambda: plain.sample(step, rows),
        "rollout, DVP": lambda: full.sample(step, rows),
    }.items():
        # On a GPU the engine sleeps without its weights; and prompts that it has seen would be in its cache.
        full.engine.load_weights(full.trainer.weights())
        groups = timed(name, sample)
        tokens[name] = sum(len(completion.token_ids) for group in groups for completion in group)
    # All learn from the same responses: those that DVP's engine sampled.
    rollout = full.problems.graded(rows, groups)
    for name, loop in {"": plain, ", DVP + OTB": full}.items():
        coefficient_BT = loop.prepare(rollout, loop.score(rollout)).coefficients()
        timed(f"update, plain transformers{name}", partial(rival.update, rollout, coefficient_BT))
        timed(f"update{name}", partial(loop.learn, step, rows, rollout))

    def a_token(name: str) -> float:
        return seconds[name] / tokens[name]

    count = tokens["rollout, DVP"]
    print(f"round {step}: {count} tokens, {sum(seconds.values()):.1f} s", file=sys.stderr)
    lengths_B = rollout.batch.lengths()
    passes = rollout.batch.micro_batches(settings.tokens_per_micro_batch)
    computed = sum(len(rows_b) * int(lengths_B[rows_b].max()) for rows_b in passes)
    return {
        "update": seconds["update, plain transformers"] / seconds["update"],
        "rollout": a_token("rollout, vLLM alone") / a_token("rollout"),
        "step": (a_token("rollout, DVP") + seconds["update, DVP + OTB"] / count)
        / (a_token("rollout, vLLM alone") + seconds["update, plain transformers, DVP + OTB"] / count),
        "padding": 1 - lengths_B.sum().item() / computed,
        "seconds": seconds,
    }


def _vllm_alone(loop: "Loop", rows: list[int], step: int) -> list:
    """The same requests to vLLM as anybody would make them: its own defaults, and the log-probs of what it sampled."""
    from vllm import SamplingParams

    from dvp.rollout.seeds import derived_seed

    settings = loop.config
    outputs = loop.engine.llm.generate(
        [{"prompt_token_ids": loop.problems.prompts[row]} for row in rows],
        [
            SamplingParams(
                n=settings.group_size,
                temperature=settings.temperature,
                max_tokens=settings.max_response_tokens,
                seed=derived_seed(loop.run.seed, step, row) % 2**62,
                logprobs=0,
            )
            for row in rows
        ],
        use_tqdm=False,
    )
    return [output.outputs for output in outputs]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure a training step against plain vLLM and transformers.")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="results/EXPERIMENT/config.yaml")
    parser.add_argument("--output", type=Path, metavar="FILE", default=Path("results/bench/step.json"))
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="steps that are timed (default: 8)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="processor threads (default: 1)")
    options = parser.parse_args()
    for name in ("rounds", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected 1 or more")
    quiet()
    try:
        bench(options.config, options.output, options.rounds, options.threads)
    except DvpError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
