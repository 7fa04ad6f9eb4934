"""Per-token statistics of the language-model head, full and pruned vocabulary in one pass.

Implements log p(a) = z_a − logsumexp(z) and log p^mp(a) = z_a − logsumexp_{V_S}(z) (docs/method.md, "Dynamic vocabulary
pruning") with the read-outs that OTB and the diagnostics need. The logits of N tokens over V ≈ 150,000 entries do not
fit in memory at once, so rows go through one buffer in chunks: a matrix product, then the sums of dvp.core.rows. Where
the loss is a sum of log-probs with known coefficients, each chunk is turned into its gradient at once, in place: three
products in all. Otherwise the backward pass recomputes the logits, a fourth product.

Shape suffixes: N flattened tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import torch

from dvp.core.rows import RowCoefficients, RowSums, row_gradient_, row_sums

if TYPE_CHECKING:
    from dvp.core.kept_sets import KeptSets
    from dvp.core.safe_vocabulary import SafeVocabulary

# The paper's mask value, taken relative to max z: as an absolute logit it would not be shift-invariant.
MASK_LOGIT = -50.0
# Logits held at once. Larger chunks make better matrix products; these keep 128 MiB (fp32) on a CPU, 1 GiB on a GPU.
CHUNK_ELEMENTS = {"cpu": 2**25, "cuda": 2**28}
# Rows of the weight whose gradient is widened from bf16 at once.
SLICE = 8192


@dataclass(frozen=True, eq=False)
class TokenStatistics:
    """Statistics of N tokens, (N,) float32 but for `target_in_safe` and `objective`; log-probs and entropies in nats.

    The log-probs and the entropies carry gradients.
    """

    log_prob: torch.Tensor
    """log p(y), over the full vocabulary."""
    pruned_log_prob: torch.Tensor
    """log p^mp(y), over V_S; see `token_statistics` for a target outside V_S."""
    entropy: torch.Tensor
    """−Σ_a p(a) log p(a), over the full vocabulary."""
    pruned_entropy: torch.Tensor
    """−Σ_{a∈V_S} p^mp(a) log p^mp(a)."""
    sum_p_squared: torch.Tensor
    """Σ_a p(a)², over the full vocabulary (OTB's proxy)."""
    pruned_sum_p_squared: torch.Tensor
    """Σ_{a∈V_S} p^mp(a)²."""
    pruned_mass: torch.Tensor
    """1 − Z = Σ_{a∉V_S} p(a), in [0, 1), exactly 0 where nothing is pruned."""
    safe_size: torch.Tensor
    """|V_S|, a count."""
    target_in_safe: torch.Tensor
    """y ∈ V_S, bool."""
    max_logit: torch.Tensor
    """max_a z_a, after temperature."""
    set_overlap: torch.Tensor
    """|V_S ∩ V'_S| / |V_S ∪ V'_S| of the rule's own set and the one it is compared with; 1 if there is none."""
    objective: torch.Tensor | None = None
    """Σ c log p^mp(y) over the targets in V_S, a scalar; if coefficients c were given, it alone has a gradient."""


OF_TOKENS = [field.name for field in fields(TokenStatistics) if field.name != "objective"]


def token_statistics(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    safe: SafeVocabulary | None,
    kept: KeptSets | None = None,
    compared: KeptSets | None = None,
    coefficient_N: torch.Tensor | None = None,
    temperature: float = 1.0,
    product_dtype: torch.dtype | None = None,
    logits_dtype: torch.dtype | None = None,
    chunk_size: int | None = None,
) -> TokenStatistics:
    """Compute the statistics of the targets under the head z = hidden · weightᵀ / temperature.

    Sums and statistics are fp32 whatever the logits are. One chunk of logits is alive at any time, forward or backward.
    The backward pass skips rows without an incoming gradient. If only the pruned statistics have one, its products skip
    what every row of a chunk prunes (copying up to half a chunk). V_S is constant under the gradient.

    With `kept`, these sets V'_S take the place of V_S in all statistics (mask replay), and `safe` is only compared with
    them (set_overlap). 1 − Z is then a difference of two fp32 sums, good to about 1e-6 and not exactly 0 where nothing
    is pruned.

    A target outside V_S has pruned_log_prob = (max z − 50) − logsumexp_{V_S}(z), finite, where (max z − 50) is a mask
    value and not a function of any logit. Its gradient with respect to z is therefore −p^mp: it moves every safe logit,
    but neither the target's own nor any other pruned one, and sums to −1, not to 0. Such tokens must not reach the
    loss: see `dvp.core.update.make_update`.

    Args:
        hidden_NH: last hidden states, one row per target (leave out prompts and padding); N = 0 is legal and keeps the
            graph.
        weight_VH: the head's weight, of the hidden states' type.
        targets_N: int64 token ids in [0, V).
        safe: the rule for V_S; None prunes nothing: pruned_log_prob equals log_prob.
        kept: sets to renormalise over, one per row, ids below V.
        compared: sets, one per row, ids below V, that are only compared with V_S (set_overlap); not with `kept`.
        coefficient_N: constants c of `TokenStatistics.objective`, if only its gradient is wanted. Leave out rows of 0.
        temperature: sampling temperature, > 0.
        product_dtype: float32 or bfloat16, what hidden states, weight and the logits' gradient are rounded to before
            they are multiplied; None takes the hidden states' own.
        logits_dtype: `product_dtype` or float32, what the products' fp32 sums are rounded to; None takes
            `product_dtype`.
        chunk_size: rows of logits held at once, ≥ 1; None chooses by device and vocabulary.
    """
    product_dtype = product_dtype or hidden_NH.dtype
    logits_dtype = logits_dtype or product_dtype
    if chunk_size is None:
        chunk_size = max(1, CHUNK_ELEMENTS[hidden_NH.device.type] // len(weight_VH))
    return TokenStatistics(
        *_Head.apply(
            hidden_NH,
            weight_VH,
            targets_N,
            coefficient_N,
            _Options(safe, kept, compared, 1.0 / temperature, product_dtype, logits_dtype, chunk_size),
        )
    )


def dense_log_prob(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    safe: SafeVocabulary | None,
    kept: KeptSets | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Return log p^mp(y) (nats) of the targets, (N,), by plain operations of PyTorch on whole logits in fp32.

    It equals pruned_log_prob of `token_statistics`, whose backward pass cannot be vectorised over gradients. Use it for
    few rows: it holds all their logits and gradients. A target outside V_S has the mask value here too.
    """
    logits_NV = torch.nn.functional.linear(hidden_NH, weight_VH).float() / temperature
    shifted_NV = logits_NV - logits_NV.detach().amax(dim=1, keepdim=True)
    if kept is None:
        safe_NV = shifted_NV.detach() >= _log_rho(logits_NV.detach(), safe)[:, None]
    else:
        safe_NV = torch.zeros_like(logits_NV, dtype=torch.bool)
        safe_NV[kept.entries] = True
    target_N = shifted_NV.gather(1, targets_N[:, None])[:, 0]
    in_safe_N = safe_NV.gather(1, targets_N[:, None])[:, 0]
    normaliser_N = shifted_NV.masked_fill(~safe_NV, -torch.inf).logsumexp(dim=1)
    return torch.where(in_safe_N, target_N, MASK_LOGIT) - normaliser_N


class _Options(NamedTuple):
    """The arguments of `token_statistics` beside the tensors of the product, with defaults filled in."""

    safe: SafeVocabulary | None
    kept: KeptSets | None
    compared: KeptSets | None
    scale: float
    """1 / temperature."""
    product_dtype: torch.dtype
    logits_dtype: torch.dtype
    chunk_size: int

    @property
    def prunes(self) -> bool:
        """Return whether a rule or sets restrict the vocabulary."""
        return (self.safe, self.kept) != (None, None)


_Rows = namedtuple("_Rows", (*OF_TOKENS, "log_rho", "lse", "safe_lse", "target"))
_Rows.__doc__ = """TokenStatistics' fields of each row, and what else its gradient is made from, each (N,).

lse is log Σ e relative to the row's maximum, as e is; safe_lse the same over V_S.
"""
DIFFERENTIABLE, REPORTED = 4, len(OF_TOKENS)  # leading fields that have gradients, and that are TokenStatistics'


class _Head(torch.autograd.Function):
    """The fields of TokenStatistics, in order, as a function of hidden states and weight."""

    @staticmethod
    def forward(
        ctx,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        targets_N: torch.Tensor,
        coefficient_N: torch.Tensor | None,
        options: _Options,
    ) -> tuple[torch.Tensor, ...]:
        known = coefficient_N is not None
        product = _Product(hidden_NH, weight_VH, options, ctx.needs_input_grad[:2] if known else (False, False))
        # Finding the columns that every row prunes would synchronise with the GPU.
        of_safe_alone = options.prunes and not hidden_NH.is_cuda
        chunks = []
        for rows, logits_nV in product.chunks(
            torch.arange(len(hidden_NH), device=hidden_NH.device).split(options.chunk_size)
        ):
            rows_n = _rows(logits_nV, targets_N[rows], options, rows)
            chunks.append(rows_n)
            if known:
                nothing_n = torch.zeros_like(rows_n.max_logit)
                given_n = torch.where(rows_n.target_in_safe, coefficient_N[rows].float(), 0.0)
                _gradient_(logits_nV, rows_n, (nothing_n, given_n, nothing_n, nothing_n), options, rows)
                product.backward(rows, logits_nV, rows_n.safe_size if of_safe_alone else None)
        found = _Rows(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))
        ctx.options, ctx.known = options, known
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*found[0 if known else DIFFERENTIABLE : REPORTED])
        ctx.save_for_backward(*(product.gradients if known else (hidden_NH, weight_VH, *found)))
        if not known:
            return found[:REPORTED]
        terms_N = torch.where(found.target_in_safe, coefficient_N * found.pruned_log_prob, 0.0)
        return *found[:REPORTED], terms_N.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *outer):
        if ctx.known:
            return *(made if made is None else made.mul_(outer[-1]) for made in ctx.saved_tensors), None, None, None
        hidden_NH, weight_VH, *of_rows = ctx.saved_tensors
        saved, options = _Rows(*of_rows), ctx.options
        # If only pruned outputs have a gradient, it is exactly 0 at every pruned token.
        of_safe_alone = options.prunes and outer[0] is None and outer[2] is None
        incoming = [
            torch.zeros_like(saved.max_logit) if gradient is None else gradient for gradient in outer[:DIFFERENTIABLE]
        ]
        product = _Product(hidden_NH, weight_VH, options, ctx.needs_input_grad[:2])
        # Leave out rejected tokens, which have no gradient: they cost nothing then, and a NaN in one cannot spread.
        active_N = torch.stack([gradient_N != 0 for gradient_N in incoming]).any(dim=0)
        for rows, logits_nV in product.chunks(active_N.nonzero()[:, 0].split(options.chunk_size)):
            rows_n = _Rows(*(part[rows] for part in saved))
            _gradient_(logits_nV, rows_n, [gradient[rows] for gradient in incoming], options, rows)
            product.backward(rows, logits_nV, rows_n.safe_size if of_safe_alone else None)
        return *product.gradients, None, None, None


def _rows(logits_nV: torch.Tensor, target_n: torch.Tensor, options: _Options, rows: torch.Tensor) -> _Rows:
    """Compute the statistics of a chunk of logits; `rows` are the numbers of its rows."""
    log_rho_n = _log_rho(logits_nV, options.safe)
    # The sampled token is mostly the likeliest: a good guess of the maximum.
    target_logit_n = logits_nV.gather(1, target_n[:, None])[:, 0].float()
    sums = row_sums(logits_nV, log_rho_n, target_logit_n)
    overlap_n, shift_n = torch.ones_like(target_logit_n), target_logit_n - sums.maximum
    in_safe_n = shift_n >= log_rho_n
    other = options.compared if options.kept is None else options.kept
    if other is not None:
        other_n = other.states(rows)
        over_other, overlap_n = _over_kept(sums, other_n, logits_nV, log_rho_n)
        if options.kept is not None:
            sums, in_safe_n = over_other, other_n.contain(target_n)
    # If nothing is pruned, the pruned sums are 0, and full and pruned statistics are bit-identical.
    sum_n = sums.safe_sum + sums.pruned_sum
    lse_n, safe_lse_n = sum_n.log(), sums.safe_sum.log()
    return _Rows(
        log_prob=shift_n - lse_n,
        pruned_log_prob=torch.where(in_safe_n, shift_n, MASK_LOGIT) - safe_lse_n,
        entropy=lse_n - (sums.safe_dot + sums.pruned_dot) / sum_n,
        pruned_entropy=safe_lse_n - sums.safe_dot / sums.safe_sum,
        sum_p_squared=(sums.safe_squares + sums.pruned_squares) / sum_n.square(),
        pruned_sum_p_squared=sums.safe_squares / sums.safe_sum.square(),
        pruned_mass=sums.pruned_sum / sum_n,
        safe_size=sums.safe_size,
        target_in_safe=in_safe_n,
        max_logit=sums.maximum,
        set_overlap=overlap_n,
        log_rho=log_rho_n,
        lse=lse_n,
        safe_lse=safe_lse_n,
        target=target_n,
    )


def _gradient_(
    logits_nV: torch.Tensor, rows_n: _Rows, incoming: Sequence[torch.Tensor], options: _Options, rows: torch.Tensor
) -> None:
    """Overwrite a chunk's logits by their gradient; `incoming`, (n,) each, are those of its rows' first four fields."""
    log_prob_n, pruned_n, entropy_n, pruned_entropy_n = incoming
    coefficients = RowCoefficients(
        *_row_coefficients(log_prob_n, entropy_n, rows_n.lse, rows_n.entropy),
        *_row_coefficients(pruned_n, pruned_entropy_n, rows_n.safe_lse, rows_n.pruned_entropy),
    )
    # In fp32: 1 − p_y is a difference that bf16 would lose where p_y is near 1.
    of_safe_n = _own_gradient(pruned_n, pruned_entropy_n, rows_n.pruned_log_prob, rows_n.pruned_entropy)
    own_n = _own_gradient(log_prob_n, entropy_n, rows_n.log_prob, rows_n.entropy)
    own_n = own_n + torch.where(rows_n.target_in_safe, of_safe_n, 0.0)
    if options.kept is None:
        row_gradient_(logits_nV, rows_n.max_logit, rows_n.log_rho, coefficients)
    else:
        _kept_gradient_(logits_nV, rows_n.max_logit, options.kept.states(rows), coefficients)
    logits_nV.scatter_(1, rows_n.target[:, None], own_n[:, None].to(logits_nV.dtype))


def _row_coefficients(
    log_prob_grad_N: torch.Tensor, entropy_grad_N: torch.Tensor, lse_N: torch.Tensor, entropy_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B of the gradient at all tokens but the target, over the full vocabulary or over V_S.

    ∂log p(y)/∂z_a = [a = y] − p_a and ∂H/∂z_a = −p_a (log p_a + H), where p_a = e_a / Σe and log p_a = shift_a − lse.
    """
    slope_N = -entropy_grad_N / lse_N.exp()
    return -log_prob_grad_N / lse_N.exp() + slope_N * (entropy_N - lse_N), slope_N


def _own_gradient(
    log_prob_grad_N: torch.Tensor, entropy_grad_N: torch.Tensor, log_prob_N: torch.Tensor, entropy_N: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the target's own logit, g (1 − p_y) − h p_y (log p_y + H).

    g and h are the incoming gradients of log p(y) and H.
    """
    return -log_prob_grad_N * log_prob_N.expm1() - entropy_grad_N * log_prob_N.exp() * (log_prob_N + entropy_N)


def _over_kept(
    sums: RowSums, kept_n: KeptSets, logits_nV: torch.Tensor, log_rho_n: torch.Tensor
) -> tuple[RowSums, torch.Tensor]:
    """Split a chunk's sums by the replayed sets, not by a rule; return also how far both sets overlap.

    Of each row, only the entries in its set are read, and they are few.
    """
    state_m, id_m = kept_n.entries
    shift_m = logits_nV[state_m, id_m].float() - sums.maximum[state_m]
    exp_m = shift_m.exp()
    size_n = kept_n.sizes_N.float()
    both_n = kept_n.sums((shift_m >= log_rho_n[state_m]).float())
    sum_n, dot_n, squares_n = (kept_n.sums(values_m) for values_m in (exp_m, exp_m * shift_m, exp_m.square()))
    replayed = RowSums(
        maximum=sums.maximum,
        safe_size=size_n,
        safe_sum=sum_n,
        # Two orders of summation differ in the last bits.
        pruned_sum=(sums.safe_sum + sums.pruned_sum - sum_n).clamp(min=0.0),
        safe_dot=dot_n,
        pruned_dot=(sums.safe_dot + sums.pruned_dot - dot_n).clamp(max=0.0),
        safe_squares=squares_n,
        pruned_squares=(sums.safe_squares + sums.pruned_squares - squares_n).clamp(min=0.0),
    )
    return replayed, both_n / (sums.safe_size + size_n - both_n)


def _kept_gradient_(
    logits_nV: torch.Tensor, maximum_n: torch.Tensor, kept_n: KeptSets, coefficients_n: RowCoefficients
) -> None:
    """Do the work of `row_gradient_` with the replayed sets instead of the rule's."""
    state_m, id_m = kept_n.entries
    shift_m = logits_nV[state_m, id_m].float() - maximum_n[state_m]
    slope_m, constant_m = coefficients_n.safe_slope[state_m], coefficients_n.safe_constant[state_m]
    of_kept_m = shift_m.exp() * (constant_m + slope_m * shift_m)
    nothing_n = torch.zeros_like(maximum_n)
    of_all = coefficients_n._replace(safe_constant=nothing_n, safe_slope=nothing_n)
    row_gradient_(logits_nV, maximum_n, nothing_n, of_all)
    logits_nV[state_m, id_m] += of_kept_m.to(logits_nV.dtype)


class _Product:
    """The product z = scale · hidden · weightᵀ, chunk by chunk through one buffer, and its gradients."""

    def __init__(self, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, options: _Options, needed: tuple[bool, bool]):
        """Prepare the factors; `needed` says which of the two gets a gradient, to which `backward` adds."""
        self.hidden_NH, self.weight_VH = hidden_NH.to(options.product_dtype), weight_VH.to(options.product_dtype)
        self.scale, self.logits_dtype = options.scale, options.logits_dtype
        if not hidden_NH.is_cuda:
            # Only CUDA can sum in a wider type than that of the factors. Elsewhere widen them: the result is the same.
            self.hidden_NH, self.weight_VH = self.hidden_NH.to(self.logits_dtype), self.weight_VH.to(self.logits_dtype)
        # Chunks are added up in fp32; autograd casts the sum to the weight's type.
        self.gradients = (
            torch.zeros_like(hidden_NH) if needed[0] else None,
            torch.zeros_like(weight_VH, dtype=torch.float32) if needed[1] else None,
        )

    def chunks(self, groups: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each group of rows with its logits, which are overwritten for the next group.

        `groups` holds row indices, on the rows' device.
        """
        buffer_nV = self.hidden_NH.new_empty(len(groups[0]), len(self.weight_VH), dtype=self.logits_dtype)
        for rows in groups:
            logits_nV, hidden_nH = buffer_nV[: len(rows)], self.hidden_NH[rows]
            if hidden_nH.dtype == self.logits_dtype:
                torch.addmm(logits_nV, hidden_nH, self.weight_VH.t(), beta=0, alpha=self.scale, out=logits_nV)
            else:
                torch.mm(hidden_nH, self.weight_VH.t(), out_dtype=self.logits_dtype, out=logits_nV).mul_(self.scale)
            yield rows, logits_nV

    def backward(self, rows: torch.Tensor, gradient_nV: torch.Tensor, entries_n: torch.Tensor | None) -> None:
        """Add a chunk's part to the gradients of the hidden states and of the weight.

        Args:
            gradient_nV: the gradient with respect to the chunk's logits.
            entries_n: how many entries of each row have a gradient; if given, columns without one in any row are
                skipped.
        """
        gradient_nV = gradient_nV.to(self.weight_VH.dtype)
        weight_VH, columns = self.weight_VH, None
        # If more than half are used, copying them costs more than it saves.
        if entries_n is not None and not (2 * entries_n > len(weight_VH)).any():
            used = gradient_nV.any(dim=0).nonzero()[:, 0]
            if 2 * len(used) <= len(weight_VH):
                gradient_nV, weight_VH, columns = gradient_nV[:, used], weight_VH[used], used
        grad_hidden_NH, grad_weight_VH = self.gradients
        if grad_hidden_NH is not None:
            grad_hidden_NH[rows] = (self.scale * (gradient_nV @ weight_VH)).to(grad_hidden_NH.dtype)
        if grad_weight_VH is None:
            return
        hidden_nH = self.hidden_NH[rows]
        narrow = gradient_nV.dtype != grad_weight_VH.dtype
        if columns is None and (gradient_nV.is_cuda or not narrow):
            wide = {"out_dtype": grad_weight_VH.dtype} if narrow else {}
            torch.addmm(grad_weight_VH, gradient_nV.t(), hidden_nH, alpha=self.scale, out=grad_weight_VH, **wide)
            return
        # A product of narrow factors is narrow here: widen it by slices of the vocabulary, not as a second V × H.
        for start in range(0, gradient_nV.shape[1], SLICE):
            piece = slice(start, start + SLICE)
            part_vH = (gradient_nV[:, piece].t() @ hidden_nH).to(grad_weight_VH.dtype)
            if columns is None:
                grad_weight_VH[piece].add_(part_vH, alpha=self.scale)
            else:
                grad_weight_VH.index_add_(0, columns[piece], part_vH, alpha=self.scale)


def _log_rho(logits_NV: torch.Tensor, safe: SafeVocabulary | None) -> torch.Tensor:
    if safe is None:
        return logits_NV.new_full((len(logits_NV),), -torch.inf, dtype=torch.float32)
    return safe.log_rho(logits_NV)
