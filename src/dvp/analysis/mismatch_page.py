"""Make the table and the page of `dvp mismatch --model`, which say whether engine and trainer are too far apart.

Both come from a Stack: one row per sampled token, from a measurement, a file or a server, and tables over the whole
vocabulary if it was measured. Shape suffixes: N tokens, B simulated responses, T their tokens.
"""

import base64
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from dvp.analysis.forecast import SIMULATED, forecast
from dvp.analysis.formats import EMPTY, Formatted, to_html
from dvp.analysis.looks import DARK, FAMILIES, GREYS, LINES, STYLE
from dvp.analysis.mismatch_advice import LENGTHS, RULES, Numbers, advice, percent, verdict
from dvp.analysis.responses import visible
from dvp.analysis.statistics import Statistic, without_interval
from dvp.analysis.suspicions import RULES as TESTS
from dvp.analysis.suspicions import suspicions
from dvp.analysis.templating import TEMPLATES
from dvp.core.importance import ImportanceRule
from dvp.errors import DvpError
from dvp.evaluation import bootstrap
from dvp.measurement.files import ENGINE

RESAMPLES = 1000
WORST = 5  # tokens listed per engine
DRAWN = 3000  # tokens drawn per engine
METHODS = {"MIS": "rloo_mis", "TRM": "rloo_trm", "Geo-RS": "rloo_geo_rs", "token TIS": "rloo_tis"}
"""The catalogue's methods whose corrections are forecast; for token TIS, which rejects nothing, the uncut tokens."""
READ = ("tokens", "histogram", "noise", "safe_sets")
"""The tables of a measurement that are shown."""
CONTROLS = {"bf16": "itself, bf16", "shape": "itself, shape"}
"""The controls of a measurement, with the headings of their columns."""


@dataclass(frozen=True)
class Stack:
    """One engine beside a trainer."""

    engine: str
    tokens: pd.DataFrame
    """Columns of dvp.measurement.files.TOKENS, at least response, position, token, log_p and log_q; `text` if known."""
    error: float | None = None
    """See Numbers."""
    limit: float | None = None
    """See Numbers."""
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    """`histogram`, `noise` and `safe_sets` of a measurement over the whole vocabulary; empty without one."""
    left_out: str = ""
    """See Numbers."""

    @property
    def log_ratio_N(self) -> np.ndarray:
        """Return log p − log q of each token, nats."""
        return (self.tokens["log_p"] - self.tokens["log_q"]).to_numpy()

    @property
    def kl_N(self) -> np.ndarray:
        """Return the KL at each position, or its estimate from the sampled token, r − log r − 1; nats."""
        if "kl" in self.tokens:
            return self.tokens["kl"].to_numpy()
        return np.expm1(self.log_ratio_N) - self.log_ratio_N

    def kl(self) -> tuple[float, float, float]:
        """Return the mean KL over tokens and its 95 % bootstrap interval over problems (responses, if only one).

        The interval is NaN if there is a single response.
        """
        problems = self.tokens.get("problem", pd.Series(dtype=object)).nunique()
        unit = "problem" if problems > 1 else "response"
        sums = pd.DataFrame({"unit": self.tokens[unit], "kl": self.kl_N, "tokens": 1.0}).groupby("unit").sum()
        if len(sums) == 1:
            return float(self.kl_N.mean()), math.nan, math.nan
        draws = bootstrap.draws(1, len(sums), RESAMPLES, 0, shared=False)
        kl_R, tokens_R = (draws.count_RU @ sums.to_numpy()).T
        return draws.estimate(kl_R / tokens_R)

    def law(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the distribution of a token's log-ratio: values, and their probabilities.

        If the whole vocabulary is known, all of its tokens count with the engine's probabilities, so that rare ones
        need not have been sampled; otherwise the sampled tokens count.
        """
        if "histogram" not in self.tables:
            return self.log_ratio_N, np.full(len(self.tokens), 1 / len(self.tokens))
        table = self.tables["histogram"]
        sums = table[table["source"] == ENGINE].groupby(["p_low", "d_low"])[["infer", "infer_d"]].sum()
        weight, d = sums[sums["infer"] > 0].to_numpy().T
        return -d / weight, weight / weight.sum()


def numbers(stack: Stack, rules: Mapping[str, ImportanceRule]) -> Numbers:
    """Compute the numbers behind the advice. Forecasts draw tokens independently from `Stack.law`.

    rules : a correction by the name in METHODS. Raises DvpError if engine and trainer have identical log-probs.
    """
    values_N, probability_N = stack.law()
    # Exact for independent tokens: the ESS (E w)² / E w² of a sequence's weight w, the product of its ratios.
    first, second = (np.log(probability_N @ np.exp(power * values_N)) for power in (1, 2))
    noise, outside = {}, {}
    if "noise" in stack.tables:
        own = stack.tables["noise"].groupby("source")[["kl", "tokens"]].sum()
        noise = {source: float(own.loc[source, "kl"] / own.loc[source, "tokens"]) for source in CONTROLS}
        sets = stack.tables["safe_sets"].query("side == 'none'").groupby("rho", sort=False).sum(numeric_only=True)
        outside = {
            rho: (row["kl_outside"] / max(row["kl"], 1e-300), row["squared_score_outside"] / row["squared_score"])
            for rho, row in sets.iterrows()
        }
    tokens = stack.tokens
    response_N = tokens.groupby([*tokens.columns.intersection(["problem"]), "response"], sort=False).ngroup()
    columns = [tokens[name].to_numpy() for name in ("log_q", "log_p")]
    try:
        columns += [stack.kl_N, response_N.to_numpy(), tokens["position"].to_numpy()]
        found = suspicions(*columns, stack.error, stack.limit)
    except DvpError as error:
        raise DvpError(f"{stack.engine}: {error}") from None
    return Numbers(
        engine=stack.engine,
        kl=stack.kl()[0],
        error=stack.error,
        limit=stack.limit,
        noise=noise,
        ess={length: float(np.exp(length * (2 * first - second))) for length in LENGTHS},
        kept=forecast(values_N, probability_N, rules, LENGTHS),
        outside=outside,
        suspicions=found,
        left_out=stack.left_out,
    )


def dispersion(stack: Stack) -> float:
    """Return the variance of responses' summed log-ratios over that of independent tokens."""
    values_N, probability_N = stack.law()
    mean = probability_N @ values_N
    keys = [*stack.tokens.columns.intersection(["problem"]), "response"]
    sums = stack.tokens.assign(value=stack.log_ratio_N - mean).groupby(keys)["value"].agg(["sum", "size"])
    variance = probability_N @ (values_N - mean) ** 2
    return float((sums["sum"] ** 2).sum() / max(variance * sums["size"].sum(), 1e-300))


def estimates(stacks: list[Stack], found: list[Numbers]) -> Iterator[Statistic]:
    """Yield what the page says of each engine: KL, error, forecasts of what is kept, and shares outside V_S."""
    for stack, own in zip(stacks, found, strict=True):
        where, sources = {"engine": own.engine}, (f"{own.engine}/mismatch.json",)
        yield Statistic("kl", where, *stack.kl(), "nats per token", "bootstrap over problems", sources)
        numbers = [("kl_beyond_weights", {}, own.error), ("kl_beyond_weights_limit", {}, own.limit)]
        numbers += [("self_noise_kl", {"control": name}, kl) for name, kl in own.noise.items()]
        numbers += [
            ("kept_forecast", {"correction": name, "length": str(length)}, share)
            for name, by_length in own.kept.items()
            for length, share in by_length.items()
        ]
        for rho, (kl, score) in own.outside.items():
            numbers += [("kl_outside", {"rho": rho}, kl), ("squared_score_outside", {"rho": rho}, score)]
        for name, more, value in numbers:
            if value is not None:
                unit = "nats per token" if "kl" in name and "outside" not in name else "fraction"
                yield without_interval(name, where | more, value, unit, "of all sampled tokens", sources)


def summary(stacks: list[Stack], found: list[Numbers], title: str) -> Formatted:
    """Return the table of the page and the terminal: one row per engine, with its advice as a note."""
    headings = ["engine", "KL per token", *CONTROLS.values(), "beyond its weights", "limit"]
    headings += ["worst token", f"MIS at {LENGTHS[-1]:,}", "outside V_S", "needs"]
    rows, intervals = [], []
    for stack, own in zip(stacks, found, strict=True):
        floor = [f"{own.noise[control]:.2g}" if own.noise else EMPTY for control in CONTROLS]
        numbers = [
            f"{own.kl:.2g}",
            *floor,
            *(EMPTY if value is None else f"{value:.2g}" for value in (own.error, own.limit)),
        ]
        numbers += [f"{np.abs(stack.log_ratio_N).max():.2g}", percent(own.kept["MIS"][LENGTHS[-1]])]
        outside = percent(max(own.outside.values())[0]) if own.outside else EMPTY
        rows.append([stack.engine, *numbers, outside, verdict(own)])
        low, high = stack.kl()[1:]
        intervals.append(f"{stack.engine} [{low:.2g}, {high:.2g}]" if math.isfinite(low) else f"{stack.engine} none")
    note = (
        f"KL(q‖p) of engine q and trainer p, nats; 95 % interval over problems: {'; '.join(intervals)}. "
        "itself: the trainer's own noise, in bf16 and in another batch shape; a finer engine than bf16, such as fp16, "
        "can lie far below the first. beyond its weights: KL from the trainer's forward pass with the engine's own "
        "rounded weights; limit: ten times what its other rounding makes of that pass. worst token: |log p − log q|. "
        "MIS: share of responses that it would keep. outside V_S: share of the KL, at the ρ with most of it."
    )
    return Formatted(title, headings, rows, [*(" ".join(advice(own)) for own in found), note])


def page(
    stacks: list[Stack], found: list[Numbers], rules: Mapping[str, ImportanceRule], title: str, about: Mapping[str, str]
) -> str:
    """Return the page as HTML that loads nothing from elsewhere. `about` is shown as it is: device, model, versions."""
    first = summary(stacks, found, "How far engine and trainer are apart")
    verdicts, notes = first.notes[: len(found)], first.notes[len(found) :]
    tables = [_by_position(stacks), _forecast(stacks, found, rules)]
    tables += [_outside(found)] if all(own.outside for own in found) else []
    tables += [
        Formatted("Rules of the advice", ["rule"], [[rule] for rule in (*TESTS, *RULES)], ["The same for all models."]),
        Formatted("What was measured", ["", ""], list(about.items()), [""]),
    ]
    return TEMPLATES.get_template("mismatch.html.j2").render(
        title=title,
        advice=[(verdict(own), text) for own, text in zip(found, verdicts, strict=True)],
        first=[to_html(first._replace(notes=notes)), to_html(_worst(stacks))],
        picture=_by_probability(stacks),
        tables=map(to_html, tables),
    )


def _worst(stacks: list[Stack]) -> Formatted:
    """List the sampled tokens with the largest |log-ratio|."""
    rows = []
    for stack in stacks:
        order = np.argsort(-np.abs(stack.log_ratio_N), kind="stable")[:WORST]
        for row in stack.tokens.iloc[order].to_dict("records"):
            place = [row.get("problem", EMPTY), row["response"], row["position"] + 1]
            numbers = [row["log_p"] - row["log_q"], math.exp(row["log_p"]), math.exp(row["log_q"])]
            rows.append([stack.engine, visible(repr(row["text"])) if "text" in row else EMPTY, str(row["token"])])
            rows[-1] += [*(f"{number:.3g}" for number in numbers), " / ".join(map(str, place))]
    headings = ["engine", "token", "id", "log p − log q", "p, trainer", "q, engine", "problem / response / position"]
    note = "Below: |log p − log q| against p. Lines are means over the whole vocabulary, each token weighted by q."
    return Formatted("Worst sampled tokens", headings, rows, [note])


def _by_position(stacks: list[Stack]) -> Formatted:
    rows = []
    for stack in stacks:
        keys = [*stack.tokens.columns.intersection(["problem"]), "response"]
        length_N = stack.tokens.groupby(keys)["position"].transform("max") + 1
        kl = pd.Series(stack.kl_N).groupby((4 * stack.tokens["position"] // length_N).to_numpy()).mean()
        rows.append([stack.engine, *(f"{kl.get(quarter, math.nan):.2g}" for quarter in range(4))])
    headings = ["engine", "first quarter", "second", "third", "last"]
    return Formatted("KL by position in the response", headings, rows, ["Means over the tokens, nats."])


def _forecast(stacks: list[Stack], found: list[Numbers], rules: Mapping[str, ImportanceRule]) -> Formatted:
    rows = []
    for own in found:
        shares = own.kept | {"sequence weights (ESS)": own.ess}
        rows += [[own.engine, name, *map(percent, share_L.values())] for name, share_L in shares.items()]
    if all("histogram" in stack.tables for stack in stacks):
        law = "the measured law over the whole vocabulary, each token as likely as the engine samples it"
    else:
        fewest = min(len(stack.tokens) for stack in stacks)
        law = f"the sampled tokens, with replacement: what is rarer than one in {fewest:,} is not in it"
    spread = ", ".join(f"{dispersion(stack):.2g} times ({stack.engine})" for stack in stacks)
    bounds = "; ".join(
        f"{name}: {', '.join(f'{key} {value}' for key, value in rule.model_dump().items() if key != 'kind')}"
        for name, rule in rules.items()
    )
    notes = [
        f"A forecast, by {SIMULATED} simulated responses. Assumed: independent log-ratios, drawn from {law}. Measured "
        f"responses' summed log-ratios vary {spread} as much as that; above 1, less is kept than is said here.",
        "MIS, TRM, Geo-RS: responses that are kept. token TIS rejects none: tokens that it leaves uncut. ESS: "
        "effective sample size of uncorrected sequence weights, exact under this law.",
        f"Bounds, the catalogue's: {bounds}.",
    ]
    headings = ["engine", "correction", *(f"{length:,}" for length in LENGTHS)]
    return Formatted("What corrections keep, by tokens of a response", headings, rows, notes)


def _outside(found: list[Numbers]) -> Formatted:
    rows = [[own.engine, rho, *map(percent, shares)] for own in found for rho, shares in own.outside.items()]
    note = (
        "V_S: tokens whose p is at least ρ times the largest. Pruning removes the mismatch outside it, and the "
        "gradient with it: the power of a sampled token's gradient with respect to the logits, E‖∇ log p‖²."
    )
    headings = ["engine", "ρ", "share of KL", "share of gradient power"]
    return Formatted("What lies outside the safe vocabulary V_S", headings, rows, [note])


def _by_probability(stacks: list[Stack]) -> str:
    """Draw |log p − log q| over p: sampled tokens as dots; q-weighted means of engine and controls as lines.

    Returns a PNG in base 64.
    """
    colors, rows, across = list(FAMILIES.values()), math.ceil(len(stacks) / 2), min(len(stacks), 2)
    looks = {ENGINE: ("engine, mean", colors[4], "-"), "bf16": ("trainer against itself in bf16", DARK, LINES[3])}
    looks["shape"] = ("trainer against itself, other shape", GREYS[1], LINES[2])
    with mpl.rc_context(STYLE), BytesIO() as file:
        figure = Figure(figsize=(4.6 * across + 0.4, 3.3 * rows), layout="constrained")
        panels = figure.subplots(rows, across, squeeze=False, sharex=True, sharey=True).ravel()
        figure.supxlabel("p of the token, by the trainer", fontsize=9)
        figure.supylabel("|log p − log q| (nats)", fontsize=9)
        for empty in panels[len(stacks) :]:
            empty.set_visible(False)
        # A line far below most tokens, such as the trainer's noise in another batch shape, must not stretch the axis.
        floor = np.quantile(np.abs(np.concatenate([stack.log_ratio_N for stack in stacks])), 0.1) / 3
        for axes, stack in zip(panels, stacks, strict=False):
            chosen = np.random.default_rng(0).permutation(len(stack.tokens))[:DRAWN]
            p_N, size_N = np.exp(stack.tokens["log_p"].to_numpy())[chosen], np.abs(stack.log_ratio_N)[chosen]
            axes.scatter(p_N, size_N, s=5, alpha=0.35, color=colors[0], linewidths=0, label="sampled tokens")
            for source, (label, color, line) in looks.items() if "histogram" in stack.tables else ():
                own = stack.tables["histogram"]
                own = own[(own["source"] == source) & (own["infer"] > 0)]
                sums = own.groupby(["p_low", "p_high"])[["infer", "infer_abs_d"]].sum().reset_index()
                centre = np.sqrt(sums["p_low"].clip(lower=1e-13) * sums["p_high"])
                size = (sums["infer_abs_d"] / sums["infer"]).replace(0.0, np.nan)
                text = label if size.max() > floor else f"{label} (below)"
                axes.plot(centre, size, color=color, linestyle=line, marker="o", markersize=3, label=text)
            axes.set(xscale="log", yscale="log", title=stack.engine)
            axes.set_ylim(bottom=floor or None)
        handles = panels[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=1 + across, fontsize=8)
        figure.savefig(file, format="png", dpi=110)
        return base64.b64encode(file.getvalue()).decode()
