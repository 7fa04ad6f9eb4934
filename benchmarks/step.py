"""Cost of a training step relative to the same work without this project, as ratios within one run: `make bench`.

    python benchmarks/step.py --config results/tiny/config.yaml

It takes an experiment whose base model exists, with its engine, trainer and problems. They are compared with vLLM's own
API, and with transformers with PyTorch's AdamW and whole logits. A step with plain log-probs and one with DVP, OTB and
all diagnostics use the same engine and trainer, and learn from the same responses. The learning rate is 0, so that the
model is the same in every round.

The variants take turns, in an order that rotates from round to round, so that a busy machine slows all of them; ratios
are medians over the rounds.

It also measures an alternative that training does not use: to differentiate the forward pass from which the weights are
computed, in place of a scoring pass and an update.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import ge, le
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
import torch
from torch.utils.benchmark import timer  # waits for the GPU

from dvp.cli import quiet
from dvp.core.batch import Batch, Rollout, unflatten
from dvp.core.objective import policy_loss
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.folder import ExperimentDir
from dvp.experiment.grid import Run
from dvp.experiment.methods import Method
from dvp.files import write_json
from dvp.provenance import git_commit
from dvp.rollout.seeds import derived_seed
from dvp.rollout.vllm import configure_environment
from dvp.training.rollouts import prompt_rows
from dvp.training.stage import set_up

if TYPE_CHECKING:
    from dvp.training.loop import Loop

METHODS = {
    "plain": Method(label="RLOO", advantage="rloo"),
    "mis": Method(label="RLOO + MIS", advantage="rloo", importance="mis"),
    "full": Method(label="DVP + OTB", advantage="otb", safe_vocabulary="fixed"),
}
WARM_UP = 2  # rounds that are not counted: libraries allocate memory and choose kernels


class Target(NamedTuple):
    """Title of a ratio and its target."""

    title: str
    sign: str
    bound: float

    def of(self, ratio: dict) -> dict:
        """Return the ratio with its target and whether its median meets it."""
        met = {"≥": ge, "≤": le}[self.sign](ratio["median"], self.bound)
        return {"target": f"{self.sign} {self.bound:g}", "met": met} | ratio


# In the order of the table.
TARGETS = {
    "update": Target("update, tokens/s: this trainer over plain transformers", "≥", 1.0),
    "rollout": Target("rollout, tokens/s: in the loop over vLLM alone", "≥", 0.9),
    "step": Target("whole step, seconds a token: DVP + OTB + diagnostics over plain log-probs", "≤", 1.05),
    "padding": Target("padding: share of the positions that the trainer computes", "≤", 0.05),
}
ONE_PASS = {
    "all": "one pass over all responses",
    "all, all useful": "the same, if all responses are useful",
    "advantage": "one pass over those with an advantage; the others are scored",
    "advantage, half rejected": "the same, if the correction rejects half of them",
}


def bench(config: Path, output: Path, rounds: int, threads: int) -> None:
    """Measure, print the table and write the JSON file. Raises DvpError if the base model does not exist."""
    configure_environment(threads)
    torch.set_num_threads(threads)
    directory = experiment_of(config)
    loops = loops_of(directory)
    rival = PlainTransformers(directory.base, directory.experiment)
    measured = [_round(loops, rival, step) for step in range(1, WARM_UP + rounds + 1)][WARM_UP:]
    settings = directory.experiment.training

    def summary(values: list[float]) -> dict[str, Any]:
        return {"median": median(values), "values": values}

    def medians(name: str) -> dict[str, float]:
        return {key: median(turn[name][key] for turn in measured) for key in measured[0][name]}

    result = {
        "experiment": directory.experiment.name,
        "threads": threads,
        "responses": settings.prompts_per_step * settings.group_size,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "git_commit": git_commit(),
        "rounds": rounds,
        "ratios": {name: target.of(summary([turn[name] for turn in measured])) for name, target in TARGETS.items()},
        "one_pass": {name: summary([turn["one_pass"][name] for turn in measured]) for name in ONE_PASS},
        "forward": summary([turn["forward"] for turn in measured]),
        "useful": medians("useful"),
        "gradient_difference": max(turn["gradient_difference"] for turn in measured),
        "seconds": medians("seconds"),
        "last_round": {"padding": measured[-1]["padding"], "lengths": measured[-1]["lengths"]},
    }
    write_json(output, result)
    print(f"{format_table(result)}\n\nwritten to {output}")


def format_table(result: dict) -> str:
    """Format the ratios as text, a line each: median (lowest to highest), target, and whether the median meets it."""

    def line(title: str, ratio: dict) -> str:
        spread = f"({min(ratio['values']):.3f}–{max(ratio['values']):.3f})"
        met = f"{ratio['target']:>9}{'yes' if ratio['met'] else 'no':>5}" if "target" in ratio else ""
        return f"{title:<78}{ratio['median']:>7.3f}{spread:>16}{met}"

    lines = [
        f"{result['experiment']}: {result['responses']} responses a step, {result['threads']} threads; "
        f"{result['rounds']} rounds",
        "",
        f"{'':<78}{'ratio':>7}{'(range)':>16}{'target':>9}{'met':>5}",
        *(line(target.title, result["ratios"][name]) for name, target in TARGETS.items()),
        "",
        "a scoring pass and an update, as training does it, over (above 1: one pass would be faster)",
        *(line(f"  {title}", result["one_pass"][name]) for name, title in ONE_PASS.items()),
        line("a scoring pass over a forward and backward pass, all responses", result["forward"]),
    ]
    shares = "{advantage:.0%} of the responses have an advantage, MIS keeps {mis:.0%}"
    return "\n".join([*lines, shares.format(**result["useful"])])


class PlainTransformers:
    """Update with transformers and PyTorch alone: whole logits, log-probs of the sampled tokens, AdamW."""

    def __init__(self, base: Path, experiment: Experiment):
        """Load the base model in fp32 and create its optimiser with the experiment's training settings."""
        from transformers import AutoModelForCausalLM

        self._settings, self._bf16 = experiment.training, experiment.trainer_dtype == "bfloat16"
        self._model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self._model.to("cuda" if torch.cuda.is_available() else "cpu")
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=self._settings.learning_rate, weight_decay=self._settings.weight_decay
        )

    def _log_prob(self, whole: Batch, rows_b: torch.Tensor) -> torch.Tensor:
        """Return log p of the response tokens of some rows, flattened to (N,)."""
        batch = whole.rows(rows_b).to(self._model.device)
        with torch.autocast(self._model.device.type, torch.bfloat16, enabled=self._bf16):
            logits_bTV = self._model(batch.tokens_BT[:, :-1], use_cache=False).logits
        logits_bTV = logits_bTV.float() / self._settings.temperature
        log_prob_bT = logits_bTV.log_softmax(dim=2).gather(2, batch.tokens_BT[:, 1:, None])[..., 0]
        return log_prob_bT[batch.response_BT[:, 1:]]

    def update(self, batch: Batch, coefficient_BT: torch.Tensor) -> None:
        """Compute the old log-probs of all responses and the gradient of those with a coefficient; take a step."""
        tokens = self._settings.tokens_per_micro_batch
        with torch.no_grad():
            for rows_b in batch.micro_batches(tokens):
                self._log_prob(batch, rows_b)
        self._optimizer.zero_grad()
        for rows_b in batch.micro_batches(tokens, coefficient_BT.any(dim=1).nonzero()[:, 0]):
            coefficient_N = coefficient_BT[rows_b][batch.response_BT[rows_b]].to(self._model.device)
            (-(coefficient_N * self._log_prob(batch, rows_b)).sum()).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()


def loops_of(directory: ExperimentDir) -> dict[str, "Loop"]:
    """Build a loop for each of METHODS on one trainer and one engine; only the full one has diagnostics."""
    experiment = directory.experiment
    methods = experiment.methods | {f"bench_{name}": method for name, method in METHODS.items()}
    training = experiment.training.model_copy(update={"learning_rate": 0.0})
    directory.experiment = experiment.model_copy(update={"methods": methods, "training": training})
    run = Run(method="bench_full", engine=experiment.runs[0].engine, rho="exp(-13)", seed=0)
    full, _ = set_up(directory, run)
    problems = pd.DataFrame({"id": full.ids, "answer": full.problems.answers})
    shared = problems, full.problems.prompts, full.problems.pad, full.trainer, full.engine, full.recorder
    bare = {
        name: type(full)(directory.experiment, run.model_copy(update={"method": f"bench_{name}", "rho": None}), *shared)
        for name in ("plain", "mis")
    }
    return bare | {"full": full}


def _learn(loop: "Loop", rollout: Rollout) -> None:
    """Score the responses and update the weights, without diagnostics."""
    loop._update(rollout, loop.score(rollout))


def _round(loops: dict[str, "Loop"], rival: PlainTransformers, step: int) -> dict[str, Any]:
    """Time one step's work with each variant and return the ratios."""
    plain, mis, full = loops.values()
    settings = plain.config
    rows = prompt_rows(len(plain.problems.prompts), settings.prompts_per_step, step, seed=0)
    seconds: dict[str, float] = {}

    def timed(name: str, function: Callable[[], Any]) -> Any:
        started = timer()
        result = function()
        seconds[name] = timer() - started
        return result

    groups, rollouts = {}, {}
    samplers = {"vLLM alone": partial(vllm_alone, plain, rows, step)}
    samplers |= {name: partial(loops[name].sample, step, rows) for name in ("plain", "full")}
    for name, sample in _rotated(samplers, step):
        # On a GPU the engine sleeps without its weights. Loading them also clears prompts it has seen from its cache.
        timed(f"weights, {name}", lambda: full.engine.load_weights(full.trainer.weights()))
        groups[name] = timed(f"rollout, {name}", sample)
        if name in loops:
            rollouts[name] = timed(f"reward, {name}", partial(full.problems.graded, rows, groups[name]))
    tokens = {name: sum(len(one.token_ids) for group in value for one in group) for name, value in groups.items()}

    # All learn from the same responses, those sampled with DVP. All-correct groups count as all-incorrect: OTB has an
    # advantage for the longest correct response even there, RLOO has none, and both must update from as many responses.
    rollout = rollouts["full"]
    wrong_PG = rollout.rewards_B.reshape(-1, settings.group_size) == 0
    mixed_B = wrong_PG.any(dim=1).repeat_interleave(settings.group_size)
    rollout = replace(rollout, rewards_B=rollout.rewards_B * mixed_B)
    apart, rollout = rollout, replace(rollout, batch=full.trainer.sharing_prompts(rollout.batch))
    updates = {name: loop.prepare(rollout, loop.score(rollout)) for name, loop in loops.items()}
    useful_B = {name: update.coefficients().any(dim=1) for name, update in updates.items()}
    advantage_BT = updates["mis"].advantage_BT
    useful_B = {"advantage": advantage_BT.any(dim=1)} | useful_B
    every_B = torch.ones_like(useful_B["advantage"])
    # Two more variants: every other response is correct, so that all have an advantage; every other one has a log-prob
    # that MIS rejects.
    other_B = torch.arange(len(every_B)) % 2 == 0
    all_useful = replace(rollout, rewards_B=other_B.to(rollout.rewards_B.dtype))
    rejected_BT = 10.0 * (other_B[:, None] & rollout.batch.response_BT)
    half_rejected = replace(rollout, infer_log_prob_BT=rollout.infer_log_prob_BT - rejected_BT)
    norms = {}
    for name, update in _rotated(
        {
            "plain transformers": partial(rival.update, apart.batch, updates["plain"].coefficients()),
            "plain": partial(_learn, plain, rollout),
            "full": partial(full.learn, step, rows, rollout),
            "scoring": partial(mis.score, rollout),
            "two passes": partial(_learn, mis, rollout),
            "two passes, all useful": partial(_learn, mis, all_useful),
            "two passes, half rejected": partial(_learn, mis, half_rejected),
            "one pass, all": partial(_one_pass, mis, rollout, advantage_BT, every_B),
            "one pass, advantage": partial(_one_pass, mis, rollout, advantage_BT, useful_B["advantage"]),
        },
        step,
    ):
        timed(f"update, {name}", update)
        norms[name] = mis.trainer.gradient_norm

    def a_token(name: str) -> float:
        """Return the seconds per token of a whole step, whose update is on the shared responses."""
        own = sum(seconds[f"{part}, {name}"] for part in ("weights", "rollout", "reward"))
        return own / tokens[name] + seconds[f"update, {name}"] / tokens["full"]

    print(f"round {step}: {tokens['full']} tokens, {sum(seconds.values()):.1f} s", file=sys.stderr)
    lengths_B = apart.batch.lengths()
    passes = apart.batch.micro_batches(settings.tokens_per_micro_batch)
    computed = sum(len(rows_b) * int(lengths_B[rows_b].max()) for rows_b in passes)
    two, one = "update, two passes", "update, one pass"
    return {
        "update": seconds["update, plain transformers"] / seconds["update, plain"],
        "rollout": seconds["rollout, vLLM alone"] / tokens["vLLM alone"] * tokens["plain"] / seconds["rollout, plain"],
        "step": a_token("full") / a_token("plain"),
        "padding": 1 - lengths_B.sum().item() / computed,
        "one_pass": {
            "all": seconds[two] / seconds[f"{one}, all"],
            "all, all useful": seconds[f"{two}, all useful"] / seconds[f"{one}, all"],
            "advantage": seconds[two] / seconds[f"{one}, advantage"],
            "advantage, half rejected": seconds[f"{two}, half rejected"] / seconds[f"{one}, advantage"],
        },
        "forward": seconds["update, scoring"] / seconds[f"{one}, all"],
        "useful": {name: value_B.float().mean().item() for name, value_B in useful_B.items()},
        # The gradient is the same in one pass or two; there is none if MIS keeps nothing.
        "gradient_difference": abs(norms["one pass, all"] / norms["two passes"] - 1) if useful_B["mis"].any() else 0.0,
        "lengths": lengths_B.tolist(),
        "seconds": seconds,
    }


def _rotated(variants: dict[str, Callable[[], Any]], step: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the variants in the order of this round: each comes first in its turn."""
    items = list(variants.items())
    start = step % len(items)
    yield from items[start:] + items[:start]


def _one_pass(loop: "Loop", rollout: Rollout, advantage_BT: torch.Tensor, rows_B: torch.Tensor) -> None:
    """Update with importance weights from the same forward pass that is differentiated.

    rows_B : the responses that are differentiated, also those whose advantage is 0. The others are only scored, because
        diagnostics cover all responses. The correction must weight each response independently of the others.
    """
    device = loop.trainer.device
    if not rows_B.all():
        loop.trainer.score(rollout.batch.rows((~rows_B).nonzero()[:, 0]), loop.safe.trainer)
    parts = rollout.batch.micro_batches(loop.config.tokens_per_micro_batch, rows_B.nonzero()[:, 0])
    for index, rows_b in enumerate(parts):
        part, batch = rollout.rows(rows_b), rollout.batch.rows(rows_b)
        width = batch.tokens_BT.shape[1]
        mask_bT = batch.response_BT.to(device)
        advantage_bT = advantage_BT[rows_b, :width].to(device)

        def loss(now, part=part, width=width, mask_bT=mask_bT, advantage_bT=advantage_bT):
            log_prob_bT = unflatten(now.pruned_log_prob, mask_bT)
            old_bT, safe_bT = torch.zeros(part.infer_log_prob_BT.shape), torch.ones_like(part.batch.response_BT)
            old_bT[:, :width] = log_prob_bT.detach().cpu()
            safe_bT[:, :width] = unflatten(now.target_in_safe, mask_bT).cpu()
            statistics = {"pruned_log_prob": old_bT, "target_in_safe": safe_bT}
            weight_bT = loop.importance.weights(part, statistics).weight_BT[:, :width].to(device)
            old_bT, count = log_prob_bT.detach(), len(rollout.rewards_B)
            return policy_loss(loop.loss, log_prob_bT, old_bT, weight_bT, advantage_bT, mask_bT, count).loss

        loop.trainer.forward_backward(batch, loop.safe.trainer, loss, last=index == len(parts) - 1)


def vllm_alone(loop: "Loop", rows: list[int], step: int) -> list:
    """Send the same requests to vLLM's own API, with its defaults and the log-probs of the sampled tokens."""
    from vllm import SamplingParams

    settings = loop.config
    asked = {"n": settings.group_size, "temperature": settings.temperature, "logprobs": 0}
    asked["max_tokens"] = settings.max_response_tokens
    outputs = loop.engine.llm.generate(
        [{"prompt_token_ids": loop.problems.prompts[row]} for row in rows],
        [SamplingParams(**asked, seed=derived_seed(loop.run.seed, step, row) % 2**62) for row in rows],
        use_tqdm=False,
    )
    return [output.outputs for output in outputs]


def run(measure: Callable[[Path, Path, int, int], None], description: str, output: Path, rounds: int) -> None:
    """Read --config, --output, --rounds and --threads, of which two have these defaults, and measure.

    Exits with a line if an option, the experiment or its base model is not as expected.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="results/EXPERIMENT/config.yaml")
    parser.add_argument("--output", type=Path, metavar="FILE", default=output)
    parser.add_argument(
        "--rounds", type=int, default=rounds, metavar="N", help=f"steps that are timed (default: {rounds})"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="processor threads (default: 1)")
    options = parser.parse_args()
    for name in ("rounds", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected 1 or more")
    quiet()
    try:
        measure(options.config, options.output, options.rounds, options.threads)
    except DvpError as error:
        sys.exit(f"error: {error}")


def experiment_of(config: Path) -> ExperimentDir:
    """Return the folder of an experiment. Raises DvpError if its base model does not exist."""
    directory = ExperimentDir(config)
    if not directory.result("base").is_file():
        raise DvpError(f"{directory.result('base')}: no such file; `dvp base` makes the model to measure with")
    return directory


if __name__ == "__main__":
    run(bench, "Measure a training step against plain vLLM and transformers.", Path("results/bench/step.json"), 8)
