"""Cases 7-11: prefill, decoding, padding under decay, packed documents, going back."""

import pytest
import torch
from tests.cases.builders import cells, normal, positive
from tests.tolerance import assert_close

from mercer.core.kernels import Elu, Exp, Kernel, Taylor
from mercer.core.log_weights import Alibi, Decay
from mercer.core.state import CacheState, FeatureState
from mercer.core.structures import Causal, Documents, Padding, Structure
from mercer.ops import attention

KERNELS: list[Kernel] = [Exp(), Elu(), Taylor(2)]
STATEFUL = [(kernel, form, path) for kernel in KERNELS for form, path in cells(kernel, Causal(), stateful=True)]


@pytest.mark.parametrize("length", [1, 7, 8, 63, 64, 65, 127])
@pytest.mark.parametrize(("kernel", "form", "path"), STATEFUL, ids=str)
def test_case_7_prefill_then_one_step(kernel: Kernel, form: str, path: str, length: int):
    """transformers#46190: a chunked prefill left a wrong state where the length met the chunk of 64."""
    tensors = [normal(1, 2, length, 4, seed=s) for s in range(3)]
    options = {"kernel": kernel, "structure": Causal(), "path": path}
    full = attention(*tensors, form=form, **options)
    _, state = attention(*(x[:, :, :-1] for x in tensors), form=form, return_state=True, **options)
    for step in (form, "recurrent"):
        last = attention(*(x[:, :, -1:] for x in tensors), form=step, state=state, **options)
        assert_close(last, full[:, :, -1:], length, f"{form} then {step}")


@pytest.mark.parametrize(("kernel", "form", "path"), STATEFUL, ids=str)
def test_case_8_many_tokens_onto_a_filled_cache(kernel: Kernel, form: str, path: str):
    """transformers PR 45513: 16 tokens given at once to a filled cache saw each other's future, or lost the past."""
    tensors = [normal(2, 2, 36, 4, seed=s) for s in range(3)]
    options = {"kernel": kernel, "structure": Causal(), "path": path}
    _, state = attention(*(x[:, :, :20] for x in tensors), return_state=True, **options)
    many = attention(*(x[:, :, 20:] for x in tensors), form=form, state=state, **options)
    for t in range(16):
        at = slice(20 + t, 21 + t)
        one, state = attention(
            *(x[:, :, at] for x in tensors), form="recurrent", state=state, return_state=True, **options
        )
        assert_close(many[:, :, t : t + 1], one, 36, f"token {t}")


@pytest.mark.parametrize(("kernel", "form", "path"), STATEFUL, ids=str)
def test_case_9_a_masked_step_leaves_the_state(kernel: Kernel, form: str, path: str):
    """transformers#48256, fla#1272: under decay, right pads went on decaying the state of shorter sequences."""
    tensors = [normal(2, 2, 12, 4, seed=s) for s in range(3)]
    gates = positive(2, 2, 12, seed=4) / 1.2

    def structure(mask: torch.Tensor, a: int, b: int) -> Structure:
        return Causal() & Decay(gates[..., a:b]) & Padding(mask)

    options = {"kernel": kernel, "form": form, "path": path, "return_state": True}
    real = torch.ones(2, 8, dtype=torch.bool)
    _, state = attention(*(x[:, :, :8] for x in tensors), structure=structure(real, 0, 8), **options)
    for width in (1, 4):
        none = torch.zeros(2, width, dtype=torch.bool)
        at = slice(8, 8 + width)
        _, after = attention(
            *(x[:, :, at] for x in tensors), structure=structure(none, 8, 8 + width), state=state, **options
        )
        if isinstance(state, FeatureState):
            for name, tensor in state.tensors().items():
                assert torch.equal(after.tensors()[name], tensor), name
        else:  # the masked keys may stand in the cache, as not real
            assert isinstance(state, CacheState)
            assert isinstance(after, CacheState)
            assert torch.equal(after.length, state.length)
            assert after.valid is not None
            assert after.log is not None
            assert state.log is not None
            kept = after.valid[0]
            assert torch.equal(after.keys[:, :, kept], state.keys)
            assert torch.equal(after.log[..., kept], state.log)
    # A right-padded prefill as a whole: what follows it is what follows the real tokens alone.
    mask = torch.arange(12) < torch.tensor([[8], [8]])
    _, padded = attention(*tensors, structure=structure(mask, 0, 12), **options)
    token = [normal(2, 2, 1, 4, seed=s) for s in (6, 7, 8)]
    one = structure(torch.ones(2, 1, dtype=torch.bool), 0, 1)
    expected, _ = attention(*token, structure=one, state=state, **options)
    assert_close(attention(*token, structure=one, state=padded, **options)[0], expected, 12)


@pytest.mark.parametrize("weighted", ["plain", "alibi", "decay"])
@pytest.mark.parametrize(("kernel", "form", "path"), STATEFUL, ids=str)
def test_case_10_packed_documents(kernel: Kernel, form: str, path: str, weighted: str):
    """vllm PR 23279, fla PR 1274: boundaries in a chunk, documents of 0 and 1 tokens, initial states of their own."""
    sizes = [5, 0, 1, 37, 3, 70]
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    tensors = [normal(1, 2, int(offsets[-1]), 4, seed=s) for s in range(3)]
    slopes, gates = torch.tensor([0.5, 0.25], dtype=torch.float64), positive(1, 2, int(offsets[-1]), seed=4) / 1.2

    def structure(a: int, b: int) -> Structure:
        if weighted == "alibi":
            return Causal() & Alibi(slopes)
        return Causal() & Decay(gates[..., a:b]) if weighted == "decay" else Causal()

    options = {"kernel": kernel, "form": form, "path": path, "return_state": True}
    # Each document has a past of its own length (under features: of its own content).
    pasts, starts = [], []
    for d in range(len(sizes)):
        past = [normal(1, 2, 2, 4, seed=20 + 3 * d + s) for s in range(3)]
        pasts.append(past)
        starts.append(attention(*past, structure=structure(0, 2), **options)[1])
    together = attention(
        *(torch.cat([p[i] for p in pasts], 2) for i in range(3)),
        structure=_packed(structure(0, 2), [2] * len(sizes), gates, weighted),
        **options,
    )[1]
    out, after = attention(
        *tensors, structure=structure(0, int(offsets[-1])) & Documents(offsets), state=together, **options
    )
    for d in range(len(sizes)):
        a, b = int(offsets[d]), int(offsets[d + 1])
        part = [x[:, :, a:b] for x in tensors]
        expected, state = attention(*part, structure=structure(a, b), state=starts[d], **options)
        assert_close(out[:, :, a:b], expected, max(b - a, 1), f"document {d}")
        assert after.length[d] == b - a + 2
        if isinstance(state, FeatureState):
            for name in ("features", "mass"):
                assert_close(
                    getattr(after, name)[d : d + 1], getattr(state, name), max(b - a, 1), f"document {d}: {name}"
                )
        else:
            assert isinstance(state, CacheState)
            assert isinstance(after, CacheState)
            assert after.valid is not None
            assert torch.equal(after.keys[d, :, after.valid[d]], state.keys[0])
            assert torch.equal(after.values[d, :, after.valid[d]], state.values[0])


def _packed(structure: Structure, sizes: list[int], gates: torch.Tensor, weighted: str) -> Structure:
    """The structure of equal pasts side by side: the gates of the first tokens, once a document."""
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    if weighted == "decay":
        return Causal() & Decay(gates[..., : sizes[0]].repeat(1, 1, len(sizes))) & Documents(offsets)
    return structure & Documents(offsets)


@pytest.mark.parametrize(("kernel", "form", "path"), STATEFUL, ids=str)
def test_case_10_offsets_are_read_anew(kernel: Kernel, form: str, path: str):
    """fla PR 1274: plans cached by the identity of the offsets tensor missed edits in place."""
    tensors = [normal(1, 1, 8, 2, seed=s) for s in range(3)]
    offsets = torch.tensor([0, 3, 8])
    structure = Causal() & Documents(offsets)
    options = {"kernel": kernel, "form": form, "path": path}
    before = attention(*tensors, structure=structure, **options)
    offsets[1] = 6
    after = attention(*tensors, structure=structure, **options)
    fresh = attention(*tensors, structure=Causal() & Documents(torch.tensor([0, 6, 8])), **options)
    assert torch.equal(after, fresh)
    assert not torch.allclose(after, before)


@pytest.mark.parametrize(("kernel", "form", "path"), STATEFUL, ids=str)
def test_case_11_going_back(kernel: Kernel, form: str, path: str):
    """transformers#49036: after rejected draft tokens the state was lost, since it had been written over."""
    tensors = [normal(2, 2, 11, 4, seed=s) for s in range(3)]
    originals = [x.clone() for x in tensors]
    options = {"kernel": kernel, "structure": Causal(), "form": form, "path": path, "return_state": True}
    _, start = attention(*(x[:, :, :6] for x in tensors), **options)
    kept = {n: t.clone() for n, t in start.tensors().items()}
    states = [start]
    for t in range(6, 11):  # five draft tokens, every state kept
        states.append(attention(*(x[:, :, t : t + 1] for x in tensors), state=states[-1], **options)[1])
    # Two were accepted: state 2 is what two steps from the start give, bit for bit.
    again = start
    for t in (6, 7):
        _, again = attention(*(x[:, :, t : t + 1] for x in tensors), state=again, **options)
    for name, tensor in states[2].tensors().items():
        assert torch.equal(again.tensors()[name], tensor), name
    # Two branches from one state touch neither each other nor what the caller holds.
    other = [-x[:, :, 6:11] for x in tensors]
    left = attention(*(x[:, :, 6:11] for x in tensors), state=start, **options)
    attention(*other, state=start, **options)
    once_more = attention(*(x[:, :, 6:11] for x in tensors), state=start, **options)
    assert torch.equal(left[0], once_more[0])
    assert all(torch.equal(t, kept[n]) for n, t in start.tensors().items())
    assert all(torch.equal(x, y) for x, y in zip(tensors, originals, strict=True))
