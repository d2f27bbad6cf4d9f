from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from mercer import approximation_error
from mercer.approximation import gaussian_inputs
from mercer.core.feature_maps import Dpfp, ExpFeatures
from mercer.core.kernels import Cosine, Elu, Exp, Kernel, Power, Taylor
from mercer.core.learned_maps import Hedgehog
from mercer.core.log_weights import Alibi
from mercer.core.mixed import Mixed
from mercer.core.normalizers import L2, Identity, Sum
from mercer.core.random_features import PositiveRandomFeatures, TrigonometricRandomFeatures
from mercer.core.structures import Causal, Padding, Window
from mercer.errors import InvalidArgument, NonFinite, Unsupported
from mercer.ops import attention

INPUTS = gaussian_inputs(48, 8, 1.0, heads=3, batch=2, seed=1, dtype=torch.float64)
Q, K, V = INPUTS


@pytest.mark.parametrize("normalizer", [Sum(), L2(), Identity()])
@pytest.mark.parametrize("kernel", [Taylor(2), Elu(), Dpfp(), ExpFeatures()])
def test_the_error_is_that_of_the_attention(kernel: Kernel, normalizer: Any) -> None:
    found = approximation_error(Q, K, V, kernel, normalizer=normalizer, structure=Causal(), rows=None)
    out, exact = (
        attention(Q, K, V, kernel=part, normalizer=normalizer, structure=Causal()) for part in (kernel, Exp())
    )
    assert found.error.value == pytest.approx(float((out - exact).norm() / exact.norm()), rel=1e-9)
    heads = [float((out - exact)[:, h].norm() / exact[:, h].norm()) for h in range(3)]
    assert [head.value for head in found.by_head] == pytest.approx(heads, rel=1e-9)
    assert (found.error.low, found.error.over, found.rows) == (None, "nothing", 48)


def test_the_variation_is_that_of_the_weights() -> None:
    # the weights themselves, as the outputs for values that are the unit vectors
    ones = torch.eye(48, dtype=torch.float64).expand(2, 3, 48, 48)
    weight, exact = (attention(Q, K, ones, kernel=part, structure=Causal()) for part in (Elu(), Exp()))
    found = approximation_error(Q, K, V, Elu(), structure=Causal(), rows=None)
    assert found.variation is not None
    assert found.variation.value == pytest.approx(float((weight - exact).abs().sum(-1).mean() / 2), rel=1e-9)
    score = (Q @ K.mT * 8**-0.5)[torch.ones(48, 48, dtype=torch.bool).tril().expand(2, 3, 48, 48)]
    assert found.scores.low == pytest.approx(float(score.min()))
    assert found.scores.high == pytest.approx(float(score.max()))
    assert found.scores.mean == pytest.approx(float(score.mean()))
    assert found.scores.deviation == pytest.approx(float(score.std(correction=0)))


def test_softmax_is_no_error_at_all() -> None:
    found = approximation_error(*gaussian_inputs(64, 8, 3.0, heads=2), Exp(), structure=Window(9, 3))
    assert found.error.value == 0
    assert found.variation is not None
    assert found.variation.value == 0
    assert found.needed is None


def test_the_scale_is_that_of_both() -> None:
    small = approximation_error(Q, K, V, Taylor(2), scale=0.01, rows=None)
    assert small.error.value < 1e-3
    assert (small.scale, small.kernel_scale) == (0.01, 0.01)
    assert approximation_error(Q, K, V, Elu(), rows=None).kernel_scale == 1.0


def test_signs_are_reported() -> None:
    signed = approximation_error(Q, K, V, Taylor(3, signed=True), rows=None)
    assert 0 < signed.negative < 0.5
    assert "of the weights are negative" in str(signed)
    even = approximation_error(Q, K, V, Taylor(4), rows=None)
    assert (even.negative, even.not_positive) == (0, 0)
    assert "negative" not in str(even)
    # negative weights need not have a sum to divide by
    cosine = approximation_error(Q, K, V, Cosine(), normalizer=L2(), rows=None)
    assert cosine.variation is None
    assert cosine.not_positive > 0.1


@pytest.mark.parametrize("kernel", [Taylor(2), PositiveRandomFeatures(64)])
def test_sampled_rows_agree_with_all_of_them(kernel: Kernel) -> None:
    inputs = gaussian_inputs(400, 8, 0.5, heads=2, seed=2)
    whole = approximation_error(*inputs, kernel, structure=Causal(), rows=None)
    part = approximation_error(*inputs, kernel, structure=Causal(), rows=80, seed=4)
    assert (part.rows, part.positions) == (80, 400)
    assert "80 of 400 rows" in str(part)
    for found, exact in ((part.error, whole.error), (part.variation, whole.variation)):
        assert found is not None
        assert exact is not None
        assert found.low is not None
        assert found.high is not None
        assert found.low < exact.value < found.high
    assert len(part.by_draw) == (8 if part.draws else 0)
    if part.draws:
        assert sum(part.by_draw) / 8 == pytest.approx(part.error.value)
    again = approximation_error(*inputs, kernel, structure=Causal(), rows=80, seed=4)
    assert again == part
    other = approximation_error(*inputs, kernel, structure=Causal(), rows=80, seed=5)
    assert other.error.value != part.error.value


def test_padding_is_absence() -> None:
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[:, 48:] = False
    more = torch.full((2, 3, 12, 8), torch.nan, dtype=torch.float64)
    padded = [torch.cat((x, more), 2) for x in INPUTS]
    alone = approximation_error(Q, K, V, Taylor(2), structure=Causal(), rows=None)
    found = approximation_error(*padded, Taylor(2), structure=Causal() & Padding(mask), rows=None)
    assert found.error.value == pytest.approx(alone.error.value, rel=1e-12)
    assert found.variation is not None
    assert alone.variation is not None
    assert found.variation.value == pytest.approx(alone.variation.value, rel=1e-12)
    assert found.scores.deviation == pytest.approx(alone.scores.deviation, rel=1e-12)


def test_grouped_heads_and_bound_kernels() -> None:
    kernel = Hedgehog().bind(8, 3, 1)
    found = approximation_error(Q, K[:, :1], V[:, :1], kernel, structure=Causal(), rows=None)
    repeated = approximation_error(
        Q, K[:, :1].expand_as(K), V[:, :1].expand_as(V), Hedgehog().bind(8, 3, 3), structure=Causal(), rows=None
    )
    assert found.error.value == pytest.approx(repeated.error.value, rel=1e-6)
    bound = PositiveRandomFeatures(32, seed=7).bind(8, 3, 3)
    free = approximation_error(Q, K, V, PositiveRandomFeatures(32, seed=7), rows=None)
    assert approximation_error(Q, K, V, bound, rows=None).error.value == pytest.approx(free.error.value, rel=0.5)


def test_the_result_is_json() -> None:
    found = approximation_error(*gaussian_inputs(64, 16, 4.0), PositiveRandomFeatures(32), target=0.1)
    values = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert values["error"]["value"] == found.error.value
    assert values["needed"]["counts"] == list(found.needed.counts)  # type: ignore[union-attr]
    assert values["spread"]["pairs"] == 2048
    assert len(str(found).splitlines()) >= 5


def test_memory_is_not_that_of_all_pairs() -> None:
    """40,000 tokens: all pairs of one head would be 12.8 GB in float64.

    The growth is taken, after a small call of the same kind: neither what the first call loads and compiles is memory
    of the pairs, nor the peak that Linux hands a process on from the one that starts it, here pytest's.
    """
    code = """
import resource, sys
from mercer import Causal, Taylor, approximation_error
from mercer.approximation import gaussian_inputs
def peak(length):
    found = approximation_error(*gaussian_inputs(length, 8), Taylor(2), structure=Causal(), rows=8)
    assert 0.2 < found.error.value < 1, found
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most // 1024 if sys.platform == "darwin" else most
before = peak(400)
print(peak(40_000) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 300_000  # KiB, a fortieth of all pairs


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kernel": "taylor2"}, InvalidArgument, "kernel must be a kernel object, not 'taylor2'"),
        ({"rows": 0}, InvalidArgument, "rows must be an integer of 1 or more, or None, not 0"),
        ({"rows": 2.0}, InvalidArgument, "rows must be an integer"),
        ({"seed": -1}, InvalidArgument, "seed must be an integer of 0 or more, not -1"),
        ({"target": 0.0}, InvalidArgument, "target must lie between 0 and 1, or None, not 0.0"),
        ({"target": True}, InvalidArgument, "target must lie between"),
        ({"confidence": 1}, InvalidArgument, "confidence must lie between 0 and 1, not 1"),
        ({"draws": 4}, InvalidArgument, r"draws is for random features; Taylor\(order=2.* draws nothing"),
        (
            {"kernel": Mixed(Exp(), Taylor(2), 4), "structure": Causal(), "draws": 4},
            InvalidArgument,
            r"draws is for random features; Mixed\(.* draws nothing",
        ),
        ({"kernel": PositiveRandomFeatures(8), "draws": 1}, InvalidArgument, "draws must be an integer of 2 or more"),
        ({"kernel": Taylor(3)}, Unsupported, "takes negative values"),
        ({"kernel": TrigonometricRandomFeatures(8)}, Unsupported, "takes negative values"),
        ({"kernel": Hedgehog()}, InvalidArgument, "Hedgehog"),
        ({"scale": float("nan")}, InvalidArgument, "scale must be a finite number"),
        ({"structure": Padding(torch.zeros(2, 48, dtype=torch.bool))}, InvalidArgument, "none of the rows sees a key"),
        ({"value": V * torch.inf}, InvalidArgument, "value must be finite"),
        ({"value": V[:, :, 1:]}, InvalidArgument, "do not fit"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"query": Q, "key": K, "value": V, "kernel": Taylor(2)} | options
    with pytest.raises(error, match=message):
        approximation_error(**given)


def test_what_leaves_the_range_is_an_error_with_a_cause() -> None:
    long = [Q * 1e3, K * 10, V]
    with pytest.raises(NonFinite, match=r"Exp\(\) under Identity\(\) left the range of float64.*smaller scale"):
        approximation_error(*long, Elu(), normalizer=Identity())
    with pytest.raises(NonFinite, match=r"Power\(degree=90.* under Sum\(\) left the range"):
        approximation_error(*long, Power(90))
    assert approximation_error(*long, Elu()).error.value > 0.1


def test_a_kernel_without_a_dial_says_so() -> None:
    for kernel in (Elu(), Power(2), ExpFeatures(), Exp(), Hedgehog().bind(8, 3, 3)):
        found = approximation_error(Q, K, V, kernel, target=0.01, rows=4)
        assert found.needed is None
        assert str(found).endswith(f"for an error of 0.01: {kernel} has no order or number of features to change")
    far = approximation_error(Q, K, V, Mixed(Taylor(2), Elu(), 4), structure=Causal(), target=0.01, rows=4)
    assert (far.needed, far.no_dial) == (
        None, "for an error of 0.01: Elu(), its far part, has no order or number of features to change"
    )  # fmt: skip
    for target, kernel in ((None, Elu()), (0.5, Taylor(2))):
        assert approximation_error(Q, K, V, kernel, target=target, rows=4).no_dial is None


def test_gaussian_inputs_have_the_spread() -> None:
    q, k, v = gaussian_inputs(500, 32, 2.0, batch=2, heads=3, value_dim=5)
    assert q.shape == k.shape == (2, 3, 500, 32)
    assert v.shape == (2, 3, 500, 5)
    assert float((q @ k.mT / 32**0.5).std()) == pytest.approx(2.0, rel=0.03)
    assert torch.equal(q, gaussian_inputs(500, 32, 2.0, batch=2, heads=3, value_dim=5)[0])
    with pytest.raises(InvalidArgument, match="length must be an integer of 1 or more, not 0"):
        gaussian_inputs(0, 4)
    with pytest.raises(InvalidArgument, match="spread must be finite and 0 or more, not -1"):
        gaussian_inputs(4, 4, -1)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [Taylor(2), PositiveRandomFeatures(64), ExpFeatures()])
def test_an_accelerator_gives_the_same(kernel: Kernel) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = [
        approximation_error(
            *(x.to(device) for x in INPUTS), kernel, target=0.3, rows=16,
            structure=Causal() & Alibi(torch.tensor([0.1, 0.0, 0.5], device=device)),
        )
        for device in ("cpu", "cuda")
    ]  # fmt: skip
    assert found[1].error.value == pytest.approx(found[0].error.value, rel=1e-9)
    assert found[1].by_draw == pytest.approx(found[0].by_draw, rel=1e-9)
