"""Read-outs of the train/inference mismatch (METHOD.md, "Diagnostics").

Every statistic is of the unclamped, untruncated ratios r = exp(log_ratio), in float64, where log_ratio is
log p − log q of tokens sampled from q: what the corrections cut off is the very thing to be watched.

Shape suffixes: B responses, T tokens, N flattened tokens, V vocabulary, H hidden, G group.
"""

import math

import torch

VETO_RATIO = 1e-4
# exp(709.8) overflows float64; r or r² past e^700 counts as e^700.
MAX_EXPONENT = 700.0


@torch.no_grad()
def mismatch_metrics(log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> dict[str, float]:
    """Measure how far the trainer's policy p is from the engine's q on one batch.

    Args:
        log_ratio_BT: log p − log q of the sampled tokens (nats); any value, NaN too, where mask_BT is False.
        mask_BT: bool, True at the response's tokens.

    Returns:
        Token level, over the masked tokens:
            k1: mean(log q − log p) = mean(d), an unbiased estimate of KL(q‖p), of either sign.
            k3: mean(r − log r − 1), the same, never negative but for rounding.
            chi2: mean(r²) − 1.
            max_abs_log_ratio, ratio_outside_0.9_1.1 (a fraction of the tokens).
        Sequence level, over the sequences that have a token:
            ess: (Σw)² / Σw² / count with w = ∏r, the effective fraction of the sample, in (0, 1].
            veto_fraction: sequences with any r < 1e-4.
        Exponents are cut at 700, so the values are finite for finite log-ratios. With no token at all every
        value is 0; ess = 0 occurs in no other case.
    """
    sequence_B = mask_BT.any(dim=1)
    log_ratio_BT = torch.where(mask_BT, log_ratio_BT, 0.0).double()[sequence_B]
    log_ratio_N = log_ratio_BT[mask_BT[sequence_B]]
    count = log_ratio_N.numel()
    if count == 0:
        names = ("k1", "k3", "chi2", "ess", "max_abs_log_ratio", "ratio_outside_0.9_1.1", "veto_fraction")
        return dict.fromkeys(names, 0.0)

    # expm1 keeps the digits of ratios near 1; dividing before the sum, e^700s cannot add up to infinity.
    k3_N = log_ratio_N.clamp(max=MAX_EXPONENT).expm1() - log_ratio_N
    chi2_N = (2.0 * log_ratio_N).clamp(max=MAX_EXPONENT).expm1()
    outside_N = (log_ratio_N < math.log(0.9)) | (log_ratio_N > math.log(1.1))
    # The effective sample size does not depend on the weights' scale, so no exponent needs cutting.
    log_weight_B = log_ratio_BT.sum(dim=1)
    weight_B = (log_weight_B - log_weight_B.max()).exp()
    ess = weight_B.sum().square() / weight_B.square().sum() / len(weight_B)
    return {
        "k1": -log_ratio_N.mean().item(),
        "k3": (k3_N / count).sum().item(),
        "chi2": (chi2_N / count).sum().item(),
        "ess": min(ess.item(), 1.0),
        "max_abs_log_ratio": log_ratio_N.abs().max().item(),
        "ratio_outside_0.9_1.1": outside_N.double().mean().item(),
        "veto_fraction": (log_ratio_BT < math.log(VETO_RATIO)).any(dim=1).double().mean().item(),
    }
