"""What each importance correction does to the policy gradient, by exact enumeration of a small decision process.

Sequences over three tokens, of which token 0 ends one, at most three long: 15 of them, lengths 1 to 3. Trainer p and
engine q are softmax tables with a row a prefix. Every expectation is a sum over all sequences, so that nothing here is
statistical. The references do not use the code's weights and losses: they are docs/method.md's formulas, in loops.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from dvp.core.importance import PRESETS, ImportanceRule, importance_weights
from dvp.core.objective import LOSSES, policy_loss, zero_outside_safe

VOCABULARY, LONGEST, END = 3, 3, 0
SEQUENCES = [
    y
    for length in range(1, LONGEST + 1)
    for y in itertools.product(range(VOCABULARY), repeat=length)
    if END not in y[:-1] and (y[-1] == END or length == LONGEST)
]
PREFIXES = sorted({y[:t] for y in SEQUENCES for t in range(len(y))})
MASK = torch.tensor([[t < len(y) for t in range(LONGEST)] for y in SEQUENCES])
STATES = torch.tensor([[PREFIXES.index(y[:t]) if t < len(y) else 0 for t in range(LONGEST)] for y in SEQUENCES])
TOKENS = torch.tensor([[*y, *[0] * (LONGEST - len(y))] for y in SEQUENCES])

SEQUENCE_IS = ImportanceRule(level="sequence")
RULES = {
    "naive": ImportanceRule(),
    **PRESETS,
    # Bounds and thresholds that this coarse process meets; its ratios are never as small as 1e-4.
    "geo_rs": PRESETS["geo_rs"].changed(lower=0.8, upper=1.25),
    "geo_tis": ImportanceRule(level="geometric", upper=1.2),
    "k3": ImportanceRule(k3_max=0.1),
    "veto": ImportanceRule(veto=0.6),
    "mis_veto": PRESETS["mis"].changed(veto=0.6),
    "tis_k3": PRESETS["tis"].changed(k3_max=0.4),
}


class Process:
    """p, q and rewards; log-probs of every sequence's tokens, and ∇log p of each with respect to p's logits."""

    def __init__(self, seed=0, distance=0.9):
        rng = np.random.default_rng(seed)
        self.logits = rng.normal(size=(len(PREFIXES), VOCABULARY))
        self.engine_logits = self.logits + distance * rng.normal(size=self.logits.shape)
        self.reward = rng.normal(size=len(SEQUENCES))
        self.log_p, self.log_q = _log_softmax(self.logits), _log_softmax(self.engine_logits)

    def log_probs(self, table):
        """(sequences, tokens), 0 at padding."""
        return np.array([[table[s, a] for s, a in zip(*row, strict=True)] for row in self._indices()]) * MASK.numpy()

    @staticmethod
    def _indices():
        return zip(STATES.tolist(), TOKENS.tolist(), strict=True)

    @staticmethod
    def probabilities(table):
        return np.array([math.exp(sum(table[PREFIXES.index(y[:t]), y[t]] for t in range(len(y)))) for y in SEQUENCES])

    @staticmethod
    def score(table, y, t):
        """∇ log p(y_t | y_<t), analytically: the indicator of the token less the probabilities, in the state's row."""
        gradient = np.zeros((len(PREFIXES), VOCABULARY))
        state = PREFIXES.index(y[:t])
        gradient[state] = -np.exp(table[state])
        gradient[state, y[t]] += 1.0
        return gradient

    def exact_gradient(self):
        """∇J = ∇ Σ_y p(y) R(y), by autograd of J itself."""
        logits = torch.tensor(self.logits, requires_grad=True)
        table = logits.log_softmax(dim=1)
        objective = sum(
            reward * sum(table[PREFIXES.index(y[:t]), y[t]] for t in range(len(y))).exp()
            for y, reward in zip(SEQUENCES, self.reward, strict=True)
        )
        return torch.autograd.grad(objective, logits)[0].numpy()

    def expected_gradient(self, rule):
        """E_q[ĝ] of the code under test: each sequence enters with its probability under q in place of a count."""
        logits = torch.tensor(self.logits, requires_grad=True)
        log_p = torch.where(MASK, logits.log_softmax(dim=1)[STATES, TOKENS], 0.0)
        log_ratio = log_p.detach() - torch.tensor(self.log_probs(self.log_q))
        weights = importance_weights(log_ratio, MASK, rule)
        advantage = torch.tensor(self.probabilities(self.log_q) * self.reward)[:, None].expand(-1, LONGEST)
        loss = policy_loss(LOSSES["reinforce"], log_p, log_p.detach(), weights.weight_BT, advantage, MASK, 1).loss
        return -torch.autograd.grad(loss, logits)[0].numpy()

    def ratios(self, y):
        rows = [PREFIXES.index(y[:t]) for t in range(len(y))]
        return [math.exp(self.log_p[s, a] - self.log_q[s, a]) for s, a in zip(rows, y, strict=True)]

    def weighted_gradient(self, probability, weights_of):
        """Σ_y probability(y) R(y) Σ_t weight_t ∇log p(y_t); `weights_of` maps ratios to weights."""
        total = np.zeros_like(self.logits)
        for y, mass, reward in zip(SEQUENCES, probability, self.reward, strict=True):
            for t, weight in enumerate(weights_of(self.ratios(y))):
                total += mass * reward * weight * self.score(self.log_p, y, t)
        return total


def _log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def weights_by_the_book(rule, ratios):
    """docs/method.md's table for one sequence."""
    dropped = (
        (rule.veto is not None and min(ratios) < rule.veto)
        or (rule.trust_region is not None and max(max(r, 1 / r) for r in ratios) > rule.trust_region)
        or (rule.k3_max is not None and np.mean([r - math.log(r) - 1 for r in ratios]) > rule.k3_max)
    )
    product = math.prod(ratios)
    weights = []
    for r in ratios:
        bounded = {"none": 1.0, "token": r, "sequence": product, "geometric": product ** (1 / len(ratios))}[rule.level]
        if rule.action == "truncate":
            weight = min(bounded, rule.upper)
        else:
            weight = bounded if rule.lower <= bounded <= rule.upper else 0.0
        weights.append(0.0 if dropped else weight)
    return weights


PROCESS = Process()


def test_the_process_is_complete_and_meets_every_bound_and_threshold():
    assert PROCESS.probabilities(PROCESS.log_p).sum() == pytest.approx(1.0)
    assert PROCESS.probabilities(PROCESS.log_q).sum() == pytest.approx(1.0)
    for name, rule in RULES.items():

        def weights(rule, **without):
            rule = rule.changed(**without)
            return [weights_by_the_book(rule, PROCESS.ratios(y)) for y in SEQUENCES]

        assert any(any(row) for row in weights(rule)), name
        if rule.upper < math.inf:
            assert weights(rule) != weights(rule, action="truncate", lower=0.0, upper=math.inf), name
        if rule.veto is not None:
            assert weights(rule) != weights(rule, veto=None), name
        if rule.trust_region is not None:
            assert weights(rule) != weights(rule, trust_region=None), name
        if rule.k3_max is not None:
            assert weights(rule) != weights(rule, k3_max=None), name


@pytest.mark.parametrize("seed", range(5))
def test_sequence_importance_sampling_is_unbiased(seed):
    process = Process(seed)
    exact = process.exact_gradient()
    assert np.abs(exact).max() > 1e-2
    np.testing.assert_allclose(process.expected_gradient(SEQUENCE_IS), exact, atol=1e-14)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_each_correction_is_biased_by_exactly_the_weights_that_it_changes(name, seed):
    """E_q[ĝ] − ∇J = E_q[Σ_t (w_t − ∏r) R ∇log p_t]."""
    process, rule = Process(seed), RULES[name]

    def change(ratios):
        return [w - math.prod(ratios) for w in weights_by_the_book(rule, ratios)]

    bias = process.expected_gradient(rule) - process.exact_gradient()
    predicted = process.weighted_gradient(process.probabilities(process.log_q), change)
    assert np.abs(predicted).max() > 1e-3
    np.testing.assert_allclose(bias, predicted, atol=1e-14)


def test_naive_bias_is_that_of_theorem_4_1():
    """b = E_p[(e^{−Δ} − 1) R ∇log p], Δ = Σ_t log r_t: an expectation under the trainer's policy."""
    predicted = PROCESS.weighted_gradient(
        PROCESS.probabilities(PROCESS.log_p), lambda ratios: [1 / math.prod(ratios) - 1] * len(ratios)
    )
    bias = PROCESS.expected_gradient(ImportanceRule()) - PROCESS.exact_gradient()
    np.testing.assert_allclose(bias, predicted, atol=1e-14)


def test_mis_loses_exactly_the_sequences_out_of_bounds():
    """Its bias is −E_p[R ∇log p; ∏r outside the bounds]: what is kept is unbiased."""
    predicted = PROCESS.weighted_gradient(
        PROCESS.probabilities(PROCESS.log_p),
        lambda ratios: [0.0 if 0.5 <= math.prod(ratios) <= 2.0 else -1.0] * len(ratios),
    )
    bias = PROCESS.expected_gradient(PRESETS["mis"]) - PROCESS.exact_gradient()
    np.testing.assert_allclose(bias, predicted, atol=1e-14)


def test_sequence_tis_loses_exactly_what_it_cuts_off():
    """Its bias is −E_p[(1 − 2/∏r)₊ R ∇log p]."""
    predicted = PROCESS.weighted_gradient(
        PROCESS.probabilities(PROCESS.log_p),
        lambda ratios: [-max(0.0, 1 - 2.0 / math.prod(ratios))] * len(ratios),
    )
    bias = PROCESS.expected_gradient(PRESETS["seq_tis"]) - PROCESS.exact_gradient()
    np.testing.assert_allclose(bias, predicted, atol=1e-14)


def test_token_importance_sampling_is_biased_without_any_bound():
    """Even untruncated, r_t is not ∏r: token level is exact for sequences of one token only."""
    token_is = ImportanceRule(level="token")
    bias = PROCESS.expected_gradient(token_is) - PROCESS.exact_gradient()
    predicted = PROCESS.weighted_gradient(
        PROCESS.probabilities(PROCESS.log_q), lambda ratios: [r - math.prod(ratios) for r in ratios]
    )
    assert np.abs(predicted).max() > 1e-3
    np.testing.assert_allclose(bias, predicted, atol=1e-14)


BATCH_RULES = {
    "mean over the kept": PRESETS["mis"].changed(denominator="kept"),
    "self-normalised sequences": SEQUENCE_IS.changed(self_normalise=True),
    "self-normalised, masked": PRESETS["mis"].changed(self_normalise=True),
    "self-normalised, masked, over the kept": PRESETS["mis"].changed(self_normalise=True, denominator="kept"),
    "self-normalised tokens": PRESETS["tis"].changed(self_normalise=True),
}


@pytest.mark.parametrize("name", BATCH_RULES)
def test_rules_that_look_at_the_batch_have_the_bias_of_their_ratio_of_sums(name):
    """Exact expectation over all ordered pairs of sequences, a step with nothing kept contributing no gradient."""
    rule = BATCH_RULES[name]
    rows = {y: weights_by_the_book(rule, PROCESS.ratios(y)) for y in SEQUENCES}
    probability = PROCESS.probabilities(PROCESS.log_q)
    log_ratio = torch.tensor(PROCESS.log_probs(PROCESS.log_p) - PROCESS.log_probs(PROCESS.log_q))
    scores = np.zeros((len(SEQUENCES), LONGEST, *PROCESS.logits.shape))
    for i, y in enumerate(SEQUENCES):
        for t in range(len(y)):
            scores[i, t] = PROCESS.score(PROCESS.log_p, y, t)

    actual = np.zeros_like(PROCESS.logits)
    expected = np.zeros_like(PROCESS.logits)
    for pair in itertools.product(range(len(SEQUENCES)), repeat=2):
        pair = list(pair)  # noqa: PLW2901
        mass = probability[pair].prod()

        weights = importance_weights(log_ratio[pair], MASK[pair], rule)
        if weights.denominator:
            leaf = torch.zeros(2, LONGEST, dtype=torch.float64, requires_grad=True)
            advantage = torch.tensor(PROCESS.reward[pair])[:, None].expand(2, LONGEST)
            policy_loss(
                LOSSES["reinforce"], leaf, leaf.detach(), weights.weight_BT, advantage, MASK[pair], weights.denominator
            ).loss.backward()
            actual -= mass * np.einsum("it,itsv->sv", leaf.grad.numpy(), scores[pair])

        total, normaliser = np.zeros_like(PROCESS.logits), 0.0
        for i in pair:
            row = rows[SEQUENCES[i]]
            total += PROCESS.reward[i] * sum(w * scores[i, t] for t, w in enumerate(row))
            if not rule.self_normalise:
                normaliser += any(row)
            elif rule.level == "token":
                # The mean weight of a token times the number of responses.
                normaliser += sum(row) * 2 / sum(len(SEQUENCES[j]) for j in pair)
            else:
                normaliser += row[0]
        if normaliser:
            expected += mass * total / normaliser
    np.testing.assert_allclose(actual, expected, atol=1e-14)
    assert np.abs(actual - PROCESS.exact_gradient()).max() > 1e-3


@pytest.mark.parametrize("vocabulary", [3, 4])
def test_the_variance_of_sequence_importance_sampling_explodes_with_length(vocabulary):
    """Independent tokens, reward 1 (∇J = 0): with c = Σ p²/q, r = p²/(q c) and s the score of a token,

        E_q|ĝ|² = c^T (T E_r|s|² + T(T−1) |E_r s|²),

    enumerated by the code for T = 1..8; truncated or masked at 2, the same stays below 4 E_q|Σ_t s|² ≤ 4 T² max|s|².
    """
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(1, vocabulary))
    p = np.exp(_log_softmax(logits))[0]
    q = np.exp(_log_softmax(logits + 0.7 * rng.normal(size=logits.shape)))[0]
    scores = np.eye(vocabulary) - p
    c = (p**2 / q).sum()
    r = p**2 / q / c

    def second_moment(rule, length):
        tokens = torch.cartesian_prod(*[torch.arange(vocabulary)] * length).view(-1, length)
        log_ratio = torch.tensor(np.log(p / q))[tokens]
        mask = torch.ones_like(tokens, dtype=torch.bool)
        weights = importance_weights(log_ratio, mask, rule)
        leaf = torch.zeros_like(log_ratio, requires_grad=True)
        ones = torch.ones_like(log_ratio)
        policy_loss(LOSSES["reinforce"], leaf, leaf.detach(), weights.weight_BT, ones, mask, 1).loss.backward()
        estimate = np.einsum("it,itv->iv", -leaf.grad.numpy(), scores[tokens.numpy()])
        probability = q[tokens.numpy()].prod(axis=1)
        assert probability.sum() == pytest.approx(1.0)
        weight = weights.weight_BT[:, 0].numpy()
        return probability @ (estimate**2).sum(axis=1), probability @ weight**2

    lengths = range(1, 9 if vocabulary == 3 else 7)
    moments = []
    for length in lengths:
        squared_score = r @ (scores**2).sum(axis=1)
        mean_score = ((r @ scores) ** 2).sum()
        closed = c**length * (length * squared_score + length * (length - 1) * mean_score)
        moment, weight_moment = second_moment(SEQUENCE_IS, length)
        assert moment == pytest.approx(closed, rel=1e-10)
        assert weight_moment == pytest.approx(c**length, rel=1e-10)  # the effective sample is c^−T of the batch
        moments.append(moment)
        for name in ("seq_tis", "mis"):
            bounded, _ = second_moment(PRESETS[name], length)
            assert bounded <= 4 * length**2 * (scores**2).sum(axis=1).max()
            assert bounded <= moment * (1 + 1e-12)
    assert c > 1.1
    assert all(after > c * before for before, after in itertools.pairwise(moments))


@pytest.mark.parametrize(("seed", "rho"), [(1, 0.45), (2, 0.3), (5, 0.3), (6, 0.2), (7, 0.45)])
def test_dvp_is_biased_by_what_the_two_safe_sets_leave_out(seed, rho):
    """y ∼ q^mp with weights p^mp/q^mp and V'_S ≠ V_S: E[ĝ] is ∇J_mp without the sequences that the engine cannot draw,

    E[ĝ] − ∇J = Σ_y R (1{q^mp(y) > 0} p^mp(y) ∇log p^mp(y) − p(y) ∇log p(y)).
    """
    process = Process(seed)

    def prune(logits):
        safe = logits >= logits.max(axis=1, keepdims=True) + math.log(rho)
        return safe, _log_softmax(np.where(safe, logits, -np.inf))

    safe_p, log_p_mp = prune(process.logits)
    _, log_q_mp = prune(process.engine_logits)
    p, p_mp, q_mp = (process.probabilities(table) for table in (process.log_p, log_p_mp, log_q_mp))
    assert ((p_mp > 0) & (q_mp == 0)).any()  # lost
    assert ((p_mp == 0) & (q_mp > 0)).any()  # drawn, and outside the trainer's safe sets

    predicted = np.zeros_like(process.logits)
    for i, (y, reward) in enumerate(zip(SEQUENCES, process.reward, strict=True)):
        for t in range(len(y)):
            predicted -= reward * p[i] * process.score(process.log_p, y, t)
            if q_mp[i] > 0 and p_mp[i] > 0:
                predicted += reward * p_mp[i] * process.score(log_p_mp, y, t)

    # As the head has it: a target outside V_S gets max z − 50 for its logit, a constant.
    logits = torch.tensor(process.logits, requires_grad=True)
    safe = torch.tensor(safe_p)
    normaliser = torch.where(safe, logits, -torch.inf).logsumexp(dim=1, keepdim=True)
    masked = torch.where(safe, logits, logits.detach().amax(dim=1, keepdim=True) - 50.0)
    log_p = (masked - normaliser)[STATES, TOKENS]
    mask = MASK & torch.tensor(q_mp > 0)[:, None]
    weights = importance_weights(log_p.detach() - torch.tensor(log_q_mp)[STATES, TOKENS], mask, SEQUENCE_IS)
    weight = zero_outside_safe(weights.weight_BT, safe[STATES, TOKENS])
    advantage = torch.tensor(q_mp * process.reward)[:, None].expand(-1, LONGEST)
    loss = policy_loss(LOSSES["reinforce"], log_p, log_p.detach(), weight, advantage, mask, 1).loss
    estimate = -torch.autograd.grad(loss, logits)[0].numpy()
    # The other tokens of a sequence with one outside V_S keep its weight, which the clamp holds at e^−20 = 2e-9.
    np.testing.assert_allclose(estimate - process.exact_gradient(), predicted, atol=1e-7)
