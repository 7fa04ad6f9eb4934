"""Metrics against enumeration, intervals against known truths."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dvp.evaluation.metrics import maj_at_k, pass_at_k, powers_of_two, summarise, votes

MATRIX = st.tuples(st.integers(1, 4), st.integers(1, 6)).flatmap(
    lambda shape: st.lists(
        st.lists(st.booleans(), min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
    )
)


@given(MATRIX, st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(rows, data):
    k = data.draw(st.integers(1, len(rows[0])))
    subsets = [[any(subset) for subset in combinations(row, k)] for row in rows]
    assert pass_at_k(np.array(rows), k).mean() == pytest.approx(np.mean(subsets))


def test_pass_at_k_of_many_samples_is_finite_and_ordered():
    correct_PK = np.zeros((1, 2048), dtype=bool)
    correct_PK[0, 0] = True
    ks = powers_of_two(2048)
    assert [pass_at_k(correct_PK, k).item() for k in ks] == pytest.approx([k / 2048 for k in ks])
    for k in (0, 2049):
        with pytest.raises(ValueError, match="k = "):
            pass_at_k(correct_PK, k)


ANSWERS = st.lists(st.lists(st.sampled_from([None, "1", "2", "x"]), min_size=5, max_size=5), min_size=1, max_size=4)


@given(ANSWERS)
def test_maj_at_k_is_the_expectation_over_the_most_frequent_answers(answers):
    correct_PK = np.array([[answer == "1" for answer in row] for row in answers])
    expected = []
    for row in answers:
        counts = Counter(answer for answer in row if answer)
        leading = [answer for answer, count in counts.items() if count == max(counts.values())]
        expected.append(leading.count("1") / len(leading) if leading else 0)
    assert maj_at_k(correct_PK, votes(answers)).mean() == pytest.approx(np.mean(expected))


def test_equal_integers_vote_together():
    same = ["1234", "1,234", "1{,}234", "1234.0", " 1234 ", r"\$1234", "+1234", "01234"]
    assert set(votes([same]).ravel()) == {0}
    assert votes([["-0", "0", "−3", "-3", "2.5", "", None, r"\frac{1}{2}", r"\frac{1} {2}"]]).tolist() == [
        [0, 0, 1, 1, 2, -1, -1, 3, 3]
    ]
    assert len(set(votes([["9" * 5000, "9" * 5001]]).ravel())) == 2


def test_intervals_cover_the_truth():
    # Accuracies p ~ Beta(1, 2), hence E p = 1/3 and E[1 − (1 − p)⁴] = 1 − B(1, 6) / B(1, 2) = 2/3. With two
    # possible answers maj@5 is P(at least 3 of 5 correct), simulated.
    rng = np.random.default_rng(1)
    many_P = rng.beta(1, 2, size=200_000)
    truths = {"avg@5": 1 / 3, "pass@4": 2 / 3, "maj@5": np.mean(rng.binomial(5, many_P) >= 3)}
    hits = Counter()
    repetitions = 400
    for seed in range(repetitions):
        correct_PK = rng.random((40, 5)) < rng.beta(1, 2, size=(40, 1))
        summary = summarise(correct_PK, np.where(correct_PK, "1", "0").tolist(), resamples=200, seed=seed)
        for name, truth in truths.items():
            hits[name] += summary[name]["low"] <= truth <= summary[name]["high"]
    for name in truths:
        assert 0.9 <= hits[name] / repetitions <= 0.98, (name, hits[name] / repetitions)


def test_pass_at_1_is_avg_at_k_with_the_same_interval():
    correct_PK = np.random.default_rng(0).random((20, 12)) < 0.3
    summary = summarise(correct_PK, np.where(correct_PK, "1", "2").tolist(), resamples=200, seed=0)
    assert list(summary) == ["avg@12", "pass@1", "pass@2", "pass@4", "pass@8", "pass@12", "maj@12"]
    assert summary["pass@1"] == pytest.approx(summary["avg@12"])
