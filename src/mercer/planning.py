"""Choosing a form and a path for a call, as a value that can be read before anything runs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import bfloat16, compiler

from mercer.backends import decode, flex, polynomial, sdpa, sdpa_tiles, softmax, step
from mercer.core import cost
from mercer.core.kernels import Kernel
from mercer.core.machine import Machine, machine_in_use
from mercer.core.merged import Merged
from mercer.core.mixed import Mixed
from mercer.core.normalizers import Normalizer
from mercer.core.support import FEATURE_CHUNK, FORMS, PATHS, Sizes, sums_weights, unsupported
from mercer.core.work import FUSED_BLOCK, parts
from mercer.errors import InvalidArgument, Unsupported

DENSE_PAIRS = 4096
"""Up to this many weights a row block of one head is computed whole: tiles would cost more calls than they save
memory.
"""


BACKENDS = ("torch", "sdpa", "flex", "numba")

REMEMBERED = 1024
"""Decisions that are kept for calls to come."""


@dataclass(frozen=True)
class Plan:
    """How a call will be computed, and what it costs.

    Attributes:
        form: ``dense``, ``chunked`` or ``recurrent``.
        path: ``pairs`` (scores of query-key pairs; the state is a key/value cache) or ``features`` (a fixed-size
            feature state).
        backend: what runs it: ``torch`` (this library's forms), ``numba`` (its fused kernels on the CPU), ``sdpa``
            (torch's fused attention, where it computes the same) or ``flex`` (its flex attention, on a GPU).
        flops: floating-point operations of the products.
        bytes: bytes of queries, keys, values and outputs, each moved once.
        state_bytes: bytes of the state that the call leaves behind if asked to.
        seconds: how long it should take on the machine in use (:func:`mercer.use_machine`): the forward pass, and the
            backward pass too where a gradient is wanted.
        reason: why this form and path.
    """

    form: str
    path: str
    backend: str
    flops: int
    bytes: int
    state_bytes: int
    seconds: float
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.form} form by {self.path} ({self.backend}): {_engineering(self.flops)}FLOP, "
            f"{_engineering(self.bytes)}B moved, "
            f"state {_engineering(self.state_bytes)}B, about {duration(self.seconds)}. {self.reason}"
        )


def choose(
    kernel: Kernel,
    normalizer: Normalizer,
    merged: Merged,
    sizes: Sizes,
    form: str = "auto",
    path: str = "auto",
    stateful: bool = False,
    state_path: str | None = None,
    backend: str = "auto",
) -> Plan:
    """Resolve ``form`` and ``path``; raises :class:`Unsupported` with the reason if no cell of the support table
    fits.
    """
    for name, value, allowed in (("form", form, FORMS), ("path", path, PATHS), ("backend", backend, BACKENDS)):
        if value != "auto" and value not in allowed:
            raise InvalidArgument(f"{name} must be 'auto' or one of {', '.join(map(repr, allowed))}, not {value!r}.")
    if state_path is not None:
        if path not in ("auto", state_path):
            raise InvalidArgument(f"The state given belongs to path={state_path!r}, but path={path!r} was asked for.")
        path = state_path

    def refusal(form: str, path: str) -> str | None:
        return unsupported(kernel, normalizer, merged, form, path, sizes, stateful)

    forms = FORMS if form == "auto" else (form,)
    paths = PATHS if path == "auto" else (path,)
    refusals = {(f, p): refusal(f, p) for f in forms for p in paths}
    possible = [cell for cell, why in refusals.items() if why is None]
    if not possible:
        # The chunked form's reason first: what it cannot compute, the dense form's reason should not advise.
        raise Unsupported(
            refusals.get(("chunked", paths[0])) or next(why for why in refusals.values() if why is not None)
        )
    call = _Question(kernel, normalizer, merged, sizes, stateful)

    def way(path: str) -> _Way:
        """The form and backend that a path would run in."""
        found: list[_Way] = []
        refused: Unsupported | None = None
        forms = _forms(sizes, [f for f, p in possible if p == path], path, form)
        if path == "pairs" and form == backend == "auto" and _decodes(kernel, normalizer, merged, sizes):
            forms = {"chunked": "Few queries: keys and values are read once, as they stand."}
        for name, why_form in forms.items():
            try:
                used, seconds, why_backend = _backend(call, name, path, backend)
            except Unsupported as error:
                refused = error
                continue
            found.append(_Way(name, path, used, seconds, f"{why_form}{why_backend}"))
        if refused is not None and not found:
            raise refused
        return found[_least([one.seconds for one in found])]

    ways: list[_Way] = []
    missing: list[Unsupported] = []
    for name in (p for p in PATHS if any(p == other for _, other in possible)):
        try:
            ways.append(way(name))
        except Unsupported as why:  # the backend that was asked for may know the other path alone
            missing.append(why)
    if not ways:
        raise missing[-1]
    chosen, why_path = _path(ways, stateful, path)
    if chosen.path == "features":
        block = FUSED_BLOCK if chosen.backend == "numba" else FEATURE_CHUNK
        flops = cost.feature_flops(kernel, merged, sizes, chosen.form, block)
        state_bytes = cost.feature_state_bytes(
            kernel, merged, sizes, sizes.log_sums or sums_weights(kernel, normalizer)
        )
    else:
        flops = cost.pair_flops(kernel, merged, sizes)
        state_bytes = cost.cache_bytes(merged, sizes)
    if chosen.path == "features" and isinstance(kernel, Mixed):
        flops += cost.pair_flops(kernel.near, replace(merged, left=kernel.window - 1), sizes)
        state_bytes += cost.cache_bytes(replace(merged, left=kernel.window), sizes)
    return Plan(
        chosen.form,
        chosen.path,
        chosen.backend,
        flops,
        cost.io_bytes(sizes),
        state_bytes,
        chosen.seconds,
        f"{why_path} {chosen.reason}",
    )


class Choice(NamedTuple):
    """What runs a call: three of the attributes of :class:`Plan`."""

    form: str
    path: str
    backend: str


def decide(
    kernel: Kernel,
    normalizer: Normalizer,
    merged: Merged,
    sizes: Sizes,
    form: str = "auto",
    path: str = "auto",
    stateful: bool = False,
    state_path: str | None = None,
    backend: str = "auto",
) -> Choice:
    """Form, path and backend of what :func:`choose` plans, and its errors, without what nobody reads before a call.

    Every layer of a model asks at every token that it generates. A long cache leaves nothing to weigh up; what
    elsewhere is decided by values alone is remembered with them.
    """
    if compiler.is_compiling():  # which records the decision itself
        plan = choose(kernel, normalizer, merged, sizes, form, path, stateful, state_path, backend)
        return Choice(plan.form, plan.path, plan.backend)
    if form == backend == "auto" and state_path == "pairs" and path in ("auto", "pairs"):
        served = _decodes(kernel, normalizer, merged, sizes)
        if served and unsupported(kernel, normalizer, merged, "chunked", "pairs", sizes, stateful) is None:
            return _DECODING
    parts = _values(kernel, normalizer, merged)
    key = None if parts is None else (parts, sizes, form, path, stateful, state_path, backend)
    machine = _machine(normalizer, merged, sizes)
    found = None if key is None else _DECIDED.get(key)
    if found is not None and found[0] is machine:
        return found[1]
    plan = choose(kernel, normalizer, merged, sizes, form, path, stateful, state_path, backend)
    choice = Choice(plan.form, plan.path, plan.backend)
    if key is not None:
        if len(_DECIDED) >= REMEMBERED:
            _DECIDED.clear()
        _DECIDED[key] = machine, choice
    return choice


_DECODING = Choice("chunked", "pairs", "numba")
_DECIDED: dict[Hashable, tuple[Machine, Choice]] = {}
"""What was decided, by all that it was decided from; and for which machine."""


def _values(kernel: Kernel, normalizer: Normalizer, merged: Merged) -> Hashable | None:
    """What a choice is made from, beside sizes and what was asked for, as values; None where that cannot be said:
    a part with tensors may change in place, and one of somebody else's may say now this and now that.
    """
    kind = type(kernel)
    made_of_values = "__dataclass_params__" in vars(kind) and kind.__hash__ is not object.__hash__
    if not made_of_values or kernel.tensors() or merged.patterns or merged.pairwise:
        return None
    if not (merged.padding is merged.documents is merged.decay is merged.relative is None):
        return None
    if merged.alibi is not None and merged.alibi.slopes.requires_grad:
        return None
    flags = (
        normalizer.needs_denominator, normalizer.needs_count, normalizer.scale_invariant, normalizer.takes_any_sign,
        normalizer.takes_divided_rows,
    )  # fmt: skip
    return kernel, type(normalizer), flags, merged.left, merged.right, merged.alibi is not None


def _machine(normalizer: Normalizer, merged: Merged, sizes: Sizes) -> Machine:
    """The machine in use; without one, the default numbers of what multiplies bfloat16 in tiles on this processor."""
    if not sizes.bfloat16:
        return machine_in_use()
    theirs = sdpa_tiles.serves(normalizer, merged, sizes.device, bfloat16)
    ours = sizes.device == "cpu" and not merged.patterns and not compiler.is_compiling() and softmax.tiled()
    return machine_in_use((theirs, ours))


@dataclass(frozen=True)
class _Question:
    kernel: Kernel
    normalizer: Normalizer
    merged: Merged
    sizes: Sizes
    stateful: bool

    def seconds(self, form: str, path: str, backend: str) -> float:
        """What the machine in use takes for this way of computing."""
        mass = self.sizes.log_sums or sums_weights(self.kernel, self.normalizer)
        found = parts(self.kernel, self.merged, self.sizes, form, path, backend, mass, self.stateful)
        return _machine(self.normalizer, self.merged, self.sizes).seconds(found, self.sizes)


@dataclass(frozen=True)
class _Way:
    form: str
    path: str
    backend: str
    seconds: float
    reason: str


def _path(ways: list[_Way], stateful: bool, asked: str) -> tuple[_Way, str]:
    if asked != "auto":
        return ways[0], f"Path {asked}, as asked or as the state requires."
    if len(ways) == 1:
        return ways[0], f"Only {ways[0].path} can compute this combination."
    pairs, features = sorted(ways, key=lambda way: way.path, reverse=True)
    if stateful:
        return features, "A state was asked for, and this kernel's has a fixed size."
    chosen = features if features.seconds < pairs.seconds else pairs
    return chosen, f"Features take about {duration(features.seconds)}, pairs {duration(pairs.seconds)}."


def _forms(sizes: Sizes, possible: list[str], path: str, asked: str) -> dict[str, str]:
    """The forms that come into question, and why each of them would."""
    if asked != "auto":
        return {asked: f"Form {asked}, as asked."}
    if path == "features":
        if sizes.query_length <= 1 and sizes.key_length <= 1 and "recurrent" in possible:
            return {"recurrent": "One token: a step of the state."}
        return {"chunked": "Chunks carry the state: memory linear in the length."}
    few = "dense" in possible and sizes.query_length * (sizes.key_length + sizes.past_length) <= DENSE_PAIRS
    dense = {"dense": "So few pairs that the whole matrix is cheapest."} if few else {}
    if few and sizes.trained:  # the one form that has second derivatives
        return dense
    return dense | {"chunked": "Tiles: memory linear in the length."}


def _decodes(kernel: Kernel, normalizer: Normalizer, merged: Merged, sizes: Sizes) -> bool:
    """Whether a call reads enough of a cache with few enough queries for the kernel that does only that."""
    return decode.worth_while(sizes) and decode.serves(kernel, normalizer, merged, sizes)


def _least(seconds: list[float]) -> int:
    """Where the least of these stands, the first of equal ones: by comparisons alone, since torch.compile sorts and
    orders no numbers that follow from lengths which it has seen change.
    """
    least = 0
    for i, one in enumerate(seconds):
        if one < seconds[least]:
            least = i
    return least


def _backend(call: _Question, form: str, path: str, asked: str) -> tuple[str, float, str]:
    """A backend, its seconds, and why."""
    kernel, normalizer, merged, sizes = call.kernel, call.normalizer, call.merged, call.sizes
    tiled = form == "chunked" and path == "pairs" and not isinstance(kernel, Mixed)
    scanned = form == "chunked" and path == "features" and polynomial.serves(kernel, merged, sizes)
    stepped = form == "recurrent" and path == "features" and step.serves(kernel, merged, sizes)
    decodes = tiled and decode.serves(kernel, normalizer, merged, sizes)
    if decodes and asked == "auto" and decode.worth_while(sizes):  # nothing else reads a cache fewer times
        return "numba", call.seconds(form, path, "numba"), " The fused decode kernel serves these sizes."
    fused = tiled and softmax.serves(kernel, normalizer, merged, sizes)
    able = {
        "numba": scanned or stepped or decodes or fused,
        "sdpa": tiled and sdpa.serves(kernel, normalizer, merged, sizes),
        "flex": tiled
        and (asked == "flex" or sizes.device == "cuda")
        and flex.serves(kernel, normalizer, merged, sizes),
        "torch": True,
    }
    if asked != "auto":
        if not able[asked]:
            raise Unsupported(
                f"The {asked} backend does not compute {kernel} with {normalizer} in the {form} form by {path} for "
                "this "
                "structure, these sizes and this device: use "
                f"backend={' or '.join(repr(b) for b, ok in able.items() if ok)}."
            )
        return asked, call.seconds(form, path, asked), f" Backend {asked}, as asked."
    able["sdpa"] = able["sdpa"] and sdpa.worth_while(merged)
    # Nobody waits for a compiler because of a small call, whatever it would save.
    if scanned:
        able["numba"] = cost.feature_flops(kernel, merged, sizes, form) >= polynomial.LEAST_FLOPS
    elif stepped:
        able["numba"] = step.entries(kernel, merged, sizes) >= step.LEAST_ENTRIES
    elif decodes:
        able["numba"] = False
    elif fused:
        able["numba"] = softmax.worth_while(sizes, merged)
    able["flex"] = able["flex"] and not able["sdpa"]  # where both serve, torch's own masks are the faster
    seconds = {name: call.seconds(form, path, name) for name, ok in able.items() if ok}
    chosen = [*seconds][_least([*seconds.values()])]
    kind = "scan" if scanned else "step" if stepped else "attention"
    if fused and sizes.bfloat16:
        narrow = "bfloat16, in tiles" if softmax.tiled() and not merged.patterns else "bfloat16"
        kind += f" (products in {narrow if softmax.narrow(bfloat16) else 'float32: no AVX512-BF16 here'})"
    tiles = fused and merged.patterns and not decodes
    in_tiles = sizes.bfloat16 and sdpa_tiles.serves(normalizer, merged, sizes.device, bfloat16)
    why = {
        "numba": f" The fused {kind} {'takes the tiles of this pattern' if tiles else 'serves these sizes'}.",
        "sdpa": f" torch's fused attention computes the same{', in tiles of bfloat16' if in_tiles else ''}.",
        "flex": " torch's flex attention knows these masks.",
        "torch": "",
    }
    return chosen, seconds[chosen], why[chosen]


def duration(seconds: float) -> str:
    """Two or three digits with a unit: 43 us, 1.2 ms, 15 s. What torch.compile traces may be a symbol without digits,
    and then nobody reads them.
    """
    if compiler.is_compiling():
        return "some time"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _engineering(value: int) -> str:
    scaled = float(value)
    for prefix in ("", "k", "M", "G", "T"):
        if scaled < 1000:
            return f"{scaled:.3g} {prefix}"
        scaled /= 1000
    return f"{scaled:.3g} P"
