"""What a mask function of transformers means: its parts by name, or nothing if it is not one that is known.

transformers describes who sees whom by functions of indices, put together from closures of its `masking_utils`. A
closure is recognised by its code object, which is compared with that of a sample made by the same factory; what is
captured is read by the name of the captured variable. A function of any other origin is not recognised, and is then
evaluated for every pair.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import masking_utils as hf

if not {"q_length", "q_offset"} <= set(inspect.signature(hf.sdpa_mask).parameters):
    raise ImportError(
        "mercer.integrations.transformers is written for transformers 5.24, whose mask functions are asked by q_length "
        f"and q_offset; {transformers.__version__} is installed."
    )


@dataclass(frozen=True)
class Visibility:
    """Who sees whom, by index: keys at distances `-right .. left` back, and of the same packed sequence."""

    left: int | None = None
    right: int | None = None
    sequences: Tensor | None = None
    """[B, L]: the number of the packed sequence that each token belongs to."""
    remapped: bool = False
    """Distances are those of position ids, which are distances of indices within one packed sequence only."""

    def meet(self, other: "Visibility") -> "Visibility | None":
        """Both at once; None if that is not one of these."""
        if self.sequences is not None and other.sequences is not None:
            return None
        return Visibility(
            _least(self.left, other.left),
            _least(self.right, other.right),
            self.sequences if other.sequences is None else other.sequences,
            self.remapped or other.remapped,
        )


def recognise(function: Callable[..., Any]) -> Visibility | None:
    """What `function(batch, head, query, key)` lets a query see, or None if it is of no known making."""
    found = _read(function)
    return None if found is not None and found.remapped and found.sequences is None else found


def _read(function: Callable[..., Any]) -> Visibility | None:
    if function is hf.causal_mask_function:
        return Visibility(right=0)
    if function is hf.bidirectional_mask_function:
        return Visibility()
    code = getattr(function, "__code__", None)
    reader = _READERS.get(code) if code is not None else None
    if reader is None:
        return None
    captured = dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    try:
        return reader(captured)
    except KeyError:  # the same factory with other names inside: not the one that was read when this was written
        return None


def _both(captured: dict[str, Any]) -> Visibility | None:
    total: Visibility | None = Visibility()
    for part in captured["mask_functions"]:
        found = _read(part)
        total = None if total is None or found is None else total.meet(found)
    return total


def _remapped(captured: dict[str, Any]) -> Visibility | None:
    found = _read(captured["mask_function"])
    return None if found is None else replace(found, remapped=True)


def _window(captured: dict[str, Any]) -> Visibility:
    return Visibility(left=int(captured["sliding_window"]) - 1)


def _two_sided(captured: dict[str, Any]) -> Visibility:
    width = int(captured["sliding_window"])
    return Visibility(left=width, right=width)


def _packed(captured: dict[str, Any]) -> Visibility:
    return Visibility(sequences=captured["packed_sequence_mask"])


def _code(made: Callable[..., Any]) -> CodeType:
    return made.__code__


_SAMPLE = torch.zeros(1, 1, dtype=torch.int64)
_READERS: dict[CodeType, Callable[[dict[str, Any]], Visibility | None]] = {
    _code(hf.and_masks(hf.causal_mask_function)): _both,
    _code(hf.sliding_window_overlay(1)): _window,
    _code(hf.sliding_window_bidirectional_overlay(1)): _two_sided,
    _code(hf.packed_sequence_mask_function(_SAMPLE)): _packed,
    _code(hf.remap_positions_for_packed_sequence(hf.causal_mask_function, _SAMPLE)): _remapped,
}


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)
