"""The model of a machine: work counted by hand, its time, JSON, and plans that follow it."""

import json
from dataclasses import replace

import pytest
import torch
from tests.contracts import cells

from mercer.core.kernels import Cosine, Elu, Exp, Kernel, Taylor
from mercer.core.learned_maps import Hedgehog, MlpFeatures
from mercer.core.machine import Cost, Machine, machine_in_use, use_machine
from mercer.core.machine_default import DEFAULT
from mercer.core.merged import merge
from mercer.core.mixed import Mixed
from mercer.core.names import parse_attention
from mercer.core.normalizers import L2
from mercer.core.random_features import PositiveRandomFeatures
from mercer.core.structures import Causal, Full
from mercer.core.support import Sizes
from mercer.core.work import WAYS, Part, Work, parts
from mercer.errors import InvalidArgument, Unsupported
from mercer.ops import attention, plan

CAUSAL = merge(Causal())
SIZES = Sizes(2, 4, 2, 128, 128, 8, 8)
IO = 4 * 2 * 128 * 16 * (4 + 2)
"""Bytes of queries and outputs (4 heads), keys and values (2 heads), 8 numbers of 4 bytes each, 2 x 128 tokens."""
STATE = 4 * 2 * 2 * 45 * 9
"""Bytes of S and z for Taylor 2 at D = 8: 1 + 8 + 36 = 45 features."""


def test_pairs_by_hand():
    rows = 2 * 4
    (dense,) = parts(Exp(), CAUSAL, SIZES, "dense", "pairs", "torch", True, False)
    assert dense == Part("dense", Work(1, rows * 128 * 128, 0, rows * 128 * 128 * 2 * 16, IO), 4)
    visible = 128 * 129 // 2
    for backend, way in (("sdpa", "sdpa"), ("numba", "fused_softmax")):
        (fused,) = parts(Exp(), CAUSAL, SIZES, "chunked", "pairs", backend, True, False)
        assert fused == Part(way, Work(1, rows * visible, 0, rows * visible * 2 * 16, IO), 4)
    # Two tiles of 64 rows see 64 and 128 keys: half a tile a row more than the triangle, to within its diagonal.
    (tiles,) = parts(Exp(), CAUSAL, SIZES, "chunked", "pairs", "torch", True, False)
    assert tiles.way == "exp_tiles"
    assert tiles.work.items == rows * (visible + 128 * 32)
    assert tiles.work.items == pytest.approx(rows * 64 * (64 + 128), rel=0.01)
    (full,) = parts(Taylor(2), merge(Full()), SIZES, "chunked", "pairs", "torch", True, False)
    assert (full.way, full.work.items) == ("tiles", rows * 128 * 128)


def test_a_step_with_a_cache_by_hand():
    one = Sizes(2, 4, 2, 1, 1, 8, 8, past_length=99)
    row, cache = parts(Exp(), CAUSAL, one, "dense", "pairs", "torch", True, True)
    kept = 4 * 2 * 2 * 100 * 16
    assert row.work == Work(1, 8 * 100, 0, 8 * 100 * 2 * 16, kept + 4 * 2 * 4 * 16)
    assert cache == Part("cache", Work(1, 0, 0, 0, 2 * kept // 100), 4)  # what was there is not moved
    trained = replace(one, trained=True)
    _, cache = parts(Exp(), CAUSAL, trained, "dense", "pairs", "torch", True, True)
    assert cache.work.bytes == 2 * kept
    (fused, _) = parts(Exp(), CAUSAL, replace(one, past_length=999), "chunked", "pairs", "numba", True, True)
    assert (fused.way, fused.heads, fused.work.items) == ("fused_decode", 4 * 3, 8 * 1000)
    (fused, _) = parts(Exp(), CAUSAL, trained, "chunked", "pairs", "numba", True, True)
    assert fused.way == "fused_softmax"


def test_features_by_hand():
    reads, updates = 2 * 4 * 128 * 45 * 8, 2 * 2 * 128 * 45 * 8
    (fused,) = parts(Taylor(2), CAUSAL, SIZES, "chunked", "features", "numba", True, False)
    inside = 2 * 4 * 128 * 16 * 16
    assert fused.work == Work(1, 2 * 4 * 128, 0, 2 * (reads + updates + inside), IO + 2 * STATE)
    (scan,) = parts(Taylor(2), CAUSAL, SIZES, "chunked", "features", "torch", True, False)
    # two chunks of 64 of all heads together; 14 operators expand queries, 14 keys
    assert scan.work.items == 2 * (12 + 28)
    assert scan.work.entries == 2 * 128 * (4 + 2) * 45
    (plain,) = parts(Elu(), CAUSAL, SIZES, "chunked", "features", "torch", True, False)
    assert plain.work.items == 2 * 12
    assert plain.work.entries == 2 * 128 * (4 + 2) * 8
    one = replace(SIZES, query_length=1, key_length=1)
    (step,) = parts(Taylor(2), CAUSAL, one, "recurrent", "features", "torch", True, True)
    assert (step.work.items, step.work.bytes) == (28, IO // 128 + 7 * STATE)
    (quick,) = parts(Taylor(2), CAUSAL, one, "recurrent", "features", "numba", True, True)
    assert (quick.work.items, quick.work.bytes, quick.work.entries) == (4, IO // 128 + 2 * STATE, 0)


def test_a_mixed_row_is_its_two_parts():
    kernel = Mixed(Exp(), Taylor(2), window=16)
    near, far = parts(kernel, CAUSAL, SIZES, "chunked", "features", "numba", True, False)
    (alone,) = parts(Taylor(2), CAUSAL, SIZES, "chunked", "features", "numba", True, False)
    assert (near.way, far) == ("exp_tiles", alone)
    band = 128 * 16 - 16 * 15 // 2
    assert near.work.items == 2 * 4 * (band + 2 * 128 * 32)
    assert [p.way for p in parts(kernel, CAUSAL, SIZES, "dense", "pairs", "torch", True, False)] == ["dense", "dense"]


def test_log_features_take_more_calls_and_passes():
    favor = PositiveRandomFeatures(32)
    scan, logs = parts(favor, CAUSAL, SIZES, "chunked", "features", "numba", True, False)
    assert (scan.way, scan.work.entries) == ("fused_scan", 4 * 2 * 128 * (4 + 2) * 32)
    assert logs == Part("step", Work(1.5, 0, 0, 0, 0), 4)


def test_a_learned_map_is_operators_and_products_beside_its_features():
    tokens = 2 * 128 * (4 + 2)
    for kernel, operators, flops in (
        (Hedgehog(), 10, 2 * 8 * 8),
        (Hedgehog(width=3), 10, 2 * 8 * 3),
        (MlpFeatures(16, 5), 12, 2 * 5 * (8 + 16)),
        (MlpFeatures(16), 6, 2 * 8 * 16),
        (Cosine(), 8, 0),
    ):
        _, maps = parts(kernel, CAUSAL, SIZES, "chunked", "features", "numba", True, False)
        assert maps == Part("step", Work(operators / 16, 0, 0, tokens * flops, 0), 4)
        _, maps, _ = parts(kernel, CAUSAL, replace(SIZES, past_length=9), "chunked", "pairs", "torch", True, True)
        assert maps.work.flops == (tokens + 2 * 2 * 9) * flops
        for path in ("pairs", "features"):
            mixed = parts(Mixed(kernel, kernel, 16), CAUSAL, SIZES, "chunked", path, "torch", True, False)
            assert mixed.count(Part("step", Work(operators / 16, 0, 0, tokens * flops, 0), 4)) == 2


def test_a_map_of_ones_own_says_what_it_takes_itself():
    class Other(Hedgehog):
        def map_query(self, query: torch.Tensor) -> torch.Tensor:
            return query

    assert Other().map_work(8) == (0, 0)


def made(**costs: Cost) -> Machine:
    """Every way of every dtype costs nothing but these."""
    free = Cost(0.0, 0.0, 1e30, 1.0)
    table = {way: costs.get(way, free) for way in WAYS}
    return Machine("a test", "cpu", 2, 1e30, 0.0, dict.fromkeys(("float32", "float64", "half"), table))


def test_seconds_are_the_sum_of_their_terms():
    machine = replace(made(dense=Cost(1e-3, 2e-6, 1e6, 3.0)), bandwidth=1e5, entry=1e-4)
    part = Part("dense", Work(2, 10, 5, 1000, 300), 1)
    once = 2e-3 + 20e-6 + 1e-3 + 5e-4 + 3e-3
    assert machine.seconds([part], SIZES) == pytest.approx(once)
    assert machine.seconds([part, part], SIZES) == pytest.approx(2 * once)
    assert machine.seconds([part], replace(SIZES, trained=True)) == pytest.approx(3 * once)


def test_each_dtype_has_its_own_numbers_and_idle_threads_are_counted():
    costs = {name: made(fused_scan=Cost(0.0, t, 1e30, 1.0)).costs["half"] for name, t in
             (("float32", 1.0), ("float64", 2.0), ("half", 3.0))}  # fmt: skip
    machine = replace(made(), costs=costs)
    found = [Part("fused_scan", Work(1, 1, 0, 0, 0), 8)]
    assert machine.seconds(found, SIZES) == 1
    assert machine.seconds(found, replace(SIZES, itemsize=8, cache_itemsize=8)) == 2
    assert machine.seconds(found, replace(SIZES, cache_itemsize=2)) == 3
    assert machine.seconds([replace(found[0], heads=1)], SIZES) == 2  # one of two threads has nothing to do


def test_json_there_and_back():
    assert Machine.from_json(DEFAULT.to_json()) == DEFAULT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("name"), "object of bandwidth, costs"),
        (lambda m: m.update(more=1), "and nothing else"),
        (lambda m: m["costs"].pop("half"), "costs must have float32"),
        (lambda m: m["costs"]["half"].pop("scan"), "each of them dense"),
        (lambda m: m["costs"]["half"]["scan"].pop("rate"), "call, item, rate, training"),
        (lambda m: m["costs"]["half"]["scan"].update(rate=0), "rate of scan in half must be a finite number above 0"),
        (lambda m: m["costs"]["half"]["scan"].update(call=-1), "call of scan in half must be .* of 0 or more"),
        (lambda m: m["costs"]["half"]["scan"].update(item="1"), "item of scan in half must be"),
        (lambda m: m.update(bandwidth=float("nan")), "bandwidth must be a finite number above 0"),
        (lambda m: m.update(threads=0), "threads must be an integer of 1 or more"),
        (lambda m: m.update(device=3), "device must be a text"),
    ],
)
def test_other_json_is_refused(change: object, message: str):
    given = json.loads(DEFAULT.to_json())
    change(given)
    with pytest.raises(InvalidArgument, match=message):
        Machine.from_json(json.dumps(given))


@pytest.mark.parametrize("text", ["", "[]", "3", '{"costs": 3}'])
def test_what_is_no_machine_is_refused(text: str):
    with pytest.raises(InvalidArgument, match="JSON"):
        Machine.from_json(text)


def test_a_machine_in_use_decides_and_ends_with_its_block():
    x = torch.empty(1, 8, 1024, 16, device="meta")
    parts_ = {"kernel": Taylor(2), "normalizer": L2(), "structure": Causal()}
    slow = Cost(1.0, 0.0, 1e30, 1.0)
    with use_machine(made(tiles=slow)):
        assert plan(x, x, x, **parts_).path == "features"
        with use_machine(made(scan=slow, fused_scan=slow)):
            found = plan(x, x, x, **parts_)
            assert (found.path, found.seconds < 1) == ("pairs", True)
        assert plan(x, x, x, **parts_).path == "features"
    assert machine_in_use() is DEFAULT
    with pytest.raises(InvalidArgument, match=r"mercer\.measure_machine"), use_machine("fast"):
        pass


KERNELS = ["softmax", "elu-sum", "taylor2-l2", "taylor4-l2", "favor256-sum", "dpfp1-sum", "exp@64:taylor2-sum"]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_the_plan_is_the_cheapest_of_what_it_may_take(name: str, dtype: torch.dtype, trained: bool):
    """Whatever is asked for, in the chunked form, takes no less time than what is chosen where nothing is asked for."""
    kernel, normalizer = parse_attention(name)
    for dim, length in ((8, 100), (16, 300), (64, 1024), (64, 4096), (64, 20_000)):
        x = torch.empty(1, 8, length, dim, device="meta", dtype=dtype, requires_grad=trained)
        options = {"kernel": kernel, "normalizer": normalizer, "structure": Causal()}
        chosen = plan(x, x, x, **options)
        for path in ("pairs", "features"):
            try:
                best = plan(x, x, x, **options, path=path)
            except Unsupported:
                continue
            assert chosen.seconds <= best.seconds, (dim, length, path)
        backends = [_seconds(x, options, chosen, backend) for backend in ("torch", "sdpa")]
        assert chosen.seconds <= min(s for s in backends if s is not None), (dim, length)


def _seconds(x: torch.Tensor, options: dict, chosen: object, backend: str) -> float | None:
    try:
        return plan(x, x, x, **options, form=chosen.form, path=chosen.path, backend=backend).seconds
    except Unsupported:
        return None


@pytest.mark.parametrize("kernel", [Exp(), Elu(), Taylor(2), Mixed(Exp(), Elu(), window=8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_more_of_anything_takes_more_time(kernel: Kernel, dtype: torch.dtype):
    def seconds(batch: int = 1, heads: int = 4, length: int = 512, dim: int = 16) -> float:
        x = torch.empty(batch, heads, length, dim, device="meta", dtype=dtype)
        return plan(x, x, x, kernel=kernel, structure=Causal()).seconds

    for name, values in (("batch", (1, 2, 8)), ("heads", (4, 8, 16)), ("length", (256, 512, 4096)), ("dim", (8, 64))):
        times = [seconds(**{name: value}) for value in values]
        assert times == sorted(times), name
        assert times[0] < times[-1], name


def test_without_numba_the_plan_has_its_own_choice(monkeypatch: pytest.MonkeyPatch):
    """Where Taylor 2 crosses from pairs to features depends on what the features run on."""
    from mercer.backends import polynomial, softmax, step

    def first() -> int:
        lengths = (256, 1024, 4096, 16_384, 65_536)
        xs = (torch.empty(1, 8, n, 64, device="meta") for n in lengths)
        return next(
            n
            for n, x in zip(lengths, xs, strict=True)
            if plan(x, x, x, kernel=Taylor(2), structure=Causal()).path == "features"
        )

    with_numba = first() if polynomial.installed() else 0
    for module in (polynomial, softmax, step):
        monkeypatch.setattr(module, "installed", lambda: False)
    x = torch.empty(1, 8, 4096, 64, device="meta")
    assert plan(x, x, x, structure=Causal()).backend == "sdpa"
    assert plan(x, x, x, kernel=Elu(), structure=Causal()).backend == "torch"
    assert first() > with_numba


def test_the_state_of_a_mixed_row_is_as_planned():
    given = cells.inputs(cells.Shape(queries=19, keys=19), torch.Generator().manual_seed(0), torch.float32)
    parts_ = {"kernel": Mixed(Exp(), Taylor(2), window=4), "structure": Causal(), "path": "features"}
    promised = plan(*given.qkv, **parts_, return_state=True).state_bytes
    _, state = attention(*given.qkv, **parts_, return_state=True)
    tensors = {n: t for n, t in state.tensors().items() if n.split(".")[-1] in ("keys", "values", "features", "mass")}
    assert sum(t.numel() * t.element_size() for t in tensors.values()) == promised
