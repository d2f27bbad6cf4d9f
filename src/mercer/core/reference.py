"""The specification: the equation as a literal double loop over queries and keys, in float64.

Slow on purpose, and written from the formulas alone: it shares no step with the forms, only the values that say what
to compute. Every form, path and chunk size must equal it, and so must every gradient (it is ordinary differentiable
torch code).
"""

from __future__ import annotations

import math
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from mercer.core.bigbird import BigBird
from mercer.core.denominators import Clamped, Detached, Length, SigmoidGate
from mercer.core.kernels import Cosine, Elu, Exp, Gaussian, Kernel, Power, Relu, Taylor
from mercer.core.log_weights import Alibi, Decay, RelativeBias
from mercer.core.mixed import Mixed
from mercer.core.normalizers import L2, RMS, Identity, Normalizer, Standardize, Sum
from mercer.core.pairwise import Bias, Mask
from mercer.core.reference_maps import literal_features
from mercer.core.reference_patterns import literal_weight, literally_shown
from mercer.core.soft_cap import SoftCap
from mercer.core.structures import Causal, Documents, Either, Full, Padding, Pattern, Structure, Window
from mercer.errors import Unsupported


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel | None = None,
    normalizer: Normalizer | None = None,
    structure: Structure | None = None,
    scale: float | None = None,
) -> Tensor:
    """o_i = N( sum_j w_ij K(q_i, k_j) v_j ), pair by pair; arguments and result as of :func:`mercer.attention`, in
    float64.
    """
    kernel, normalizer, structure = kernel or Exp(), normalizer or Sum(), structure or Full()
    query, key, value = query.double(), key.double(), value.double()
    batch, heads, length, _ = query.shape
    groups = heads // key.shape[1]
    weigh = _Weights(structure, batch, heads, length, key.shape[2])
    rows: list[Tensor] = []
    for i in range(length):
        numerator = value.new_zeros(batch, heads, value.shape[-1])
        denominator, count = value.new_zeros(batch, heads), value.new_zeros(batch, heads)
        for j in range(key.shape[2]):
            k = key[:, :, j].repeat_interleave(groups, 1)
            v = value[:, :, j].repeat_interleave(groups, 1)
            visible, log_weight = weigh(i, j)  # [B, H or 1], [B, H]
            similar = _similarity(kernel, query[:, :, i], k, scale, weigh.ahead(i, j))
            pair = torch.where(visible, log_weight.exp() * similar, 0.0)
            numerator = numerator + pair.unsqueeze(-1) * v
            denominator = denominator + pair
            count = count + visible
        rows.append(_normalise(normalizer, numerator, denominator, count, i))
    return torch.stack(rows, 2) if rows else value.new_zeros(batch, heads, 0, value.shape[-1])


def reference_state(
    key: Tensor, value: Tensor, kernel: Kernel, structure: Structure | None = None, heads: int | None = None
) -> tuple[Tensor, Tensor]:
    """S = sum_j w_j phi(k_j) v_j^T ``[B, H, F, Dv]`` and z = sum_j w_j phi(k_j) ``[B, H, F]`` after the last key, in
    float64.
    """
    key, value = key.double(), value.double()
    batch, key_heads, length, _ = key.shape
    heads = key_heads if heads is None else heads
    weigh = _Weights(structure or Full(), batch, heads, 1, length)
    phi = [monomial_features(kernel, key[:, :, j].repeat_interleave(heads // key_heads, 1)) for j in range(length)]
    features = sum(
        (
            torch.where(
                seen[:, None, None, None], log.exp()[..., None, None] * phi[j].unsqueeze(-1) * v.unsqueeze(-2), 0.0
            )
            for j in range(length)
            for seen, log in [weigh.absorbed(j)]
            for v in [value[:, :, j].repeat_interleave(heads // key_heads, 1)]
        ),
        start=torch.zeros((), dtype=torch.float64),
    )
    mass = sum(
        (
            torch.where(seen[:, None, None], log.exp()[..., None] * phi[j], 0.0)
            for j in range(length)
            for seen, log in [weigh.absorbed(j)]
        ),
        start=torch.zeros((), dtype=torch.float64),
    )
    return torch.as_tensor(features), torch.as_tensor(mass)


def _similarity(kernel: Kernel, query: Tensor, key: Tensor, scale: float | None, ahead: Tensor) -> Tensor:
    """K(q, k) ``[B, H]`` for a key ``ahead`` ``[B]`` positions after the query (negative: before it)."""
    if isinstance(kernel, Mixed):
        near, far = (_similarity(part, query, key, scale, ahead) for part in (kernel.near, kernel.far))
        if kernel.log_ratio is not None:
            near = near * kernel.log_ratio.double().exp()
        return torch.where((-ahead < kernel.window).unsqueeze(1), near, far)
    return kernel_value(kernel, query, key, kernel.default_scale(query.shape[-1]) if scale is None else scale)


def kernel_value(kernel: Kernel, query: Tensor, key: Tensor, scale: float) -> Tensor:
    """K(q, k) over the last dimension, from the kernel's defining formula."""
    if isinstance(kernel, Elu):
        return scale * (_elu_plus_one(query) * _elu_plus_one(key)).sum(-1)
    if isinstance(kernel, Relu):
        return scale * (query.clamp(min=0) * key.clamp(min=0)).sum(-1)
    if isinstance(kernel, Cosine):
        norms = query.square().sum(-1).sqrt() * key.square().sum(-1).sqrt()
        return torch.where(norms > 0, scale * (query * key).sum(-1) / torch.where(norms > 0, norms, 1.0), 0.0)
    if isinstance(kernel, Gaussian):
        return (-scale * (query - key).square().sum(-1) / 2).exp()
    phi_query, phi_key = (literal_features(kernel, x, scale, s) for x, s in ((query, "query"), (key, "key")))
    if phi_query is not None and phi_key is not None:
        return (phi_query * phi_key).sum(-1)
    score = scale * (query * key).sum(-1)
    if isinstance(kernel, Exp):
        return score.exp()
    if isinstance(kernel, SoftCap):
        ratio = (2 * score / kernel.cap).exp()
        return (kernel.cap * (1 - 2 / (ratio + 1))).exp()
    if isinstance(kernel, Taylor):
        terms = [torch.ones_like(score)]
        for n in range(1, kernel.order + 1):
            terms.append(terms[-1] * score / n)
        return torch.stack(terms).sum(0)
    if isinstance(kernel, Power):
        return score**kernel.degree
    mapped = (kernel.map_query(query) * kernel.map_key(key)).sum(-1)
    return kernel.profile(scale * mapped)


def monomial_features(kernel: Kernel, key: Tensor) -> Tensor:
    """phi(k) as listed by the kernel's formula, at the kernel's own scale: ``[..., D] -> [..., F]``."""
    phi = literal_features(kernel, key, kernel.default_scale(key.shape[-1]), "key")
    if phi is not None:
        return phi
    if isinstance(kernel, Elu):
        return _elu_plus_one(key)
    if isinstance(kernel, Relu):
        return key.clamp(min=0)
    if isinstance(kernel, Cosine):
        norm = key.square().sum(-1, keepdim=True).sqrt()
        return torch.where(norm > 0, key / torch.where(norm > 0, norm, 1.0), 0.0)
    if isinstance(kernel, Taylor):
        return torch.cat([_monomials(key, n) for n in range(kernel.order + 1)], -1)
    if isinstance(kernel, Power):
        return _monomials(key, kernel.degree) * math.sqrt(math.factorial(kernel.degree))
    return kernel.features(kernel.map_key(key))


def _monomials(x: Tensor, degree: int) -> Tensor:
    """All x^a / sqrt(a!) with |a| = degree."""
    columns: list[Tensor] = []
    for chosen in combinations_with_replacement(range(x.shape[-1]), degree):
        repeats = math.prod(math.factorial(chosen.count(c)) for c in set(chosen))
        column = torch.ones_like(x[..., 0]) / math.sqrt(repeats)
        for c in chosen:
            column = column * x[..., c]
        columns.append(column)
    return torch.stack(columns, -1)


def _elu_plus_one(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def _normalise(normalizer: Normalizer, numerator: Tensor, denominator: Tensor, count: Tensor, row: int) -> Tensor:
    """The output ``[B, H, Dv]`` of a row that sees ``count`` keys, ``[B, H]``."""
    if isinstance(normalizer, Identity):
        return numerator
    if isinstance(normalizer, SigmoidGate):
        assert normalizer.gate is not None
        gate = normalizer.gate.double()[:, :, row]
        inner = _normalise(normalizer.inner, numerator, denominator, count, row)
        return inner / (1 + (-(gate if gate.dim() == 3 else gate.unsqueeze(-1))).exp())
    if isinstance(normalizer, Length):
        return torch.where(count.unsqueeze(-1) > 0, numerator / torch.where(count > 0, count, 1.0).unsqueeze(-1), 0.0)
    if isinstance(normalizer, Clamped):
        size = torch.where(denominator < 0, -denominator, denominator)
        return numerator / torch.where(size > normalizer.minimum, size, normalizer.minimum).unsqueeze(-1)
    if isinstance(normalizer, Standardize):
        mean = numerator.mean(-1, keepdim=True)
        variance = (numerator - mean).square().mean(-1, keepdim=True)
        constant = (numerator == numerator[..., :1]).all(-1, keepdim=True)
        out = torch.where(constant, 0.0, (numerator - mean) / torch.where(constant, 1.0, variance).sqrt())
        for tensor, combine in ((normalizer.gain, torch.mul), (normalizer.bias, torch.add)):
            if tensor is not None:
                out = combine(out, tensor.double().unsqueeze(-1) if tensor.dim() == 1 else tensor.double())
        return torch.where(count.unsqueeze(-1) > 0, out, 0.0)
    if isinstance(normalizer, Detached):
        denominator = denominator.detach()
    if isinstance(normalizer, Sum | Detached):
        empty = denominator == 0
        return torch.where(empty.unsqueeze(-1), 0.0, numerator / torch.where(empty, 1.0, denominator).unsqueeze(-1))
    if isinstance(normalizer, L2 | RMS):
        square = numerator.square().sum(-1, keepdim=True)
        if isinstance(normalizer, RMS):
            square = square / numerator.shape[-1]
        out = torch.where(square > 0, numerator / torch.where(square > 0, square, 1.0).sqrt(), 0.0)
        if normalizer.gain is None:
            return out
        gain = normalizer.gain.double()
        return out * (gain.unsqueeze(-1) if gain.dim() == 1 else gain)
    second = count if normalizer.needs_count else denominator
    out = normalizer.apply(numerator.unsqueeze(2), second.unsqueeze(2))
    return out.squeeze(2)


def _orders(part: Structure) -> bool:
    """Whether a part says anything of positions: patterns do, unless they show every pair."""
    if isinstance(part, Either):
        return all(any(_orders(p) for p in member.parts) for member in part.members)
    if isinstance(part, Full) or part == Window(None, None):
        return False
    return isinstance(part, Pattern | Decay | Documents | Alibi | RelativeBias)


class _Weights:
    """Visibility and log-weight of a pair, read off the parts of a structure one by one."""

    def __init__(self, structure: Structure, batch: int, heads: int, queries: int, keys: int) -> None:
        self.parts, self.batch, self.heads = structure.parts, batch, heads
        self.queries, self.keys = queries, keys
        ordered = any(_orders(part) for part in self.parts)
        self.key_real = [[True] * keys for _ in range(batch)]
        self.query_real = [[True] * queries for _ in range(batch)]
        for part in self.parts:
            if isinstance(part, Padding):
                if part.mask is not None:
                    self.key_real = part.mask.tolist()
                elif part.lengths is not None:
                    self.key_real = [[j < int(n) for j in range(keys)] for n in part.lengths]
                if part.queries is not None:
                    self.query_real = part.queries.tolist()
                elif ordered:
                    self.query_real = [[j < 0 or row[j] for j in range(keys - queries, keys)] for row in self.key_real]
        # A token's position counts the real tokens before it; queries end where keys end.
        self.key_at = [[sum(row[:j]) for j in range(keys)] for row in self.key_real]
        self.query_at = [
            [sum(real) - sum(row[i:]) for i in range(queries)]
            for real, row in zip(self.key_real, self.query_real, strict=True)
        ]

    def __call__(self, i: int, j: int) -> tuple[Tensor, Tensor]:
        """Visibility ``[B]`` and log-weight ``[B, H]`` of query i and key j."""
        there = [self.key_real[b][j] and self.query_real[b][i] for b in range(self.batch)]
        visible = list(there)
        patterned = torch.ones(self.batch, self.heads, dtype=torch.bool)
        log = torch.zeros(self.batch, self.heads, dtype=torch.float64)
        for part in self.parts:
            for b in range(self.batch):
                ahead = self.key_at[b][j] - self.query_at[b][i]
                if isinstance(part, Causal) or part == Window(None, 0):
                    visible[b] = visible[b] and ahead <= 0
                elif isinstance(part, Window) and part.dilation == 1:
                    visible[b] = (
                        visible[b]
                        and (part.left is None or -ahead <= part.left)
                        and (part.right is None or ahead <= part.right)
                    )
                elif isinstance(part, Documents):
                    stops = part.offsets.tolist()[1:]
                    visible[b] = visible[b] and sum(i >= s for s in stops) == sum(j >= s for s in stops)
                elif isinstance(part, Pattern) and not isinstance(part, Full):
                    for h in range(self.heads):
                        patterned[b, h] &= self._shows(part, b, h, i, j) if there[b] else False
                elif not isinstance(part, Full | Padding | Alibi | Decay | RelativeBias | Mask | Bias):
                    raise Unsupported(f"The reference does not know {type(part).__name__}.")
            if isinstance(part, Mask):
                patterned &= part.tensor[:, :, i, j]
            elif isinstance(part, Bias):
                log = log + part.tensor[:, :, i, j].double()
            if isinstance(part, Alibi):
                gap = torch.tensor(
                    [abs(self.key_at[b][j] - self.query_at[b][i]) for b in range(self.batch)], dtype=torch.float64
                )
                log = log - part.slopes.double() * gap.unsqueeze(1)
            elif isinstance(part, RelativeBias):
                first, last = -part.before, part.table.shape[1] - 1 - part.before
                ahead = [self.key_at[b][j] - self.query_at[b][i] for b in range(self.batch)]
                log = log + torch.stack([part.table.double()[:, min(max(a, first), last) - first] for a in ahead])
            elif isinstance(part, Decay):
                log = log + self._decay(part, j, [q + self.keys - self.queries for q in [i] * self.batch])
            elif isinstance(part, BigBird) and part.hf_compat:
                again = [literal_weight(part, *self._stand(b, i, j)) for b in range(self.batch)]
                log = log + torch.tensor(again, dtype=torch.float64).unsqueeze(1)
        return torch.tensor(visible).unsqueeze(1) & patterned, log

    def _stand(self, b: int, i: int, j: int) -> tuple[int, int, int]:
        """Positions of query i and key j of a row, and how many tokens there are, or in its own document."""
        documents = next((p for p in self.parts if isinstance(p, Documents)), None)
        if documents is None:
            return self.query_at[b][i], self.key_at[b][j], sum(self.key_real[b])
        bounds = documents.offsets.tolist()
        begin = max(s for s in bounds if s <= i)
        end = min(s for s in bounds if s > i)
        return i - begin, j - begin, end - begin

    def _shows(self, part: Pattern, b: int, h: int, i: int, j: int) -> bool:
        """Whether a pattern shows key j to query i."""
        query, key, total = self._stand(b, i, j)
        return literally_shown(part, query, key, total, b, h, (i + self.keys - self.queries, j))

    def ahead(self, i: int, j: int) -> Tensor:
        """How many positions key j stands after query i, ``[B]``."""
        return torch.tensor([self.key_at[b][j] - self.query_at[b][i] for b in range(self.batch)])

    def absorbed(self, j: int) -> tuple[Tensor, Tensor]:
        """Visibility and log-weight of key j in the state after the last key."""
        log = torch.zeros(self.batch, self.heads, dtype=torch.float64)
        for part in self.parts:
            if isinstance(part, Alibi):
                gap = torch.tensor([sum(row[j + 1 :]) for row in self.key_real], dtype=torch.float64)
                log = log - part.slopes.double() * gap.unsqueeze(1)
            elif isinstance(part, Decay):
                log = log + self._decay(part, j, [self.keys - 1] * self.batch)
        return torch.tensor([row[j] for row in self.key_real]), log

    def _decay(self, part: Decay, j: int, last: list[int]) -> Tensor:
        """sum of the log-rates of the real steps j + 1 .. last, ``[B, H]``."""
        rates = (part.rate if part.rate is not None else part.log_rate.exp()).double()  # pyright: ignore[reportOptionalMemberAccess]
        rates = rates.view(1, -1, 1).expand(self.batch, -1, self.keys) if rates.dim() == 1 else rates
        rates = rates if rates.shape[1] == self.heads else rates.repeat_interleave(self.heads // rates.shape[1], 1)
        added = (1 - rates[:, :, j]).log() if part.complement else 0.0
        rows: list[Tensor] = []
        for b in range(self.batch):
            steps = [t for t in range(j + 1, last[b] + 1) if self.key_real[b][t]]
            rows.append(sum((rates[b, :, t].log() for t in steps), start=torch.zeros(self.heads, dtype=torch.float64)))
        return torch.stack(rows) + added
