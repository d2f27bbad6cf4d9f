"""Choosing a form and a path for a call, as a value that can be read before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from mercer.backends import causal, polynomial, sdpa
from mercer.core import cost
from mercer.core.kernels import Kernel
from mercer.core.mixed import Mixed
from mercer.core.normalizers import Normalizer
from mercer.core.structures import Merged
from mercer.core.support import FORMS, PATHS, Sizes, unsupported
from mercer.errors import InvalidArgument, Unsupported

DENSE_PAIRS = 4096
"""Up to this many weights a row block of one head is computed whole: tiles would cost more calls than they save
memory.
"""


BACKENDS = ("torch", "sdpa", "numba")
EXPANSION = 2.0
"""How much longer an operation of the feature path takes where features must be expanded (measured, see
docs/lab.md).
"""


@dataclass(frozen=True)
class Plan:
    """How a call will be computed, and what it costs.

    Attributes:
        form: ``dense``, ``chunked`` or ``recurrent``.
        path: ``pairs`` (scores of query-key pairs; the state is a key/value cache) or ``features`` (a fixed-size
            feature state).
        backend: what runs it: ``torch`` (this library's forms) or ``sdpa`` (torch's fused attention, where it
            computes the same).
        flops: floating-point operations of the products.
        bytes: bytes of queries, keys, values and outputs, each moved once.
        state_bytes: bytes of the state that the call leaves behind if asked to.
        reason: why this form and path.
    """

    form: str
    path: str
    backend: str
    flops: int
    bytes: int
    state_bytes: int
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.form} form by {self.path} ({self.backend}): {_engineering(self.flops)}FLOP, "
            f"{_engineering(self.bytes)}B moved, "
            f"state {_engineering(self.state_bytes)}B. {self.reason}"
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
    chosen_path, why_path = _path(kernel, merged, sizes, {p for _, p in possible}, stateful, path)
    possible_forms = [f for f, p in possible if p == chosen_path]
    chosen_form, why_form = _form(sizes, possible_forms, chosen_path, form)
    if chosen_path == "features":
        flops = cost.feature_flops(kernel, merged, sizes, chosen_form)
        state_bytes = cost.feature_state_bytes(kernel, merged, sizes, normalizer.needs_denominator)
    else:
        flops = cost.pair_flops(kernel, merged, sizes)
        state_bytes = cost.cache_bytes(merged, sizes)
    chosen_backend, why_backend = _backend(kernel, normalizer, merged, sizes, chosen_form, chosen_path, backend)
    reason = f"{why_path} {why_form}{why_backend}"
    return Plan(chosen_form, chosen_path, chosen_backend, flops, cost.io_bytes(sizes), state_bytes, reason)


def _path(
    kernel: Kernel, merged: Merged, sizes: Sizes, possible: set[str], stateful: bool, asked: str
) -> tuple[str, str]:
    if asked != "auto":
        return asked, f"Path {asked}, as asked or as the state requires."
    if len(possible) == 1:
        (only,) = possible
        return only, f"Only {only} can compute this combination."
    pairs, features = cost.pair_flops(kernel, merged, sizes), cost.feature_flops(kernel, merged, sizes, "chunked")
    if stateful:
        return "features", "A state was asked for, and this kernel's has a fixed size."
    ratio = features / max(pairs, 1)
    expanded = kernel.feature_dim(sizes.dim) != kernel.mapped_dim(sizes.dim)
    counted = f" (counted {EXPANSION:g} times, since features must be expanded)" if expanded else ""
    chosen = "features" if ratio * (EXPANSION if expanded else 1) < 1 else "pairs"
    return chosen, f"Features take {ratio:.2g} times the operations of pairs{counted}."


def _form(sizes: Sizes, possible: list[str], path: str, asked: str) -> tuple[str, str]:
    if asked != "auto":
        return asked, f"Form {asked}, as asked."
    if path == "features":
        if sizes.query_length <= 1 and sizes.key_length <= 1 and "recurrent" in possible:
            return "recurrent", "One token: a step of the state."
        return "chunked", "Chunks carry the state: memory linear in the length."
    if "dense" in possible and sizes.query_length * (sizes.key_length + sizes.past_length) <= DENSE_PAIRS:
        return "dense", "So few pairs that the whole matrix is cheapest."
    return "chunked", "Tiles: memory linear in the length."


def _backend(
    kernel: Kernel, normalizer: Normalizer, merged: Merged, sizes: Sizes, form: str, path: str, asked: str
) -> tuple[str, str]:
    tiled = form == "chunked" and path == "pairs" and not isinstance(kernel, Mixed)
    scanned = form == "chunked" and path == "features" and polynomial.serves(kernel, merged, sizes)
    able = {
        "numba": scanned or (tiled and causal.serves(kernel, normalizer, merged, sizes)),
        "sdpa": tiled and sdpa.serves(kernel, normalizer, merged, sizes),
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
        return asked, f" Backend {asked}, as asked."
    if scanned and cost.feature_flops(kernel, merged, sizes, form) >= polynomial.LEAST_FLOPS:
        return "numba", " The fused scan serves these sizes."
    if not scanned and able["numba"] and causal.worth_while(sizes):
        return "numba", " The fused causal kernels serve these sizes."
    return ("sdpa", " torch's fused attention computes the same.") if able["sdpa"] else ("torch", "")


def _engineering(value: int) -> str:
    scaled = float(value)
    for prefix in ("", "k", "M", "G", "T"):
        if scaled < 1000:
            return f"{scaled:.3g} {prefix}"
        scaled /= 1000
    return f"{scaled:.3g} P"
