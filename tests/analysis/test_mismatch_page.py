"""The page of `dvp mismatch --model`: its forecasts against formulas, its rules one by one, and what is on it."""

import html
import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pandas as pd
import pytest

from dvp.analysis import mismatch_page
from dvp.analysis.mismatch_advice import LENGTHS, RULES, Numbers, advice, verdict
from dvp.analysis.mismatch_page import METHODS, Stack, dispersion, numbers, page, summary
from dvp.experiment.loading import load_experiment

KL, RESPONSES, TOKENS = 1e-4, 40, 200


@pytest.fixture(autouse=True)
def few(request, monkeypatch):
    """Responses are simulated in number only where a forecast is compared with its formula."""
    if "forecasts" not in request.node.name and "not_sampled" not in request.node.name:
        monkeypatch.setattr("dvp.analysis.forecast.SIMULATED", 20)


@pytest.fixture(scope="module")
def rules(root):
    methods = load_experiment("mismatch", root / "config").methods
    return {name: methods[method].importance for name, method in METHODS.items()}


def sampled(log_ratio_BT, seed=0):
    """A row a token; p is drawn."""
    responses, tokens = log_ratio_BT.shape
    log_p = np.log(np.random.default_rng(seed).uniform(0.01, 1, log_ratio_BT.size))
    return pd.DataFrame(
        {
            "response": np.repeat(np.arange(responses), tokens),
            "position": np.tile(np.arange(tokens), responses),
            "token": 7,
            "log_p": log_p,
            "log_q": log_p - log_ratio_BT.ravel(),
        }
    )


def gaussian(kl=KL, seed=0):
    """The law under which a ratio has mean 1: N(−κ, 2κ)."""
    noise = np.random.default_rng(seed).standard_normal((RESPONSES, TOKENS))
    return sampled(-kl + math.sqrt(2 * kl) * noise)


def kept(rule, tokens):
    """By hand: Σ log-ratio is N(−κT, 2κT), the mean N(−κ, 2κ/T); a trust region has every token within its bound."""

    def within(low, high, count):
        law = NormalDist(-KL * count, math.sqrt(2 * KL * count))
        return law.cdf(math.log(high)) - (law.cdf(math.log(low)) if low > 0 else 0)

    if rule.trust_region is not None:
        return within(1 / rule.trust_region, rule.trust_region, 1) ** tokens
    if rule.level == "sequence":
        return within(rule.lower, rule.upper, tokens)
    return within(rule.lower**tokens, rule.upper**tokens, tokens)


def test_forecasts_are_those_of_the_normal_law(rules):
    found = numbers(Stack("bf16", gaussian()), rules)
    assert found.kl == pytest.approx(KL, rel=0.05)
    for length in LENGTHS:
        assert found.ess[length] == pytest.approx(math.exp(-2 * KL * length), rel=0.1)
        for name in ("MIS", "TRM", "Geo-RS"):
            assert found.kept[name][length] == pytest.approx(kept(rules[name], length), abs=0.09), name
        assert found.kept["token TIS"][length] == 1.0


def test_a_token_that_was_not_sampled_counts_where_the_vocabulary_is_known(rules):
    """One in 20,000 has a log-ratio of 1: most responses of 8,192 tokens are free of it, TRM drops the others."""
    rare = 5e-5
    rows = [("engine", 0.1, -0.001, 1 - rare, 0.0, 0.0), ("engine", 1e-6, -1.1, rare, -rare, rare)]
    columns = ["source", "p_low", "d_low", "infer", "infer_d", "infer_abs_d"]
    histogram = pd.DataFrame(rows, columns=columns).assign(p_high=1.0)
    stack = Stack("bf16", gaussian(1e-12), tables={"histogram": histogram})
    kept = numbers(stack, rules).kept["TRM"]
    assert kept[8192] == pytest.approx((1 - rare) ** 8192, abs=0.08)
    assert numbers(replace(stack, tables={}), rules).kept["TRM"][8192] == 1.0


def test_shares_outside_and_noise_are_ratios_of_sums(rules):
    sets = pd.DataFrame(
        {
            "rho": ["0.1", "0.1", "0.1"],
            "side": ["none", "none", "engine"],
            "kl": [1.0, 3.0, math.nan],
            "kl_outside": [0.5, 0.5, math.nan],
            "squared_score": [2.0, 2.0, math.nan],
            "squared_score_outside": [0.0, 0.4, math.nan],
        }
    )
    noise = pd.DataFrame({"source": ["shape", "bf16", "bf16"], "kl": [0.0, 1.0, 2.0], "tokens": [5, 5, 5]})
    found = numbers(Stack("bf16", gaussian(), tables={"noise": noise, "safe_sets": sets}), rules)
    assert found.outside["0.1"] == (0.25, 0.1)
    assert found.noise == {"bf16": pytest.approx(0.3), "shape": 0.0}


def test_what_the_tokens_of_a_response_share_is_seen():
    shared = np.random.default_rng(1).standard_normal((RESPONSES, 1)) * np.ones(TOKENS)
    assert dispersion(Stack("bf16", gaussian())) == pytest.approx(1.0, abs=0.5)
    assert dispersion(Stack("bf16", sampled(0.01 * shared))) > 50


def test_an_engine_above_its_limit_is_checked_first(rules):
    """By what it is off the trainer's pass with its weights where that is known, and with no advice after it."""
    for known, needs in (({"error": 1e-4, "limit": 1e-5}, "check first"), ({}, "MIS")):
        found = numbers(Stack("fp32", gaussian(), **known), rules)
        text = " ".join(advice(found))
        assert verdict(found).startswith(needs)
        assert ("This is an engine error: with its own weights the trainer is off it by 0.0001" in text) == bool(known)
        assert ("correction (" in text) == (not known)
        assert ("No correction is advised before that is explained." in text) == bool(known)


def made(kl=1e-3, ess=0.1, mis=0, trm=1.0, outside=(0.0, 0.0), suspicions=()):
    """MIS keeps enough up to a length."""
    return Numbers(
        engine="bf16",
        kl=kl,
        error=1e-3,
        limit=0.01,
        noise={"bf16": 1e-4},
        ess=dict.fromkeys(LENGTHS, ess),
        kept={"MIS": {n: 0.8 if n <= mis else 0.3 for n in LENGTHS}, "TRM": dict.fromkeys(LENGTHS, trm)},
        outside={"0.01": outside},
        suspicions=suspicions,
    )


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (made(suspicions=("Odd.",)), "check first"),
        (made(mis=8192), "MIS"),
        (made(ess=0.95), "none"),
        (made(mis=1024), "MIS to 1,024, then TIS"),
        (made(mis=0), "TIS"),
    ],
)
def test_the_verdict_follows_the_rules(numbers, expected):
    assert verdict(numbers) == expected
    text = " ".join(advice(numbers))
    assert "10 times what the trainer has" in text


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (made(outside=(0.6, 0.02)), "Pruning could reach it: 60 % of the KL and 2 % of the gradient's power lie"),
        (made(outside=(0.3, 0.02)), "Pruning could reach a part of it: 30 %"),
        (made(outside=(0.05, 0.02)), "Pruning could not reach it: 5 %"),
        (replace(made(), left_out="Three are left out."), "(0.0001). Three are left out. It needs"),
        (made(suspicions=("Odd.",)), "(0.0001). Odd. No correction is advised before that is explained."),
        (replace(made(), outside={}), "is not known: that takes the whole vocabulary"),
        (made(trm=0.7), "30 % have a token outside TRM's bounds: TRM beside it drops these responses"),
        (made(trm=0.2), "80 % have a token outside TRM's bounds: too many"),
    ],
)
def test_the_advice_says_why(numbers, words):
    assert words in " ".join(advice(numbers))


def test_the_worst_tokens_come_first_and_nothing_in_them_acts(rules):
    tokens = gaussian().assign(text="<b>\x1b[2J", problem="p4")
    tokens.loc[17, "log_q"] = tokens.loc[17, "log_p"] + 3
    first, second, *_ = mismatch_page._worst([Stack("bf16", tokens)]).rows
    assert first[3] == "-3"
    assert first[-1] == "p4 / 0 / 18"
    assert abs(float(second[3])) < 1
    assert "\x1b" not in first[1]


def test_the_page_holds_all_and_loads_nothing(rules):
    """Of sampled tokens alone, as of somebody else's rollouts: what needs the whole vocabulary is not on it."""
    stacks = [Stack("bf16", gaussian().assign(text="<script>")), Stack("fp8", gaussian(1e-2, 1).assign(text="x"))]
    found = [numbers(stack, rules) for stack in stacks]
    text = page(stacks, found, rules, "a & b", {"device": "a GPU", "revision": "abc"})
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "a &amp; b" in text
    assert "http" not in text.replace("http-equiv", "")
    assert text.count("data:image/png;base64,") == 1
    for words in ("a GPU", "abc", "rarer than one in 8,000 is not in it", "independent log-ratios", "lower 0.999"):
        assert words in text
    assert "outside the safe vocabulary V_S" not in text  # the table
    for own in found:
        assert " ".join(advice(own)) in html.unescape(text)
    for rule in RULES:
        assert rule in html.unescape(text)
    rows = summary(stacks, found, "title").rows
    assert [row[0] for row in rows] == ["bf16", "fp8"]
    assert rows[1][-1] == "TIS"


def test_the_forecast_methods_are_in_the_catalogue(rules):
    assert rules["MIS"].level == "sequence"
    assert (rules["MIS"].lower, rules["MIS"].upper, rules["MIS"].veto) == (0.5, 2.0, 1e-4)
    assert rules["TRM"].trust_region == 2.0
    assert rules["Geo-RS"].level == "geometric"


def test_the_pages_numbers_are_estimates_too(rules):
    stacks = [Stack("bf16", gaussian(), error=1e-3, limit=1e-2), Stack("fp8", gaussian(1e-2, 1))]
    found = [numbers(stack, rules) for stack in stacks]
    known = {(one.name, *one.where.values()): one for one in mismatch_page.estimates(stacks, found)}
    assert known["kl", "bf16"].low <= known["kl", "bf16"].value == found[0].kl <= known["kl", "bf16"].high
    assert known["kept_forecast", "fp8", "MIS", "512"].value == found[1].kept["MIS"][512]
    assert ("kl_beyond_weights", "bf16") in known
    assert ("kl_beyond_weights", "fp8") not in known


def test_a_single_response_has_no_interval(rules):
    stack = Stack("bf16", sampled(np.full((1, TOKENS), 0.1)))
    value, low, high = stack.kl()
    assert value > 0
    assert math.isnan(low)
    assert math.isnan(high)
    note = summary([stack], [numbers(stack, rules)], "made up").notes[-1]
    assert "95 % interval over problems: bf16 none." in note
