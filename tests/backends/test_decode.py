"""The decoding kernel: a few queries against a cache, in one pass over it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tolerance import assert_close
from torch import Tensor

from mercer.backends import decode as module
from mercer.backends.decode import decode
from mercer.core.kernels import Exp
from mercer.core.log_weights import Alibi, Decay
from mercer.core.normalizers import L2, Identity, Normalizer, Sum
from mercer.core.state import CacheState
from mercer.core.structures import Causal, Full, Padding, Structure, Window
from mercer.errors import InvalidArgument, Unsupported
from mercer.forms import few
from mercer.ops import attention, plan

pytest.importorskip("numba")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*size: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=generator).to(dtype)


def expected(
    query: Tensor, key: Tensor, value: Tensor, scale: float, bounds: Tensor | None, valid: Tensor | None,
    slopes: Tensor | None, position: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The formula in float64: rows and log-sums."""
    groups, queries, keys = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    index = torch.arange(keys)
    if bounds is None:
        bounds = torch.tensor([[[0, keys, keys - queries + t] for t in range(queries)]])
    seen = (index >= bounds[..., :1]) & (index < bounds[..., 1:2])
    if valid is not None:
        seen = seen & valid.unsqueeze(1)
    score = scale * query.double() @ k.transpose(-1, -2)
    if slopes is not None:
        there = index.unsqueeze(0) if position is None else position
        away = (bounds[..., 2:] - there.unsqueeze(1)).abs()
        score = score - slopes.double().view(1, -1, 1, 1) * away.unsqueeze(1)
    score = score.masked_fill(~seen.unsqueeze(1), -math.inf)
    log_sum = score.logsumexp(-1)
    weights = (score - log_sum.masked_fill(log_sum == -math.inf, 0).unsqueeze(-1)).exp()
    return weights @ v, log_sum


def compare(
    query: Tensor, key: Tensor, value: Tensor, scale: float, bounds: Tensor | None = None, valid: Tensor | None = None,
    slopes: Tensor | None = None, position: Tensor | None = None,
) -> None:  # fmt: skip
    given = [x for x in (query, key, value, bounds, valid, slopes, position) if x is not None]
    kept = [x.clone() for x in given]
    out, log_sum = decode(query, key, value, scale, bounds=bounds, valid=valid, slopes=slopes, position=position)
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True)), "an argument was changed"
    assert out.dtype == log_sum.dtype == torch.float32
    rows, sums = expected(query, key, value, scale, bounds, valid, slopes, position)
    terms = query.shape[-1] + min(key.shape[2], 64)
    assert_close(out, rows, terms, "rows")
    assert torch.equal(log_sum == -math.inf, sums == -math.inf)
    there = sums > -math.inf
    assert_close(log_sum[there], sums[there], terms, "log-sums")
    assert not out[~there].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 2), (1, 3), (2, 4), (1, 7)])
def test_heads_that_share_a_cache(heads: int, groups: int, dtype: torch.dtype, generator: torch.Generator):
    for queries in (1, 2, 5):
        q = draw(2, heads * groups, queries, 24, generator=generator, dtype=dtype)
        k, v = (draw(2, heads, 333, n, generator=generator, dtype=dtype) for n in (24, 40))
        compare(q, k, v, 0.3)


@settings(max_examples=80, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    groups=st.sampled_from((1, 2, 4)),
    queries=st.integers(1, 8),
    keys=st.integers(1, 700),
    dim=st.integers(1, 150),
    width=st.integers(1, 150),
    options=st.tuples(*[st.booleans()] * 4),
    seed=st.integers(0, 1000),
)
def test_every_size(
    dtype: torch.dtype, batch: int, heads: int, groups: int, queries: int, keys: int, dim: int, width: int,
    options: tuple[bool, bool, bool, bool], seed: int,
):  # fmt: skip
    """Odd lengths and widths, ranges that may be empty, keys that are not there, slopes from positions with gaps."""
    generator = torch.Generator().manual_seed(seed)
    ranged, holes, sloping, placed = options
    q = draw(batch, heads * groups, queries, dim, generator=generator, dtype=dtype)
    k, v = (draw(batch, heads, keys, n, generator=generator, dtype=dtype) for n in (dim, width))
    bounds = valid = slopes = position = None
    if ranged or placed:
        ends = torch.randint(0, keys + 1, (batch, queries, 2), generator=generator).sort(-1).values
        here = torch.randint(0, 3 * keys, (batch, queries, 1), generator=generator)
        bounds = torch.cat((ends, here), -1)
    if holes:
        valid = torch.rand(1 if seed % 2 else batch, keys, generator=generator) > 0.5
    if sloping:
        slopes = torch.rand(heads * groups, generator=generator)
        if placed:
            position = torch.randint(0, 4, (batch, keys), generator=generator).cumsum(1)
    compare(q, k, v, dim**-0.5, bounds, valid, slopes, position)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cache_may_stand_anywhere(dtype: torch.dtype, generator: torch.Generator):
    """A view of a buffer, keys by token instead of by head, rows that do not begin at a whole vector."""
    q = draw(2, 4, 1, 40, generator=generator, dtype=dtype)
    buffer = draw(2, 2, 500, 83, generator=generator, dtype=dtype)
    compare(q, buffer[:, :, 7:461, 1:41], buffer[:, :, 7:461, 41:], 0.2)
    by_token = draw(2, 300, 2, 80, generator=generator, dtype=dtype).transpose(1, 2)
    compare(q, by_token[..., :40], by_token[..., 40:], 0.2)
    compare(q, by_token[:1, ..., :40].expand(2, -1, -1, -1), by_token[..., 40:], 0.2)


def test_large_scores_and_rising_maxima(generator: torch.Generator):
    """Scores that rise along the cache, by more than an exponential can hold, and ones that all are far below 0."""
    k = torch.ones(1, 1, 400, 4) * torch.linspace(0, 100, 400).view(1, 1, -1, 1)
    v = draw(1, 1, 400, 5, generator=generator)
    q = torch.ones(1, 1, 1, 4)
    compare(q, k, v, 1.0)
    compare(-q, k + 30, v, 1.0)


def test_what_is_hidden_does_not_count_but_what_is_not_finite_shows(generator: torch.Generator):
    q, k, v = draw(1, 1, 1, 8, generator=generator), *(draw(1, 1, 100, 8, generator=generator) for _ in range(2))
    bounds = torch.tensor([[[10, 50, 60]]])
    out, _ = decode(q, k, v, 1.0, bounds=bounds)
    for at in (0, 99):
        other = k.clone()
        other[:, :, at] = 1e4
        assert torch.equal(decode(q, other, v, 1.0, bounds=bounds)[0], out)
    k[:, :, 20] = math.nan
    assert decode(q, k, v, 1.0, bounds=bounds)[0].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digits_do_not_depend_on_the_number_of_threads(
    dtype: torch.dtype, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "ALONE", 0)
    q = draw(1, 6, 2, 32, generator=generator, dtype=dtype)
    k, v = (draw(1, 3, 5000, 32, generator=generator, dtype=dtype) for _ in range(2))
    threads, found = torch.get_num_threads(), []
    try:
        for n, large in ((1, 0), (2, 0), (3, 1 << 40), (7, 0), (7, 1 << 40)):
            monkeypatch.setattr(module, "LARGE", large)
            torch.set_num_threads(n)
            found.append(decode(q, k, v, 0.2))
    finally:
        torch.set_num_threads(threads)
    for out, log_sum in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(log_sum, found[0][1])


def test_what_does_not_fit_is_refused(generator: torch.Generator):
    q, k, v = (draw(1, 2, n, 4, generator=generator) for n in (1, 9, 9))
    cases = [
        ((q, k[:, :, :8], v), {}, "Hk divides Hq"),
        ((q[0], k, v), {}, "must be"),
        ((q, k.bfloat16(), v), {}, "must all be float32"),
        ((q.double(), k.double(), v.double()), {}, "must all be float32"),
        (
            (q, k, v),
            {"bounds": torch.zeros(1, 2, 3, dtype=torch.int64)},
            r"bounds must be torch.int64 \[1 or 1, 1, 3\]",
        ),
        ((q, k, v), {"valid": torch.ones(1, 8, dtype=torch.bool)}, "valid must be"),
        ((q, k, v), {"position": torch.zeros(1, 9)}, "position must be torch.int64"),
        ((q, k, v), {"slopes": torch.ones(3)}, r"slopes must be \[2\]"),
    ]
    for tensors, options, message in cases:
        with pytest.raises(InvalidArgument, match=message):
            decode(*tensors, 1.0, **options)
    with pytest.raises(Unsupported, match="no gradient"):
        decode(q.requires_grad_(), k, v, 1.0)
    with torch.no_grad():
        decode(q, k, v, 1.0)


# As a backend


STRUCTURES: dict[str, Structure] = {
    "full": Full(),
    "causal": Causal(),
    "window": Window.last(37),
    "alibi": Causal() & Alibi(torch.tensor([0.5, 0.25, 0.125, 0.0625])),
    "alibi-window": Window.last(50) & Alibi(torch.tensor([0.5, 0.25, 0.125, 0.0625])),
    "window-behind": Window(20, None),
}


def state_of(structure: Structure, tokens: int, dtype: torch.dtype, generator: torch.Generator) -> CacheState:
    k, v = (draw(2, 2, tokens, 16, generator=generator, dtype=dtype) for _ in range(2))
    q = draw(2, 4, tokens, 16, generator=generator, dtype=dtype)
    _, state = attention(q, k, v, structure=structure, return_state=True, backend="torch")
    assert isinstance(state, CacheState)
    return state


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalizer", [Sum(), L2()], ids=str)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_step_equals_that_of_torch(
    structure: str, normalizer: Normalizer, dtype: torch.dtype, generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """One token and three, with padding that leaves holes before, in and after them."""
    calls = []
    monkeypatch.setattr(few, "decode_checked", lambda *args, **options: calls.append(args) or decode(*args, **options))
    laid = STRUCTURES[structure]
    with torch.no_grad():
        state = state_of(laid, 131, dtype, generator)
        for count in (1, 3):
            for holes in (False, True):
                q = draw(2, 4, count, 16, generator=generator, dtype=dtype)
                k, v = (draw(2, 2, count, 16, generator=generator, dtype=dtype) for _ in range(2))
                padding = torch.rand(2, count, generator=generator) > 0.4
                used = laid & Padding(padding) if holes else laid
                options = {"normalizer": normalizer, "structure": used, "state": state, "form": "chunked"}
                before = len(calls)
                out, after = attention(q, k, v, **options, backend="numba", return_state=True)
                assert len(calls) == before + 1
                theirs, same = attention(q, k, v, **options, backend="torch", return_state=True)
                assert_close(out, theirs.double(), 200, f"{count} {holes}")
                for a, b in zip(after.tensors().values(), same.tensors().values(), strict=True):
                    assert torch.equal(a, b)
                state = after


def test_more_queries_than_keys(generator: torch.Generator):
    """Reading from a cache alone: the queries stand on its last tokens."""
    with torch.no_grad():
        state = state_of(Causal(), 60, torch.float32, generator)
        q = draw(2, 4, 4, 16, generator=generator)
        none = draw(2, 2, 0, 16, generator=generator)
        for structure in (Causal(), Full(), Window.last(9)):
            options = {"structure": structure, "state": state, "form": "chunked"}
            ours, theirs = (attention(q, none, none, **options, backend=b) for b in ("numba", "torch"))
            assert_close(ours, theirs.double(), 80)


def test_when_it_is_planned(generator: torch.Generator):
    """Where a cache is long, queries are few and no gradient is wanted; a decay or a bare row factor is not for it."""
    q, k, v = (draw(1, 4, 1, 64, generator=generator) for _ in range(3))
    with torch.no_grad():
        _, state = attention(*(x.expand(-1, -1, 4000, -1) for x in (q, k, v)), structure=Causal(), return_state=True)
        chosen = plan(q, k, v, structure=Causal(), state=state, return_state=True)
        assert (chosen.form, chosen.path, chosen.backend) == ("chunked", "pairs", "numba")
        assert "fused decode kernel" in chosen.reason
        for options in ({"normalizer": Identity()}, {"kernel": Exp(), "structure": Causal() & Decay(torch.ones(4))}):
            assert plan(q, k, v, **{"structure": Causal(), **options}).backend == "torch"
    wanted = plan(q.clone().requires_grad_(), k, v, structure=Causal(), state=state)
    assert "decode kernel" not in wanted.reason


def test_a_gradient_is_still_given(generator: torch.Generator):
    """The same call with and without a gradient wanted."""
    with torch.no_grad():
        state = state_of(Causal(), 90, torch.float32, generator)
    q, k, v = (draw(2, n, 1, 16, generator=generator) for n in (4, 2, 2))
    options = {"structure": Causal(), "state": state, "form": "chunked", "backend": "numba"}
    out = attention(q.requires_grad_(), k, v, **options)
    (gradient,) = torch.autograd.grad(out.sum(), [q])
    assert gradient.abs().max() > 0
    with torch.no_grad():
        assert_close(attention(q, k, v, **options), out.double(), 120)
