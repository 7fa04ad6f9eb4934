"""The head's statistics in float64 from whole logits, straight from docs/method.md, with autograd's gradients."""

import math

import torch

from rounding import rounding

DIFFERENTIABLE = ["log_prob", "pruned_log_prob", "entropy", "pruned_entropy"]


def dense_statistics(hidden, weight, targets, safe=None, temperature=1.0):
    """Every field of TokenStatistics but set_overlap; `safe` is ρ, a bool mask (N, V), or None where all is safe.

    A target outside V_S has the logit max z − 50, which is a constant.
    """
    z = hidden.double() @ weight.double().T / temperature
    maximum = z.detach().amax(dim=1, keepdim=True)
    if safe is None:
        safe = torch.ones_like(z, dtype=torch.bool)
    elif isinstance(safe, float):
        safe = z.detach() >= maximum + math.log(safe)
    p, q = z.softmax(dim=1), z.masked_fill(~safe, -torch.inf).softmax(dim=1)
    normaliser = z.masked_fill(~safe, -torch.inf).logsumexp(dim=1, keepdim=True)
    own = targets[:, None]
    log_q = torch.where(safe, z - normaliser, 0.0)
    return {
        "log_prob": z.log_softmax(dim=1).gather(1, own)[:, 0],
        "pruned_log_prob": (torch.where(safe, z, maximum - 50) - normaliser).gather(1, own)[:, 0],
        "entropy": -(p * z.log_softmax(dim=1)).sum(dim=1),
        "pruned_entropy": -(q * log_q).sum(dim=1),
        "sum_p_squared": p.square().sum(dim=1),
        "pruned_sum_p_squared": q.square().sum(dim=1),
        "pruned_mass": p.masked_fill(safe, 0.0).sum(dim=1),
        "safe_size": safe.sum(dim=1),
        "target_in_safe": safe.gather(1, own)[:, 0],
        "max_logit": maximum[:, 0],
    }


def log_prob_error(hidden, weight, temperature):
    """Bound the rounding of a log-prob: of a product and three more operations on logits, and of the sum of e over V.

    An entropy is a mean of V log-probs, of size log V; a probability is no further off than its logarithm.
    """
    terms, vocabulary = (weight != 0).sum(dim=1).max().item(), len(weight)
    largest = (hidden.detach().float().abs() @ weight.detach().float().abs().T).max().item() / temperature
    return rounding(terms + 3, largest) + rounding(vocabulary, math.log(vocabulary))


def assert_statistics(found, hidden, weight, targets, safe=None, temperature=1.0):
    atol = log_prob_error(hidden, weight, temperature)
    for name, expected in dense_statistics(hidden, weight, targets, safe, temperature).items():
        close = {"rtol": 0, "atol": atol, "msg": lambda message, name=name: f"{name}: {message}"}
        torch.testing.assert_close(getattr(found, name).double(), expected.double(), **close)


def assert_gradients(found, hidden, weight, targets, coefficients, safe=None, temperature=1.0):
    """Of Σ c · statistic, for the coefficients (N,) of each statistic that has some.

    To as many digits as a log-prob has, of the largest entry.
    """
    inside = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    dense = dense_statistics(*inside, targets, safe, temperature)

    def gradients(statistics, leaves):
        value = sum((statistics[name] * c.to(statistics[name].dtype)).sum() for name, c in coefficients.items())
        return torch.autograd.grad(value, leaves, retain_graph=True)

    for ours, theirs in zip(gradients(vars(found), [hidden, weight]), gradients(dense, inside), strict=True):
        atol = log_prob_error(hidden, weight, temperature) * max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(ours.double(), theirs, atol=atol, rtol=0)
