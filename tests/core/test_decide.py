"""What a call decides by what is remembered is what its plan says, whatever was decided before."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tolerance import assert_close

from mercer.core.kernels import Elu, Exp, Kernel, Taylor
from mercer.core.log_weights import Alibi, Decay
from mercer.core.machine import Machine, machine_in_use, use_machine
from mercer.core.merged import merge
from mercer.core.mixed import Mixed
from mercer.core.normalizers import L2, Identity, Normalizer, Sum
from mercer.core.random_features import PositiveRandomFeatures
from mercer.core.reference import reference_attention
from mercer.core.structures import Causal, Documents, Full, Padding, Structure, Window
from mercer.core.support import Sizes
from mercer.errors import InvalidArgument, Unsupported
from mercer.ops import attention, plan
from mercer.planning import choose, decide

KERNELS = (Exp(), Elu(), Taylor(2), Taylor(3), PositiveRandomFeatures(16), Mixed(Exp(), Elu(), 4))
STRUCTURES = (
    Full(), Causal(), Window(3, 0), Window(3, 2), Causal() & Alibi(torch.ones(4)),
    Causal() & Decay(torch.ones(4)), Causal() & Padding(torch.ones(1, 1, dtype=torch.bool)),
    Causal() & Alibi(torch.ones(4, requires_grad=True)),
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    kernel=st.sampled_from(KERNELS),
    normalizer=st.sampled_from((Sum(), L2(), Identity())),
    structure=st.sampled_from(STRUCTURES),
    lengths=st.tuples(st.sampled_from((1, 2, 90)), st.sampled_from((1, 90)), st.sampled_from((0, 40, 3000))),
    options=st.tuples(*[st.booleans()] * 4),
    form=st.sampled_from(("auto", "chunked", "dense")),
    path=st.sampled_from(("auto", "pairs", "features")),
    backend=st.sampled_from(("auto", "torch", "numba")),
    state_path=st.sampled_from((None, "pairs", "features")),
)
def test_it_is_what_the_plan_says(
    kernel: Kernel, normalizer: Normalizer, structure: Structure, lengths: tuple[int, int, int],
    options: tuple[bool, bool, bool, bool], form: str, path: str, backend: str, state_path: str | None,
):  # fmt: skip
    queries, keys, past = lengths
    trained, half, recorded, stateful = options
    sizes = Sizes(
        1, 4, 4, queries, keys, 32, 32, past if state_path == "pairs" else 0, 4, 2 if half else 4, trained=trained,
        bfloat16=half,
    )  # fmt: skip
    asked = (kernel, normalizer, merge(structure), sizes, form, path, stateful or state_path is not None, state_path)
    found = []
    with torch.set_grad_enabled(recorded):
        for ask in (choose, decide, decide):
            try:
                way = ask(*asked, backend)
                found.append((way.form, way.path, way.backend))
            except (InvalidArgument, Unsupported) as why:
                found.append((type(why), str(why)))
    assert found[0] == found[1] == found[2]


def test_sizes_decide():
    """Few tokens by pairs, many by features, and few by pairs again."""
    merged, found = merge(Causal()), []
    for length in (4, 9000, 4):
        sizes = Sizes(1, 2, 2, length, length, 16, 16)
        found.append(decide(Taylor(2), Sum(), merged, sizes).path)
        assert found[-1] == choose(Taylor(2), Sum(), merged, sizes).path
    assert found == ["pairs", "features", "pairs"]


def test_another_machine_is_asked_anew():
    """Features cost next to nothing on one machine, pairs on the other."""
    sizes = Sizes(1, 2, 2, 4000, 4000, 16, 16, itemsize=8)
    asked = (Taylor(2), Sum(), merge(Causal()), sizes)
    now = machine_in_use()
    quick = {"scan", "fused_scan"}

    def machine(share: float) -> Machine:
        costs = {
            dtype: {
                w: type(c)(c.call, c.item, c.rate * (share if w in quick else 1 / share), 1.0) for w, c in all_.items()
            }
            for dtype, all_ in now.costs.items()
        }
        return Machine("made up", now.device, now.threads, now.bandwidth * 1e6, 0.0, costs)

    found = []
    for share in (1e-9, 1e9, 1e-9):
        with use_machine(machine(share)):
            found.append(decide(*asked).path)
            assert found[-1] == choose(*asked).path
    assert found == ["pairs", "features", "pairs"]


def test_tensors_of_a_structure_are_read_anew(generator: torch.Generator):
    """Edited in place between two calls: offsets, a mask, slopes, rates."""
    q, k, v = torch.randn(3, 1, 4, 12, 8, generator=generator)
    offsets, mask = torch.tensor([0, 5, 12]), torch.ones(1, 12, dtype=torch.bool)
    slopes, rates = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.full((4,), 0.9)
    edits = (
        (Documents(offsets), offsets, torch.tensor([0, 9, 12])),
        (Padding(mask), mask, torch.arange(12).unsqueeze(0) > 3),
        (Alibi(slopes), slopes, torch.tensor([0.9, 0.0, 0.5, 0.1])),
        (Decay(rates), rates, torch.tensor([0.5, 0.6, 0.7, 1.0])),
    )
    for part, tensor, new in edits:
        structure = Causal() & part
        before = attention(q, k, v, structure=structure)
        tensor.copy_(new)
        after = attention(q, k, v, structure=structure)
        assert not torch.allclose(before, after), str(part)
        wanted = reference_attention(q.double(), k.double(), v.double(), Exp(), Sum(), structure)
        assert_close(after, wanted, 20, str(part))


def test_the_plan_of_a_step_is_kept(generator: torch.Generator):
    """A step of each kind of state goes the way that its plan said, and the next one too, as the cache grows."""
    q, k, v = torch.randn(3, 1, 2, 1, 16, generator=generator)
    long = torch.randn(1, 2, 2100, 16, generator=generator)
    for kernel, length in ((Exp(), 20), (Exp(), 2100), (Elu(), 50)):
        x = long[:, :, :length]
        options = {"kernel": kernel, "structure": Causal(), "return_state": True}
        with torch.no_grad():
            _, state = attention(x, x, x, **options)
            for _ in range(3):
                planned = plan(q, k, v, state=state, **options)
                merged = merge(Causal())
                cache = 0 if planned.path == "features" else state.keys.shape[2]
                sizes = Sizes(1, 2, 2, 1, 1, 16, 16, cache)
                assert decide(kernel, Sum(), merged, sizes, "auto", "auto", True, planned.path) == (
                    planned.form, planned.path, planned.backend,
                )  # fmt: skip
                _, state = attention(q, k, v, state=state, **options)


def test_what_is_no_value_is_not_remembered():
    """A kernel of one's own whose property changes is asked each time."""

    class Moody(Exp):
        sign = True

        @property
        def positive(self) -> bool:
            return Moody.sign

    sizes = Sizes(1, 1, 1, 4, 4, 8, 8)
    assert decide(Moody(), Sum(), merge(Full()), sizes).path == "pairs"
    Moody.sign = False
    with pytest.raises(Unsupported, match="negative"):
        decide(Moody(), Sum(), merge(Full()), sizes)
