"""The Evoformer's updates of a pair representation: products and attention along the sides of triangles.

A pair representation z [B, N, N, dim] has channels for each ordered pair of N residues, an edge of a graph. Each update
of edge ij reads the two other edges of every triangle ijk; it is added to z by the caller.

Source: Jumper et al. 2021 (AlphaFold 2), supplement, algorithms 11 to 14.
"""

import torch
from torch import Tensor, nn

from mercer.core.denominators import SigmoidGate
from mercer.core.kernels import Kernel
from mercer.core.normalizers import Normalizer, Sum
from mercer.core.pairwise import Bias
from mercer.core.structures import Full
from mercer.errors import InvalidArgument
from mercer.nn.attention import Attention
from mercer.nn.feedforward import gated_linear
from mercer.nn.norms import LayerNorm


class TriangleMultiplication(nn.Module):
    """The update of edge ij by products of the two other edges of each triangle.

        a_ij = sigmoid(W_a' x_ij) * W_a x_ij,   b_ij = sigmoid(W_b' x_ij) * W_b x_ij,   x = norm(z)

        outgoing:  u_ij = sum_k a_ik * b_jk     (algorithm 11)
        incoming:  u_ij = sum_k a_ki * b_kj     (algorithm 12)

        y_ij = sigmoid(W_g x_ij) * W_out norm'(u_ij)

    dim: channels of z and y. hidden: channels of a, b and u; default dim. outgoing: which edges are read, those that
    leave i and j (the default) or those that enter them. All matrices have biases; `input` stacks W_a', W_b', W_a and
    W_b in this order. As the source says, gates start open (W_g = 0, with the bias 1) and W_out starts at 0, so that a
    new layer changes nothing. Costs 2 B N^3 hidden operations beside the matrices.
    """

    def __init__(self, dim: int, hidden: int | None = None, *, outgoing: bool = True) -> None:
        super().__init__()
        hidden = dim if hidden is None else hidden
        if dim < 1 or hidden < 1:
            raise InvalidArgument(f"a triangle update needs dim and hidden of at least 1, got {dim} and {hidden}")
        self.dim, self.hidden, self.outgoing = dim, hidden, outgoing
        self.norm, self.inner_norm = LayerNorm(dim), LayerNorm(hidden)
        self.input = nn.Linear(dim, 4 * hidden)
        self.gate = nn.Linear(dim, dim)
        self.output = nn.Linear(hidden, dim)
        _open(self.gate, self.output)
        nn.init.zeros_(self.input.weight[: 2 * hidden])
        nn.init.ones_(self.input.bias[: 2 * hidden])

    def forward(self, pairs: Tensor, *, padding: Tensor | None = None) -> Tensor:
        """pairs: [B, N, N, dim]; returns the update [B, N, N, dim].

        padding: bool [B, N], True for real residues, anywhere; edges of the others count in no sum, and what stands
        there changes nothing else.
        """
        there = _there(pairs, self.dim, padding)
        if there is not None:
            pairs = pairs.masked_fill(~there, 0)
        x = self.norm(pairs)
        both = gated_linear(x, self.input.weight, self.input.bias, gate="sigmoid")
        if there is not None:
            both = both.masked_fill(~there, 0)
        first, second = (half.movedim(-1, 1) for half in both.split(self.hidden, -1))
        with torch.autocast(x.device.type, enabled=False):  # sums over all residues, which float16 may not hold
            if first.dtype == torch.float16:
                first, second = first.float(), second.float()
            summed = first @ second.mT if self.outgoing else first.mT @ second
        update = self.output(self.inner_norm(summed.movedim(1, -1)).to(both.dtype))
        return update * self.gate(x).sigmoid()

    def extra_repr(self) -> str:
        return f"{self.dim}, hidden={self.hidden}, outgoing={self.outgoing}"


class TriangleAttention(nn.Module):
    """The update of edge ij by attention to the edges that share its starting or its ending node.

        starting:  o_ij = N( sum_k exp(b_jk) K(q_ij, k_ik) v_ik )     (algorithm 13)
        ending:    o_ij = N( sum_k exp(b_ki) K(q_ij, k_kj) v_kj )     (algorithm 14)

        y_ij = W_out (sigmoid(W_g x_ij) * o_ij),   x = norm(z)

    with q, k, v and the bias b of each head linear in x. Every row of edges is a sequence, and all rows share the bias
    of the triangle's third edge. With the default kernel and normaliser the weights are softmax of
    q.k / sqrt(head_dim) + b.

    dim: channels of z and y. heads: of the attention; head_dim: channels of a head, default dim / heads. starting:
    which node is shared. kernel, normalizer (under the gate), scale, form and generator: as in `Attention`. Pairs are
    looked at one by one, since b differs from pair to pair. Gates and W_out have biases; as the source says, gates
    start open and W_out at 0.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        starting: bool = True,
        kernel: Kernel | None = None,
        normalizer: Normalizer | None = None,
        scale: float | None = None,
        form: str = "auto",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.attention = Attention(
            dim,
            heads,
            head_dim=head_dim,
            kernel=kernel,
            normalizer=SigmoidGate(inner=Sum() if normalizer is None else normalizer),
            structure=Full(),
            scale=scale,
            bias=("output", "gate"),
            form=form,
            path="pairs",
            generator=generator,
        )
        self.dim, self.starting = dim, starting
        self.norm = LayerNorm(dim)
        self.bias = nn.Linear(dim, heads, bias=False)
        assert self.attention.gate is not None
        _open(self.attention.gate, self.attention.output)

    def forward(self, pairs: Tensor, *, padding: Tensor | None = None) -> Tensor:
        """pairs: [B, N, N, dim]; returns the update [B, N, N, dim].

        padding: bool [B, N], True for real residues, anywhere; no edge looks at those of the others, and what stands
        there changes nothing else.
        """
        there = _there(pairs, self.dim, padding)
        if there is not None:
            pairs = pairs.masked_fill(~there, 0)
        x = self.norm(pairs if self.starting else pairs.transpose(1, 2))
        bias = self.bias(x).movedim(-1, 1)  # [B, heads, j, k] for all rows i
        rows: list[Tensor] = []
        for i, sequences in enumerate(x):  # one at a time, since a structure has one bias for all or one for each row
            real = None if padding is None else padding[i].expand(len(sequences), -1)
            rows.append(self.attention(sequences, padding=real, structure=Bias(bias[i : i + 1])))
        update = torch.stack(rows) if rows else x
        return update if self.starting else update.transpose(1, 2)

    def extra_repr(self) -> str:
        return f"{self.dim}, starting={self.starting}"


def _open(gate: nn.Linear, output: nn.Linear) -> None:
    """The source's start of a residual layer: gates at sigmoid(1) for every input, and an output of 0."""
    nn.init.zeros_(gate.weight)
    nn.init.ones_(gate.bias)
    nn.init.zeros_(output.weight)
    nn.init.zeros_(output.bias)


def _there(pairs: Tensor, dim: int, padding: Tensor | None) -> Tensor | None:
    """Which edges are between real residues, [B, N, N, 1]; checks shapes."""
    if pairs.dim() != 4 or pairs.shape[1] != pairs.shape[2] or pairs.shape[3] != dim:
        raise InvalidArgument(f"a triangle update expects pairs of [B, N, N, {dim}], got {list(pairs.shape)}")
    if padding is None:
        return None
    if padding.dtype != torch.bool or padding.shape != pairs.shape[:2]:
        raise InvalidArgument(
            f"padding must be boolean [B, N] = {list(pairs.shape[:2])}, not {padding.dtype} {list(padding.shape)}"
        )
    return (padding.unsqueeze(2) & padding.unsqueeze(1)).unsqueeze(-1)
