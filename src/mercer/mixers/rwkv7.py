"""RWKV-7's time mixing: a state that is corrected, channel by channel, at rates that the data say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from mercer.backends.rwkv7_step import mixtures, serves
from mercer.backends.rwkv7_step import step as one_token
from mercer.mixers.base import Mixer
from mercer.mixers.head_norm import HeadNorm
from mercer.mixers.head_sizes import head_size
from mercer.mixers.low_rank import LowRank, suggested_rank
from mercer.mixers.matrix_recurrence import matrix_recurrence
from mercer.mixers.rwkv_start import check_depth, depth, orthogonal, ramp, slope
from mercer.mixers.token_shift import token_shift
from mercer.nn.product import as_vectors, product

FIRST = "rwkv7: values of the first layer"


class RWKV7(Mixer):
    """Time mixing of RWKV-7 (Goose): with r, k and v linear, and d, a, n and g low-rank maps, each of x_t + (x_{t-1} -
    x_t) * m for an m of its own, in heads,

        w_t = exp(-e^(-1/2) sigmoid(d_t)),   a_t = sigmoid(a_t),   c_t = k_t * key_scale, of length 1 in each head,
        k'_t = k_t * (1 + (a_t - 1) * key_rate),   v'_t = v_t + (v^0_t - v_t) * sigmoid(n_t),
        S_t = diag(w_t) S_{t-1} - (a_t * c_t) (c_t^T S_{t-1}) + k'_t v'_t^T,
        y_t = W_o (g_t * (norm(S_t^T r_t) + (r_t . (bonus * k'_t)) v'_t))

    norm: layer norm over each head alone. v^0 are the values of the first such layer of the same call, which mixes
    none in itself; alone, a layer is its own first. Layer 0 of a model has no map for n.

    dim: channels of x, y, r, k and v. heads: a divisor of dim; the paper has dim / 64. decay_rank, rate_rank,
    value_rank, gate_rank: channels inside the maps of d, a, n and g; None: what the authors suggest, 2.5, 2.5, 1.7 and
    5 times sqrt(dim) to the nearest multiple of 32, at least 32. The map of d has a tanh inside and that of g a
    sigmoid; all but g's have a bias. norm_eps: of the norm. layer, layers: which of how many, for the initial values,
    which follow the authors' training code: W_o and the inner side of every map are 0.

    State: the sums S [B, heads, K, K] in float32, and the last token [B, dim].

    Source: Peng et al. 2025, arXiv 2503.14456.
    """

    carries: ClassVar[bool] = True
    undecayed: ClassVar[tuple[str, ...]] = ("bonus",)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        decay_rank: int | None = None,
        rate_rank: int | None = None,
        value_rank: int | None = None,
        gate_rank: int | None = None,
        norm_eps: float = 64e-5,
        layer: int = 0,
        layers: int = 1,
    ) -> None:
        super().__init__()
        self.dim, self.heads, self.head_dim = dim, heads, head_size("rwkv7", "key", dim, 1.0, heads)
        check_depth("rwkv7", layer, layers)
        self.layer, self.layers = layer, layers
        self.mix_receptance, self.mix_decay, self.mix_key, self.mix_value, self.mix_rate, self.mix_gate = (
            nn.Parameter(torch.empty(dim)) for _ in range(6)
        )
        self.key_scale, self.key_rate = (nn.Parameter(torch.empty(dim)) for _ in range(2))
        self.bonus = nn.Parameter(torch.empty(heads, self.head_dim))
        self.receptance, self.key, self.value, self.output = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        ranks = [
            suggested_rank(dim, factor) if rank is None else rank
            for rank, factor in ((decay_rank, 2.5), (rate_rank, 2.5), (value_rank, 1.7), (gate_rank, 5.0))
        ]
        self.decay = LowRank(dim, ranks[0], dim, activation="tanh")
        self.rate = LowRank(dim, ranks[1], dim)
        self.first_share = LowRank(dim, ranks[2], dim) if layer else None
        self.gate = LowRank(dim, ranks[3], dim, activation="sigmoid", bias=False)
        self.norm = HeadNorm(heads, self.head_dim, kind="layer", eps=norm_eps, bias=True)
        self.start()

    @torch.no_grad()
    def start(self, generator: torch.Generator | None = None) -> None:
        far, back = depth(self.layer, self.layers)
        for mix, power in (
            (self.mix_receptance, 0.2),
            (self.mix_decay, 0.9),
            (self.mix_key, 0.7),
            (self.mix_value, 0.7),
            (self.mix_rate, 0.9),
            (self.mix_gate, 0.2),
        ):
            mix.copy_(1 - ramp(self.dim) ** (power * back))
        across, within = slope(self.dim), 2 * slope(self.head_dim) - 1
        bow = (within * within.abs()).repeat(self.heads)
        self.key_scale.copy_(0.71 - 0.1 * (across - 0.5))
        self.key_rate.fill_(1.02)
        self.bonus.fill_(-0.04)
        self.norm.weight.fill_(((1 + self.layer) / self.layers) ** 0.7)
        biases = [
            (self.decay, -6 + 6 * across ** (1 + far**0.3) + 0.5 + 2.5 * bow),
            (self.rate, -0.19 + 0.3 * bow + 0.4 * (across - 0.5)),
            (self.gate, None),
        ]
        if self.first_share is not None:
            biases.append((self.first_share, 0.73 - 0.4 * (across - 0.5)))
        for low, bias in biases:
            low.down.weight.zero_()
            orthogonal(low.up.weight.t(), 0.1, generator)
            if bias is not None:
                low.up.bias.copy_(bias)
        bound = 0.5 * self.dim**-0.5
        for layer, size in ((self.receptance, bound), (self.key, 0.1 * bound), (self.value, bound)):
            layer.weight.uniform_(-size, size, generator=generator)
        self.output.weight.zero_()

    @property
    def kind(self) -> str:
        return f"rwkv7({self.dim}, heads={self.heads})"

    def mix(
        self, x: Tensor, lengths: Tensor | None, past: Mapping[str, Tensor] | None, *carried: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        wide = torch.promote_types(x.dtype, torch.float32)
        before, last = token_shift(x, lengths, None if past is None else past["last"])
        numbers = (self.key_scale, self.key_rate, self.bonus, self.norm.weight, cast(Tensor, self.norm.bias))
        state, shape = None if past is None else past["sums"].to(wide), x.shape
        shares = (
            self.mix_receptance, self.mix_decay, self.mix_key, self.mix_value, self.mix_rate, self.mix_gate
        )  # fmt: skip
        token = lengths is None and shape[1] == 1 and serves(x, *numbers, *shares, state)
        rows = mixtures(*as_vectors(x, before), shares) if token else None

        def mixed(i: int) -> Tensor:
            return torch.lerp(x, before, shares[i].to(x.dtype)) if rows is None else rows[i]

        receptance, decay, key = product(self.receptance, mixed(0)), self.decay(mixed(1)), product(self.key, mixed(2))
        read = mixed(3)
        value, rate = product(self.value, read), self.rate(mixed(4))
        shared = carried[0] if carried else {}
        if FIRST not in shared:
            shared[FIRST] = value.to(wide).view(shape)
        first = shared[FIRST]
        share = None if self.first_share is None else self.first_share(read)
        if token:
            products = (receptance, key, value, decay, rate, self.gate(mixed(5)))
            of_first = None if share is None else (share, first)
            joined, sums = one_token(products, of_first, numbers, state, self.norm.eps, x.dtype)
        else:
            normed, sums = self._between(receptance, key, value, decay, rate, share, first, state, lengths)
            joined = (self.gate(mixed(5)).to(wide) * normed).to(x.dtype)
        return product(self.output, joined).view(shape), {"last": last, "sums": sums}

    def _between(
        self,
        receptance: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        rate: Tensor,
        share: Tensor | None,
        first: Tensor,
        state: Tensor | None,
        lengths: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """What the gate multiplies, and the sums, from r, k, v, d, a and n, and the first layer's values."""
        wide = first.dtype

        def split(part: Tensor) -> Tensor:
            return part.unflatten(-1, (self.heads, self.head_dim))

        receptance, key, value = receptance.to(wide), key.to(wide), value.to(wide)
        log_decay, rate = torch.sigmoid(decay.to(wide)) * -math.exp(-0.5), torch.sigmoid(rate.to(wide))
        if share is not None:
            value = torch.lerp(value, first, torch.sigmoid(share.to(wide)))
        cleared = nn.functional.normalize(split(key * self.key_scale.to(wide)), dim=-1)
        key = split(torch.lerp(key, key * rate, self.key_rate.to(wide)))  # key (1 + (rate - 1) key_rate)
        query, value, rate = split(receptance), split(value), split(rate)
        out, sums = matrix_recurrence(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            log_decay=split(log_decay).transpose(1, 2),
            remove=((rate * cleared).transpose(1, 2), -cleared.transpose(1, 2)),
            state=state,
            lengths=lengths,
        )
        own = (query * key * self.bonus.to(wide)).sum(-1, keepdim=True)
        return torch.addcmul(split(self.norm(out.transpose(1, 2).flatten(2))), own, value).flatten(2), sums
