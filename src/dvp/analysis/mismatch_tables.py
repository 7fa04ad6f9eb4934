"""The tables of the stage `mismatch`: engines, and safe sets; at full precision, and formatted with notes."""

import math

import pandas as pd

from dvp.analysis import bootstrap
from dvp.analysis.formats import EMPTY, Formatted, rho_text
from dvp.analysis.mismatch_inputs import Measurements
from dvp.analysis.mismatch_statistics import TAIL
from dvp.analysis.statistics import Statistic
from dvp.experiment.config import Experiment

# Of engines_table: heading, statistic, what else it is of, format.
ENGINES = (
    ("σ(ε)", "epsilon_sd", {}, ".2g"),
    ("KL", "kl", {}, ".2g"),
    ("KL, self-noise bf16", "self_noise_kl", {"control": "bf16"}, ".2g"),
    ("KL, self-noise shape", "self_noise_kl", {"control": "shape"}, ".2g"),
    ("max |log ratio|", "max_abs_log_ratio", {}, ".2g"),
    ("tail over head", "tail_over_head", {}, ".2g"),
    ("self-noise bf16", "self_noise_tail_over_head", {"control": "bf16"}, ".2g"),
    ("E_q[d], tail", "tail_mean", {"weighting": "infer"}, "+.2g"),
    ("mode of d, tail, by q", "tail_mode", {"weighting": "infer"}, "+.2g"),
    ("by p", "tail_mode", {"weighting": "train"}, "+.2g"),
    ("P(d > 0)", "d_positive", {}, ".3f"),
    ("breaks literal bound", "literal_bound_violations", {}, ".1e"),
    ("at most by", "max_over_literal_bound", {}, ".3g"),
    ("breaks sharp bound", "sharp_bound_violations", {}, ".1e"),
)
SAFE_SETS = (
    ("|V_S|", "safe_size", ".4g"),
    ("|V'_S|", "safe_size_infer", ".4g"),
    ("1 − Z", "pruned_mass", ".2g"),
    ("Σ_t (1 − Z_t)", "pruned_mass_per_response", ".2g"),
    ("J_mp − J", "objective_change", "+.2g"),
    ("|J_mp − J| / bound", "objective_change_over_bound", ".2g"),
    ("Jaccard", "jaccard", ".3f"),
    ("V'_S in V_S", "infer_in_train", ".3f"),
    ("outside V_S", "outside_safe", ".2g"),
)


def tables(
    experiment: Experiment, every: list[Measurements], statistics: list[Statistic]
) -> dict[str, tuple[pd.DataFrame, Formatted]]:
    """engines_table, a row a policy and engine; safe_sets_table, a row for each ρ of these.

    The frames have each value under its heading, and its interval under the same with ` low` and ` high`, NaN where
    there is none.
    """
    known = {(one.name, frozenset(one.where.items())): one for one in statistics}
    labels = {measurements.policy: policy_label(experiment, measurements.policy) for measurements in every}
    rows, texts = [], []
    safe_rows, safe_texts = [], []
    for measurements in every:
        first = {"policy": measurements.policy, "engine": measurements.engine}
        found = [(heading, known.get(_key(name, first | more)), spec) for heading, name, more, spec in ENGINES]
        rows.append(first | _numbers(found))
        texts.append([labels[measurements.policy], measurements.engine, *(_text(one, spec) for _, one, spec in found)])
        for rho in experiment.mismatch.rhos:
            where = first | {"rho": rho}
            found = [(heading, known.get(_key(name, where)), spec) for heading, name, spec in SAFE_SETS]
            for margin in experiment.mismatch.margins:
                more = {"margin": f"{margin:g}", "side": "trainer"}
                one = known.get(_key("outside_safe_margin", where | more))
                found.append((f"with ε̂ = {margin:g}", one, ".2g"))
            safe_rows.append(where | _numbers(found))
            safe_texts.append(
                [
                    labels[measurements.policy],
                    measurements.engine,
                    rho_text(rho),
                    *(_text(one, spec) for _, one, spec in found),
                ]
            )
    margins = [f"with ε̂ = {margin:g}" for margin in experiment.mismatch.margins]
    return {
        "engines_table": (
            pd.DataFrame(rows),
            Formatted(
                f"{experiment.name}: the mismatch between trainer and engine, over the whole vocabulary",
                ["policy", "engine", *(heading for heading, *_ in ENGINES)],
                texts,
                [*_notes(experiment), *_engine_notes()],
            ),
        ),
        "safe_sets_table": (
            pd.DataFrame(safe_rows),
            Formatted(
                f"{experiment.name}: the safe vocabularies of trainer and engine",
                ["policy", "engine", "ρ", *(heading for heading, *_ in SAFE_SETS), *margins],
                safe_texts,
                [*_notes(experiment), *_safe_set_notes()],
            ),
        ),
    }


def policy_label(experiment: Experiment, policy: str) -> str:
    """How a policy is called: an arm by its method, engine and ρ."""
    for one in experiment.mismatch.policies:
        if one != "base" and one.path == policy:
            rho = "" if one.rho is None else f", ρ = {rho_text(one.rho)}"
            return f"after {experiment.methods[one.method].label}, {one.engine}{rho}"
    return "base model"


def _key(name: str, where: dict[str, str]) -> tuple:
    return name, frozenset(where.items())


def _numbers(found: list[tuple[str, Statistic | None, str]]) -> dict[str, float]:
    row = {}
    for heading, one, _ in found:
        value, low, high = (one.value, one.low, one.high) if one else (math.nan,) * 3
        row |= {heading: value, f"{heading} low": low, f"{heading} high": high}
    return row


def _text(one: Statistic | None, spec: str) -> str:
    if one is None:
        return EMPTY

    def number(value: float) -> str:
        return "0" if value == 0 else f"{value:{spec}}"

    if math.isnan(one.low):
        return number(one.value)
    return f"{number(one.value)} [{number(one.low)}, {number(one.high)}]"


def _notes(experiment: Experiment) -> list[str]:
    settings, seeds = experiment.mismatch, len(experiment.seeds)
    several = bootstrap.resamples_seeds(experiment.seeds)
    return [
        f"Scale: {experiment.scale}",
        f"{settings.problems} training problems × {settings.responses} responses × {seeds} seed{'s' * (seeds > 1)} for "
        "each policy and engine, sampled by the engine from its full vocabulary at temperature 1; all (position, "
        "token) pairs at the visited positions. d = log q − log p, q the engine, p the fp32 trainer.",
        f"[ ]: 95 % bootstrap interval over problems{' and seeds' if several else ', not over seeds'}.",
    ]


def _engine_notes() -> list[str]:
    return [
        "σ(ε): of the difference of the logits over the vocabulary. KL(q‖p), nats per token; self-noise: the same with "
        "the trainer itself in the engine's place, under bf16 autocast, or one response at a time. What the engine "
        "adds is what exceeds it.",
        "tail over head: mean |d| where p < 1e-2 over that where p > 0.5, all pairs alike; any noise of the logits "
        "moves unlikely tokens more, so it is to be held against the same of the trainer's own noise.",
        f"tail: p in ({TAIL[0]:g}, {TAIL[1]:g}], weighted by the engine's probabilities, or (by p) by the trainer's. "
        "P(d > 0): of the sampled tokens.",
        "Bounds: fractions of the pairs that exceed 2 ε_max (1 − p) (literal, Prop. 4.2), and the sharp pair, by more "
        "than rounding; ε_max is half the range of d over the vocabulary at the position. At most by: the largest |d| "
        "over the literal bound that it breaks.",
    ]


def _safe_set_notes() -> list[str]:
    return [
        "V_S, V'_S: safe vocabularies of trainer and engine. 1 − Z: probability that the trainer prunes, mean over the "
        "positions; Σ_t (1 − Z_t): per response.",
        "J_mp − J: change of the expected reward (0 to 1) by pruning, by importance weights; its bound, Prop. 5.5 with "
        "the measured Σ_t (1 − Z_t). What pruning loses is known from responses with a token outside V_S alone; where "
        "ρ is small hardly any is sampled, so that hardly any change is seen, and the interval does not cover that.",
        "outside V_S: share of the tokens of an engine that prunes which the trainer's V_S lacks, exact; with ε̂: where "
        "the trainer prunes at ρ·e^(−2ε̂).",
    ]
