"""The error of a kernel's attention against softmax attention."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from mercer.approximation.comparison import Comparison, attended_pairs, compare, scores_seen
from mercer.approximation.dials import dial, draws_of, is_drawn, with_order
from mercer.approximation.intervals import Estimate, estimate
from mercer.approximation.needed import NeededFeatures, NeededOrder, needed_features, needed_order
from mercer.approximation.result import ApproximationError
from mercer.approximation.rows import Rows
from mercer.approximation.spread import spread
from mercer.approximation.state_cost import StateCost, state_cost
from mercer.core.kernels import Exp, Kernel
from mercer.core.merged import merge
from mercer.core.mixed import Mixed
from mercer.core.normalizers import Normalizer, Sum
from mercer.core.random_features import RandomFeatures
from mercer.core.structures import Full, Structure
from mercer.core.support import Sizes
from mercer.errors import InvalidArgument, NonFinite
from mercer.ops import plan

ROWS = 256
DRAWS = 8
PAIRS = 2048


@torch.no_grad()
def approximation_error(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel,
    *,
    normalizer: Normalizer | None = None,
    structure: Structure | None = None,
    scale: float | None = None,
    rows: int | None = ROWS,
    draws: int | None = None,
    target: float | None = None,
    seed: int = 0,
    confidence: float = 0.95,
) -> ApproximationError:
    """How far a kernel's attention is from softmax attention on these inputs, and what it takes to come closer.

    The reference is :class:`~mercer.Exp` under the same structure and normaliser: with ``Sum``, exact softmax
    attention. A row is compared with all keys it sees, which costs n; at most ``rows`` of them are taken, so memory
    and time are proportional to rows times keys, never to n times n. All is computed in float64: the error is the
    kernel's, not that of the arithmetic.

    Args:
        query: ``[B, Hq, Lq, D]``.
        key: ``[B, Hk, Lk, D]``.
        value: ``[B, Hk, Lk, Dv]``.
        kernel: K; bound if it is learned.
        normalizer: N of both. Default ``Sum()``.
        structure: w of both. Default ``Full()``.
        scale: factor on the inner product of both; default D^(-1/2) for softmax and the kernel's own for the kernel.
        rows: how many query positions to measure, drawn by ``seed`` without replacement; all of them if there are no
            more, or for None.
        draws: independent draws of the directions of random features, also of those in ``Mixed``, the kernel's own
            first; default 8. Other kernels draw nothing and take None.
        target: a relative error in (0, 1): also find the Taylor order or the number of random features that reaches it,
            of ``Mixed`` for its far part. Kernels without either have ``needed`` None and say so in ``no_dial``.
        seed: of the rows, and of the pairs at which the variance of random features is looked up.
        confidence: level of all intervals, Student's t on the logarithm of the error: over the rows where they are a
            sample (with the ratio of sums linearised, and the finite number of rows accounted for), over the draws
            where there are several.

    Returns:
        An :class:`ApproximationError`; print it, or take ``as_dict()`` to JSON.

    Raises:
        InvalidArgument: as :func:`mercer.attention`; a row count, draws, target or confidence out of range; inputs in
            which no row sees a key, or that are not finite.
        Unsupported: as :func:`mercer.attention`, such as odd orders under ``Sum`` without ``signed=True``.
        NonFinite: outputs left the range of float64, as those of ``Exp`` under ``Identity`` do for scores of 710.

    >>> from mercer import Causal, Taylor, approximation_error
    >>> from mercer.approximation import gaussian_inputs
    >>> found = approximation_error(*gaussian_inputs(512, 16), Taylor(2), structure=Causal(), rows=None, target=0.01)
    >>> round(found.error.value, 2), found.needed.order
    (0.34, 10)
    """
    normalizer, structure = normalizer or Sum(), structure or Full()
    _check(rows=rows, draws=draws, target=target, seed=seed, confidence=confidence, kernel=kernel)
    for part in (kernel, Exp()):
        plan(
            query, key, value, kernel=part, normalizer=normalizer, structure=structure, scale=scale, path="pairs"
        )  # fmt: skip
    if query.device.type == "mps":  # which has no float64
        query, key, value = query.cpu(), key.cpu(), value.cpu()
    work = _Work(query, key, value, kernel, normalizer, structure, scale, rows, seed, confidence)
    return work.result(DRAWS if draws is None else draws, target)


class _Work:
    """One call: the rows, and estimates from comparisons at them."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kernel: Kernel,
        normalizer: Normalizer,
        structure: Structure,
        scale: float | None,
        rows: int | None,
        seed: int,
        confidence: float,
    ) -> None:
        self.kernel, self.normalizer, self.structure = kernel, normalizer, structure
        self.seed, self.confidence, self.dim = seed, confidence, query.shape[-1]
        self.positions = query.shape[2]
        batch, heads, length, _ = query.shape
        self.sizes = Sizes(
            batch, heads, key.shape[1], length, key.shape[2], self.dim, value.shape[-1],
            itemsize=8 if query.dtype == torch.float64 else 4,
        )  # fmt: skip
        taken = self.positions if rows is None else min(rows, self.positions)
        chosen = torch.randperm(self.positions, generator=torch.Generator().manual_seed(seed))[:taken]
        self.rows = Rows(query, key, value, merge(structure), chosen.sort().values.to(query.device))
        for name, x in (("query", self.rows.query), ("key", self.rows.key), ("value", self.rows.value)):
            if not bool(torch.isfinite(x).all()):
                raise InvalidArgument(f"approximation_error: {name} must be finite.")
        if not bool(self.rows.seen.any()):
            raise InvalidArgument("approximation_error: none of the rows sees a key; there is nothing to compare.")
        self.scale = self.dim**-0.5 if scale is None else float(scale)
        self.given_scale = None if scale is None else float(scale)

    def compare(self, kernels: Sequence[Kernel]) -> Comparison:
        found = compare(self.rows, kernels, self.given_scale, self.normalizer, self.scale)
        for part, sums in ((Exp(), found.size), (self.kernel, found.wrong)):
            if not bool(torch.isfinite(sums).all()):
                raise NonFinite(
                    f"approximation_error: {part} under {self.normalizer} left the range of float64, though all inputs "
                    "are finite; use a smaller scale, a lower order, or a scale-invariant normaliser."
                )
        return found

    def errors(self, kernels: Sequence[Kernel]) -> Tensor:
        """Relative errors ``[kernels]``, on the CPU."""
        found = self.compare(kernels)
        return (found.wrong.sum((1, 2)) / found.size.sum()).sqrt().cpu()

    def cost(self, kernel: Kernel) -> StateCost:
        return state_cost(kernel, self.normalizer, merge(self.structure), self.sizes)

    def needed(self, draws: int, target: float, low: float, high: float) -> NeededOrder | NeededFeatures | None:
        """For scores from ``low`` to ``high``; None for a kernel without a dial."""
        kernel, part = self.kernel, dial(self.kernel)
        if isinstance(part, RandomFeatures):
            return needed_features(kernel, self.dim, self.errors, self.cost, draws, target, self.confidence)
        if part is None:
            return None

        def errors(kernels: Sequence[Kernel]) -> Tensor:
            if not is_drawn(kernel):
                return self.errors(kernels)
            return torch.stack([self.errors(draws_of(one, draws)).mean() for one in kernels])

        odd = with_order(kernel, 1)
        signs = not self.normalizer.needs_denominator or self.normalizer.takes_any_sign
        even = not (odd.positive or odd.allows_negative_denominator or signs)
        return needed_order(kernel, errors, self.cost, low, high, target, even)

    def estimate(self, part: Tensor, whole: Tensor, *, root: bool) -> Estimate:
        return estimate(part, whole, self.positions, self.confidence, root=root)

    def result(self, draws: int, target: float | None) -> ApproximationError:
        kernel, rows = self.kernel, self.rows
        drawn = draws_of(kernel, draws) if is_drawn(kernel) else None
        found = self.compare([kernel] if drawn is None else drawn)
        variation = None
        if kernel.positive or kernel.allows_negative_denominator:
            heads = rows.query.shape[1]
            variation = self.estimate(found.variation.sum(1) / heads, found.seen.double(), root=False)
        kernel_scale = self.given_scale
        if kernel_scale is None and not isinstance(kernel, Mixed):
            kernel_scale = kernel.default_scale(self.dim)
        scores = scores_seen(rows, self.scale)
        scatter = None
        if drawn is not None and not isinstance(kernel, Mixed):
            pairs = attended_pairs(rows, self.scale, PAIRS, self.seed)
            features = [part for part in drawn if isinstance(part, RandomFeatures)]
            scatter = spread(features, *pairs, kernel_scale, self.confidence)
        needed, no_dial = None, None
        if target is not None:
            needed = self.needed(draws, target, scores.low, scores.high)
            if needed is None:
                which = f"{kernel.far}, its far part," if isinstance(kernel, Mixed) else str(kernel)
                no_dial = f"for an error of {target:g}: {which} has no order or number of features to change"
        batch, heads, _, _ = rows.query.shape
        return ApproximationError(
            kernel=str(kernel),
            normalizer=str(self.normalizer),
            structure=str(self.structure),
            scale=self.scale,
            kernel_scale=kernel_scale,
            batch=batch,
            heads=heads,
            keys=rows.key.shape[2],
            dim=self.dim,
            rows=rows.query.shape[2],
            positions=self.positions,
            seed=self.seed,
            draws=None if drawn is None else draws,
            error=self.estimate(found.wrong.sum(1), found.size.sum(0), root=True),
            by_head=tuple(self.estimate(found.wrong[:, h], found.size[h], root=True) for h in range(heads)),
            by_draw=() if drawn is None else tuple((found.wrong.sum((1, 2)) / found.size.sum()).sqrt().tolist()),
            variation=variation,
            negative=float(found.negative.mean()),
            not_positive=float(found.not_positive.mean()),
            scores=scores,
            spread=scatter,
            needed=needed,
            no_dial=no_dial,
        )


def _check(*, rows: object, draws: object, target: object, seed: object, confidence: object, kernel: object) -> None:
    if not isinstance(kernel, Kernel):
        raise InvalidArgument(f"approximation_error: kernel must be a kernel object, not {kernel!r}.")
    for name, number, least in (("rows", rows, 1), ("draws", draws, 2), ("seed", seed, 0)):
        none = name != "seed" and number is None
        if not none and (isinstance(number, bool) or not isinstance(number, int) or number < least):
            allowed = f"an integer of {least} or more" + ("" if name == "seed" else ", or None")
            raise InvalidArgument(f"approximation_error: {name} must be {allowed}, not {number!r}.")
    if draws is not None and not is_drawn(kernel):
        raise InvalidArgument(f"approximation_error: draws is for random features; {kernel} draws nothing.")
    for name, number in (("target", target), ("confidence", confidence)):
        none = name == "target" and number is None
        if not none and (isinstance(number, bool) or not isinstance(number, Real) or not 0 < float(number) < 1):
            tail = ", or None" if name == "target" else ""
            raise InvalidArgument(f"approximation_error: {name} must lie between 0 and 1{tail}, not {number!r}.")
