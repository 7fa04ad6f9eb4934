"""prime-rl's and slime's public hooks against what these trainers compute, written here in float64.

prime-rl 0.8 (commit 559b4477, src/prime_rl/trainer/rl/loss.py): `compute_loss` sums a function of one response over
the packed responses and divides by the step's number of tokens. In `default_loss_fn` without masks and KL the term of
a token is −A exp(log p − log q), times its `loss_weights`.

slime 0.3.1 (commit 624b824a, slime/backends/megatron_utils/loss.py): `vanilla_tis_function` multiplies a token's loss
by min(r, tis_clip), `icepop_function` by r within [tis_clip_low, tis_clip], else 0. In `compute_mis_weights` of its
examples (train_infer_mismatch_helper/mis.py) the level `sequence` has the product of a response's ratios, the mode
`mask` takes responses outside the bounds out of the masks, and `rs_veto_threshold` those with a smaller token ratio.
The reducer sums x · mask over responses, each divided by what the masks were before.
"""

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from dvp.core.importance import PRESETS, ImportanceRule
from dvp.errors import DvpError

LENGTHS = (5, 1, 7, 3)


@dataclass
class LossInputs:
    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = None


@dataclass
class LossOutputs:
    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


@pytest.fixture
def corrected_loss(monkeypatch):
    """The loss beside the two types that prime-rl's docs/algorithms.md documents."""
    documented = ModuleType("prime_rl.trainer.rl.loss")
    documented.LossInputs, documented.LossOutputs = LossInputs, LossOutputs
    for name in ("prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, documented.__name__, documented)
    monkeypatch.delitem(sys.modules, "dvp.integrations.prime_rl", raising=False)
    from dvp.integrations.prime_rl import corrected_loss

    return corrected_loss


def responses(seed, spread=0.4):
    """Log-probs of trainer and engine, advantages and masks of responses of unequal length; each mask has a token."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in LENGTHS:
        trainer_T = -3 * torch.rand(length, generator=generator, dtype=torch.float64)
        engine_T = trainer_T - spread * torch.randn(length, generator=generator, dtype=torch.float64)
        mask_T = torch.rand(length, generator=generator) < 0.8
        mask_T[0] = True
        advantage_T = torch.randn(length, generator=generator, dtype=torch.float64)
        found.append((trainer_T.requires_grad_(), engine_T, advantage_T, mask_T))
    return found


def weights_of(name, trainer_T, engine_T, mask_T):
    """The factor of each token's term by the formulas of the module's docstring."""
    ratio_T = (trainer_T - engine_T).detach().exp()
    product = ratio_T[mask_T].prod()
    return {
        "none": torch.ones_like(ratio_T),
        "tis": ratio_T.clamp(max=2.0),
        "icepop": ratio_T.where((ratio_T >= 0.5) & (ratio_T <= 5.0), 0.0),
        "mis": (product if 0.5 <= product <= 2.0 else 0.0) * torch.ones_like(ratio_T),
        "veto": float(ratio_T[mask_T].min() >= 0.5) * torch.ones_like(ratio_T),
    }[name]


RULES = {"none": ImportanceRule(), "veto": ImportanceRule(veto=0.5)} | {
    name: PRESETS[name] for name in ("tis", "icepop", "mis")
}


@pytest.mark.parametrize("name", RULES)
def test_prime_rl_sums_the_corrected_terms_of_a_response(corrected_loss, name):
    correction = name if name in PRESETS and name != "veto" else RULES[name].model_dump(exclude={"kind"})
    rejected = 0
    for seed in range(6):
        for trainer_T, engine_T, advantage_T, mask_T in responses(seed):
            weights = torch.rand(len(mask_T), dtype=torch.float64)
            inputs = LossInputs(trainer_T, engine_T, None, advantage_T, mask_T, weights)
            found = corrected_loss(inputs, correction=correction)
            factor_T = weights_of(name, trainer_T, engine_T, mask_T) * mask_T * advantage_T * weights
            torch.testing.assert_close(found.loss, -(factor_T * trainer_T).sum())
            [gradient_T] = torch.autograd.grad(found.loss, trainer_T)
            torch.testing.assert_close(gradient_T, -factor_T)
            rejected += found.metrics["dvp_kept"] == 0
            assert all(value.dim() == 0 for value in found.metrics.values())
    assert (rejected > 0) == (name in ("mis", "veto", "icepop"))


def test_prime_rls_own_gradient_is_an_unbounded_ratio(corrected_loss):
    """Its default loss without masks and KL penalty, and no stream of weights."""
    for trainer_T, engine_T, advantage_T, mask_T in responses(seed=1):
        theirs = -(mask_T * advantage_T * (trainer_T - engine_T).exp()).sum()
        found = corrected_loss(LossInputs(trainer_T, engine_T, None, advantage_T, mask_T), {"level": "token"}).loss
        torch.testing.assert_close(*(torch.autograd.grad(loss, trainer_T)[0] for loss in (found, theirs)))


@pytest.mark.parametrize(
    ("correction", "line"),
    [("miss", "correction: miss; expected one of tis, "), ({"level": "token", "self_normalise": True}, "one response")],
)
def test_prime_rl_refuses_other_corrections(corrected_loss, correction, line):
    with pytest.raises(DvpError, match=line):
        corrected_loss(LossInputs(*responses(0)[0][:2], None, *responses(0)[0][2:]), correction)


def slime_arguments(found, own_loss_N):
    train, rollout, _, masks = zip(*found, strict=True)
    lists = {"train_log_probs": [values.detach() for values in train], "rollout_log_probs": list(rollout)}
    lists |= {"loss_masks": [mask_T.int() for mask_T in masks], "response_lengths": list(LENGTHS)}
    return {"args": None, "pg_loss": own_loss_N, "total_lengths": [9] * len(LENGTHS)} | lists


def reduced(values_N, masks, divisors):
    parts = zip(values_N.split(LENGTHS), masks, divisors, strict=True)
    return sum((value_T * mask_T).sum() / divisor for value_T, mask_T, divisor in parts)


@pytest.mark.parametrize("name", RULES)
def test_slime_multiplies_its_own_loss_by_the_weights(name):
    from dvp.integrations.slime import tis_function

    for seed in range(6):
        found = responses(seed)
        own_N = torch.randn(sum(LENGTHS), dtype=torch.float64, requires_grad=True)
        loss_N, masks, metrics = tis_function(RULES[name])(**slime_arguments(found, own_N))
        divisors = [mask_T.sum() for *_, mask_T in found]
        expected = [weights_of(name, trainer_T, engine_T, mask_T) for trainer_T, engine_T, _, mask_T in found]
        before = [mask_T for *_, mask_T in found]
        loss = reduced(loss_N, masks, divisors)
        torch.testing.assert_close(loss, reduced(own_N * torch.cat(expected), before, divisors))
        [gradient_N] = torch.autograd.grad(loss, own_N)
        factors = [
            weight_T * mask_T / divisor for weight_T, mask_T, divisor in zip(expected, before, divisors, strict=True)
        ]
        torch.testing.assert_close(gradient_N, torch.cat(factors))
        for mask_T, weight_T, old_T in zip(masks, expected, before, strict=True):
            assert mask_T.tolist() == (old_T & (weight_T != 0)).int().tolist()
        assert {len(values) for values in metrics.values()} == {sum(LENGTHS)}


def test_slime_loses_a_rejected_loss_that_is_not_finite():
    from dvp.integrations.slime import tis_function

    found = responses(0, spread=3.0)
    loss_N, masks, metrics = tis_function(PRESETS["mis"])(
        **slime_arguments(found, torch.full((sum(LENGTHS),), torch.nan))
    )
    assert metrics["dvp_kept"].sum() == 0
    assert reduced(loss_N, masks, [1] * len(LENGTHS)) == 0


def test_slime_is_refused_what_needs_more_than_it_gives():
    from dvp.integrations.slime import tis_function

    with pytest.raises(DvpError, match="no self_normalise in slime"):
        tis_function(ImportanceRule(level="token", self_normalise=True))
    split = slime_arguments(responses(0), None) | {"response_lengths": [10, 2, 14, 6]}
    with pytest.raises(DvpError, match="no context parallelism"):
        tis_function(PRESETS["mis"])(**split)
