"""What has first derivatives alone says so, and names what has second ones, which then has them."""

import pytest
import torch

from mercer import Causal, Taylor, attention
from mercer.core.features import monomials
from mercer.errors import Unsupported
from mercer.mixers.linear_recurrence import linear_recurrence
from mercer.mixers.matrix_recurrence import matrix_recurrence
from mercer.mixers.selective_scan import selective_scan
from mercer.mixers.short_convolution import ShortConvolution
from mercer.mixers.wkv import wkv
from mercer.nn.feedforward import gated_linear
from mercer.nn.loss import linear_cross_entropy
from mercer.nn.norms import RMSNorm
from mercer.nn.rotary import Rotary, heads_per_run, split_and_turn

TOKENS = (1, 5, 2)
HEADS = (1, 2, 5, 4)


def scanned(x, step, rates, write, read, form):
    return selective_scan(x, step.exp(), -rates.exp(), write, read, form=form)[0]


def averaged(key, value, decay, bonus, form):
    return wkv(key, value, log_decay=-decay.exp(), bonus=bonus, form=form)[0]


def removed(query, key, value, decay, form):
    return matrix_recurrence(query, key, value, log_decay=-decay.exp(), form=form)[0]


def turned(qkv):
    rotary = Rotary(4)
    turns = rotary.first_turns(5, heads=heads_per_run(4, 1, 1), dtype=qkv.dtype, device=qkv.device)
    return torch.cat(split_and_turn(qkv, 1, 1, turns), 2)


def turned_apart(qkv):
    rotary, positions = Rotary(4), torch.arange(5)[None]
    query, key, value = qkv.split(1, 2)
    return torch.cat((rotary(query, positions), rotary(key, positions), value), 2)


TARGETS = torch.tensor([0, 2, 1, 1])
CONVOLUTION = ShortConvolution(2048, 2)
NORM = RMSNorm(4)
STATES = ((1, 5, 2), (1, 5, 2), (2, 3), (1, 5, 3), (1, 5, 3))
CASES = {
    "tiles": (
        lambda q, k, v: attention(q, k, v, structure=Causal(), form="chunked", backend="torch"),
        [HEADS] * 3, "form='dense'",
    ),
    "scan": (
        lambda q, k, v: attention(q, k, v, kernel=Taylor(2), structure=Causal(), form="chunked", path="features"),
        [HEADS] * 3, "form='dense'",
    ),
    "monomials": (lambda x: monomials(x, 3)[-1], [(2, 3)], "form='dense'"),
    "recurrence": (
        lambda g, x: linear_recurrence(-g.exp(), x, form="chunked")[0],
        [TOKENS] * 2, "linear_recurrence with form='recurrent'",
    ),
    "gate": (gated_linear, [(3, 4), (6, 4)], r"g\(x G\^T\) \* \(x U\^T\) written out"),
    "norm": (NORM.double(), [(2, 4)], "torch.nn.functional.rms_norm"),
    "rotary": (turned, [(1, 5, 3, 4)], "Rotary's own call on queries and on keys"),
    "loss": (
        lambda x, w: linear_cross_entropy(x, w, TARGETS, block=2),
        [(4, 3), (3, 3)], "torch.nn.functional.cross_entropy of the logits",
    ),
}  # fmt: skip
FUSED = {
    "fused recurrence": (
        lambda g, x: linear_recurrence(-g.exp(), x, form="fused")[0],
        [TOKENS] * 2, "linear_recurrence with form='recurrent'",
    ),
    "fused average": (lambda *x: averaged(*x, form="fused"), [TOKENS, TOKENS, (2,), (2,)], "wkv with form='recurrent'"),
    "fused scan of states": (lambda *x: scanned(*x, form="fused"), STATES, "selective_scan with form='chunked'"),
    "fused convolution": (lambda x: CONVOLUTION(x)[0], [(1, 20, 2048)], "float64, which torch's operators convolve"),
    "fused attention": (
        lambda q, k, v: attention(q, k, v, structure=Causal(), form="chunked", backend="numba"),
        [(1, 2, 40, 16)] * 3, "form='dense'",
    ),
}  # fmt: skip
WAYS = {
    "tiles": (lambda q, k, v: attention(q, k, v, structure=Causal(), form="dense"), [HEADS] * 3),
    "scan": (lambda q, k, v: attention(q, k, v, kernel=Taylor(2), structure=Causal(), form="dense"), [HEADS] * 3),
    "recurrence": (lambda g, x: linear_recurrence(-g.exp(), x, form="recurrent")[0], [TOKENS] * 2),
    "average": (lambda *x: averaged(*x, form="recurrent"), [TOKENS, TOKENS, (2,), (2,)]),
    "scan of states": (lambda *x: scanned(*x, form="chunked"), STATES),
    "matrices": (lambda *x: removed(*x, form="recurrent"), [HEADS] * 4),
    "convolution": (lambda x: ShortConvolution(2, 3).double()(x)[0], [TOKENS]),
    "rotary": (turned_apart, [(1, 5, 3, 4)]),
}


def tensors(shapes, dtype, generator):
    return [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("name", CASES | FUSED)
def test_second_derivatives_are_refused_with_what_has_them(name, generator):
    if name in FUSED:
        pytest.importorskip("numba")
    call, shapes, instead = (CASES | FUSED)[name]
    inputs = tensors(shapes, torch.float32 if name in FUSED else torch.float64, generator)
    out = call(*inputs)
    torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    with pytest.raises(Unsupported, match=rf"first ones only: use .*{instead}, or finite differences"):
        torch.autograd.grad(out.sum(), inputs, create_graph=True)


@pytest.mark.parametrize("name", WAYS)
def test_what_the_messages_name_has_second_derivatives(name, generator):
    call, shapes = WAYS[name]
    torch.manual_seed(0)
    state = torch.get_rng_state()

    def same(*inputs):
        torch.set_rng_state(state)  # one layer, however often it is made
        return call(*inputs)

    assert torch.autograd.gradgradcheck(same, tensors(shapes, torch.float64, generator))
