"""Names of attentions: a closed registry, both ways."""

import pytest

from mercer.core.kernels import Cosine, Elu, Exp, Kernel, Power, Relu, Taylor
from mercer.core.names import ALIASES, KERNELS, NORMALIZERS, attention_name, parse_attention
from mercer.core.normalizers import L2, RMS, Identity, Normalizer, Sum
from mercer.errors import InvalidArgument


@pytest.mark.parametrize("ending", NORMALIZERS)
@pytest.mark.parametrize(
    "word",
    [
        "exp",
        "taylor0",
        "taylor2",
        "taylor13",
        "taylor3-signed",
        "elu",
        "relu",
        "cosine",
        "cosine-signed",
        "power2",
        "power3-signed",
    ],
)
def test_names_come_back(word: str, ending: str):
    name = f"{word}-{ending}"
    kernel, normalizer = parse_attention(name)
    assert type(normalizer) is NORMALIZERS[ending]
    again = attention_name(kernel, normalizer)
    assert again == ("softmax" if name == "exp-sum" else name)
    assert parse_attention(again)[0] == kernel


@pytest.mark.parametrize(
    ("name", "kernel", "normalizer"),
    [
        ("softmax", Exp(), Sum),
        ("linear", Elu(), Sum),
        ("taylor4-l2", Taylor(4), L2),
        ("taylor3-signed-sum", Taylor(3, signed=True), Sum),
        ("relu-rms", Relu(), RMS),
        ("cosine-l2", Cosine(), L2),
        ("power2-identity", Power(2), Identity),
    ],
)
def test_what_names_mean(name: str, kernel: Kernel, normalizer: type[Normalizer]):
    found, norm = parse_attention(name)
    assert found == kernel
    assert type(norm) is normalizer


@pytest.mark.parametrize(
    "name",
    [
        "",
        "exp",
        "sum",
        "softmax-l2",
        "taylor-l2",
        "exp2-sum",
        "taylor-2-l2",
        "exp-signed-sum",
        "Exp-Sum",
        "exp-sum-l2",
        "elu-mean",
        "taylor2-sum ",
        "os.system-sum",
        "taylor2.5-sum",
        "power0-sum",
    ],
)
def test_unknown_names_are_refused_with_what_is_allowed(name: str):
    with pytest.raises(InvalidArgument) as error:
        parse_attention(name)
    if name != "power0-sum":
        assert repr(name) in str(error.value)
        for allowed in (*ALIASES, *NORMALIZERS):
            assert allowed in str(error.value)


def test_the_registry_covers_every_kernel():
    assert {Exp, Taylor, Elu, Relu, Cosine, Power} <= set(KERNELS.values())


def test_parts_without_a_name():
    class Own(Elu):
        pass

    with pytest.raises(InvalidArgument, match="no registered name"):
        attention_name(Own(), Sum())
