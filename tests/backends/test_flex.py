"""torch's flex attention as a backend: forward on the CPU, when asked for."""

import pytest
import torch
from tests.tolerance import assert_close

from mercer import (
    L2,
    Alibi,
    BigBird,
    Blocks,
    Causal,
    Decay,
    Documents,
    Fixed,
    Global,
    Longformer,
    Padding,
    PrefixLM,
    Strided,
    Sum,
    Unsupported,
    Visible,
    Window,
    attention,
    plan,
)

pytest.importorskip("torch.nn.attention.flex_attention")
LENGTH = 150
VALID = torch.ones(2, LENGTH, dtype=torch.bool)
VALID[0, :20] = VALID[1, 100:] = False
STRUCTURES = [
    Window(9, 4),
    Causal() & Padding(mask=VALID),
    Causal() & Alibi(torch.tensor([0.5, 0.1, 0.2, 0.0])),
    Causal() & Documents(torch.tensor([0, 40, 41, LENGTH])),
    Longformer(16, (0, 70)),
    Strided(12),
    Fixed(16, 2),
    PrefixLM(30),
    (Blocks(20) | Global((5,), see=False)) & Causal(),
    Visible(lambda row, head, query, key: (key <= query) & ((query + key + head + row) % 3 != 0)),
]


def inputs(queries=LENGTH):
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, queries), (2, LENGTH), (2, LENGTH))
    return [torch.randn(2, h, n, 16, generator=generator) for h, n in sizes]


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("normalizer", [Sum(), L2()], ids=str)
def test_it_equals_the_tiles(structure, normalizer):
    options = {"structure": structure, "normalizer": normalizer, "form": "chunked", "return_lse": True}
    out, lse = attention(*inputs(), backend="flex", **options)
    expected, sums = attention(*inputs(), backend="torch", **options)
    assert_close(out, expected, LENGTH * 16)
    assert torch.equal(lse.isinf(), sums.isinf())
    assert_close(lse[lse.isfinite()], sums[sums.isfinite()], LENGTH * 16)


def test_queries_end_where_keys_do_and_follow_a_cache():
    query, key, value = inputs()
    whole = attention(query, key, value, structure=Strided(12), form="chunked")
    last = attention(query[:, :, 100:], key, value, structure=Strided(12), form="chunked", backend="flex")
    assert_close(last, whole[:, :, 100:], LENGTH * 16)
    first = [x[:, :, :100] for x in (query, key, value)]
    _, state = attention(*first, structure=Strided(12), return_state=True)
    rest = [x[:, :, 100:] for x in (query, key, value)]
    later = attention(*rest, structure=Strided(12), state=state, form="chunked", backend="flex")
    assert_close(later, whole[:, :, 100:], LENGTH * 16)


@pytest.mark.parametrize("structure", [BigBird(16), Causal() & Decay(torch.tensor([0.9]))], ids=str)
def test_what_it_does_not_know_is_refused(structure):
    with pytest.raises(Unsupported, match="flex backend"):
        attention(*inputs(), structure=structure, form="chunked", backend="flex")


def test_on_the_cpu_it_is_never_planned_and_has_no_gradient():
    query, key, value = inputs()
    assert plan(query, key, value, structure=Strided(12), form="chunked").backend != "flex"
    with pytest.raises(Unsupported, match="flex backend"):
        attention(query.requires_grad_(), key, value, structure=Strided(12), form="chunked", backend="flex")
