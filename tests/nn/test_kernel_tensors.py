"""Attention layers of kernels that carry tensors: drawn directions as buffers, learned maps as parameters."""

import copy
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from mercer.core.feature_maps import Dpfp
from mercer.core.kernels import Elu, Exp, Kernel
from mercer.core.learned_maps import Hedgehog, MlpFeatures
from mercer.core.mixed import Mixed
from mercer.core.random_features import PositiveRandomFeatures, TrigonometricRandomFeatures
from mercer.errors import InvalidArgument
from mercer.nn import Attention
from mercer.ops import attention

RANDOM = [PositiveRandomFeatures(12, seed=3), TrigonometricRandomFeatures(12, signed=True)]
LEARNED = [Hedgehog(), Hedgehog(3), MlpFeatures(5), MlpFeatures(5, hidden=4)]


@dataclass(frozen=True, eq=False)
class Scaled(Elu):
    """elu + 1 times learned numbers for every head: a user's kernel, through nothing but the interface."""

    numbers: dict[str, Tensor] = field(default_factory=dict)
    learned: ClassVar[bool] = True

    def bind(self, dim: int, query_heads: int, key_heads: int, generator: torch.Generator | None = None):
        return (
            self if self.numbers else replace(self, numbers={"factor": torch.rand(key_heads, dim, generator=generator)})
        )

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.numbers)

    def with_tensors(self, tensors: dict[str, Tensor]):
        return replace(self, numbers=tensors)

    def map_key(self, key: Tensor) -> Tensor:
        return super().map_key(key) * self.numbers["factor"].to(key).unsqueeze(1)


def layer(kernel: Kernel, seed: int = 0, **options) -> Attention:
    torch.manual_seed(1)
    return Attention(8, 4, kv_heads=2, kernel=kernel, generator=torch.Generator().manual_seed(seed), **options)


def by_hand(made: Attention, x: Tensor, kernel: Kernel) -> Tensor:
    qkv = made.qkv(x).unflatten(2, (-1, made.head_dim)).transpose(1, 2)
    q, k, v = qkv.split((made.heads, made.kv_heads, made.kv_heads), 1)
    out = attention(q, k, v, kernel=kernel, normalizer=made.normalizer, structure=made.structure)
    return made.output(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kernel", [*RANDOM, *LEARNED, Scaled()], ids=str)
def test_a_layer_computes_with_the_tensors_that_it_has(kernel: Kernel):
    made, x = layer(kernel), torch.randn(2, 6, 8)
    assert made.kernel_tensors is not None
    names = dict(made.kernel_tensors.named_parameters() if kernel.learned else made.kernel_tensors.named_buffers())
    assert set(made.kernel.tensors()) <= set(names)
    for name, tensor in made.kernel.tensors().items():
        assert tensor is names[name]
        assert f"kernel_tensors.{name}" in made.state_dict()
    bound = kernel.bind(2, 4, 2).with_tensors({n: t.detach().clone() for n, t in made.kernel.tensors().items()})
    torch.testing.assert_close(made(x), by_hand(made, x, bound))
    with torch.no_grad():
        for tensor in made.kernel.tensors().values():
            tensor += torch.randn_like(tensor) / 4
    moved = bound.with_tensors({n: t.detach().clone() for n, t in made.kernel.tensors().items()})
    torch.testing.assert_close(made(x), by_hand(made, x, moved))
    assert not torch.allclose(made(x), by_hand(made, x, bound))


@pytest.mark.parametrize("kernel", [*LEARNED, Scaled()], ids=str)
def test_learned_maps_are_trained(kernel: Kernel):
    made, x = layer(kernel), torch.randn(2, 6, 8)
    made(x).square().sum().backward()
    for name, parameter in made.kernel_tensors.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("kernel", [*RANDOM, *LEARNED], ids=str)
def test_saved_and_loaded_the_layer_is_the_same(kernel: Kernel):
    made, other, x = layer(kernel), layer(kernel, seed=1), torch.randn(2, 6, 8)
    if kernel not in (Hedgehog(), Hedgehog(3)):  # which begin as the identity
        assert not torch.equal(made(x), other(x))
    other.load_state_dict(load(save(made.state_dict())))
    assert torch.equal(made(x), other(x))
    _, state = made(x, return_state=True)
    assert torch.equal(made(x, state=state), other(x, state=state)), "the state of one is a state of the other"


@pytest.mark.parametrize("kernel", [*RANDOM, *LEARNED], ids=str)
def test_the_generator_decides_and_the_global_one_is_left_alone(kernel: Kernel):
    before = torch.get_rng_state()
    bound = [Attention(8, 4, kernel=kernel, generator=torch.Generator().manual_seed(7)).kernel for _ in range(2)]
    torch.set_rng_state(before)
    plain = Attention(8, 4, kernel=Exp())
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    Attention(8, 4, kernel=kernel, generator=torch.Generator().manual_seed(7))
    assert torch.equal(torch.get_rng_state(), after)
    assert plain.kernel_tensors is None
    assert bound[0] == bound[1]


def test_random_directions_keep_their_digits():
    """In a model of bfloat16 the features are those of the float32 one."""
    made = layer(RANDOM[0])
    exact = made.kernel.tensors()["directions"].clone()
    for moved in (copy.deepcopy(made).to(torch.bfloat16), copy.deepcopy(made).half(), copy.deepcopy(made).double()):
        assert moved.qkv.weight.dtype != torch.float32
        assert torch.equal(moved.kernel.tensors()["directions"], exact)
        assert moved(torch.randn(1, 3, 8).to(moved.qkv.weight.dtype)).dtype == moved.qkv.weight.dtype
    assert made.to("meta").kernel.tensors()["directions"].device.type == "meta"
    learned = layer(Hedgehog()).to(torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in learned.parameters())
    assert learned(torch.randn(1, 3, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("kernel", RANDOM, ids=str)
def test_redrawn_features_are_new_and_go_on_after_loading(kernel: Kernel):
    made, x = layer(kernel), torch.randn(1, 5, 8)
    _, state = made(x, return_state=True)
    held = made.kernel_tensors.directions
    outs = [made(x)]
    for _ in range(2):
        made.redraw()
        outs.append(made(x))
    assert made.kernel_tensors.directions is held, "an optimiser or a caller may hold it"
    with pytest.raises(InvalidArgument, match="The state was made by"):
        made(x, state=state)
    loaded = layer(kernel, seed=5)
    loaded.load_state_dict(made.state_dict())
    for one in (made, loaded):
        one.redraw()
    assert torch.equal(made(x), loaded(x))
    outs.append(made(x))
    assert all(not torch.allclose(a, b) for i, a in enumerate(outs) for b in outs[:i])
    for one in (made, loaded):
        one.redraw(seed=11)
    assert torch.equal(made(x), loaded(x))
    wanted = replace(kernel, seed=11).bind(2, 4, 2)
    torch.testing.assert_close(made(x), by_hand(made, x, wanted))


def test_a_mixed_kernel_trains_one_part_and_draws_the_other():
    kernel = Mixed(Hedgehog(), PositiveRandomFeatures(12), window=2, log_ratio=torch.zeros(4))
    made, x = layer(kernel), torch.randn(2, 6, 8)
    made(x).square().sum().backward()
    parameters = {n for n, p in made.kernel_tensors.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert parameters == {"near_query_weight", "near_key_weight", "log_ratio"}
    before, held = made(x), made.kernel_tensors.near_key_weight.clone()
    made.redraw()
    assert not torch.allclose(made(x), before)
    assert torch.equal(made.kernel_tensors.near_key_weight, held)
    loaded = layer(kernel, seed=5)
    loaded.load_state_dict(load(save(made.state_dict())))
    assert torch.equal(made(x), loaded(x))
    for one in (made, loaded):
        one.redraw()
    assert torch.equal(made(x), loaded(x))
    fixed = layer(Mixed(Exp(), Elu(), window=2))
    assert fixed.kernel_tensors is None
    torch.testing.assert_close(fixed(x), by_hand(fixed, x, Mixed(Exp(), Elu(), window=2)))


def test_what_cannot_be_drawn_or_bound_is_said():
    for kernel in (Elu(), Hedgehog()):
        with pytest.raises(InvalidArgument, match="redraw is for random features"):
            layer(kernel).redraw()
    with pytest.raises(InvalidArgument, match="bound to head dimension 3"):
        layer(RANDOM[0].bind(3, 4, 2))
    with pytest.raises(InvalidArgument, match=r"below 2\^63"):
        Attention(8, 4, kernel=PositiveRandomFeatures(4, seed=2**63))


def test_layers_of_one_bound_kernel_do_not_share_it():
    kernel = Hedgehog().bind(2, 4, 2)
    one, two = layer(kernel), layer(kernel)
    with torch.no_grad():
        one.kernel_tensors.query_weight += 1
    assert not torch.equal(one.kernel_tensors.query_weight, two.kernel_tensors.query_weight)
    assert kernel.weights is not None
    assert torch.equal(kernel.weights["query_weight"], two.kernel_tensors.query_weight)


def test_a_seed_that_cannot_be_saved_changes_nothing():
    made = layer(Mixed(Exp(), PositiveRandomFeatures(12), window=3))
    before = {name: t.clone() for name, t in made.state_dict().items()}
    for seed in (2**63, 2**64, -1):
        with pytest.raises(InvalidArgument):
            made.redraw(seed)
    assert all(torch.equal(t, before[name]) for name, t in made.state_dict().items())


def test_a_layer_of_a_kernel_whose_tensor_was_computed_is_copied():
    """A copy of a module copies what it holds, and torch copies no tensor with a graph behind it."""
    ratio = torch.ones(4, requires_grad=True) * 2
    made = layer(Mixed(Exp(), Elu(), window=3, log_ratio=ratio))
    x = torch.randn(2, 5, 8)
    assert torch.equal(copy.deepcopy(made)(x), made(x))


def test_a_kernel_that_cannot_serve_the_heads_is_refused_when_the_layer_is_made():
    with pytest.raises(InvalidArgument, match="nu must be at most 2 D - 1 = 3"):
        layer(Dpfp(9))
