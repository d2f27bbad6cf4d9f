"""The mask that the attention functions of mercer are given: what it means, and all of it only if somebody looks.

transformers asks the mask function of an attention implementation once per forward pass and hands the result to every
layer. Ours returns a boolean tensor `[B, 1, Lq, Lk]` that takes no memory: it knows how it was asked for, which mercer
reads as a structure, and makes its entries when any other operator touches it, such as a model that cuts its mask.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from mercer.core.structures import Documents, Full, Padding, Structure, Window
from mercer.integrations.hf.recognise import Visibility, recognise


@dataclass(frozen=True)
class Sight:
    """What queries may see, as a structure over the first `keys` of the keys."""

    structure: Structure
    keys: int


@dataclass(eq=False)
class Question:
    """What a mask function of transformers was asked for."""

    batch: int
    queries: int
    keys: int
    query_offset: int | Tensor
    key_offset: int
    function: Callable[..., Any]
    padding: Tensor | None  # [B, n] bool, over all positions so far
    device: torch.device
    others: dict[str, Any] = field(default_factory=dict)

    def dense(self) -> Tensor:
        """All of it: boolean `[B, 1, Lq, Lk]`, True where a query sees a key."""
        mask = sdpa_mask(
            batch_size=self.batch,
            q_length=self.queries,
            kv_length=self.keys,
            q_offset=self.query_offset,
            kv_offset=self.key_offset,
            mask_function=self.function,
            attention_mask=self.padding,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            device=self.device,
            **self.others,
        )
        assert mask is not None
        return mask

    @cached_property
    def sight(self) -> Sight | None:
        """The structure, found once for all layers; None if it takes the entries to say it."""
        seen = recognise(self.function)
        return None if seen is None else self._sight(seen)

    def _sight(self, seen: Visibility) -> Sight | None:
        last = int(self.query_offset) + self.queries  # one past the last query, counted from the first token of all
        end = self.key_offset + self.keys
        if seen.right == 0 and end > last:
            end = last  # a static cache: what lies behind the last query is not filled yet
        keys = end - self.key_offset
        ordered = seen.left is not None or seen.right is not None
        if (ordered and end != last) or keys < 1:
            return None
        structure = Window(seen.left, seen.right) if ordered else Full()
        if seen.sequences is not None:
            offsets = _offsets(seen.sequences)
            if offsets is None or self.padding is not None or not self.queries == keys == seen.sequences.shape[1]:
                return None
            return Sight(structure & Documents(offsets), keys)
        real = self.real(keys)
        if real is None:
            return Sight(structure, keys)
        if seen.left is not None and _has_holes(real):
            return None  # here windows count padding inside a sequence as distance, and mercer's do not
        return Sight(structure & Padding(real), keys)

    def continued(self) -> Structure | None:
        """The structure of the queries' own tokens behind a state of all that came before; None if there is none."""
        seen = recognise(self.function)
        if seen is None or seen.right != 0 or seen.sequences is not None or self.key_offset:
            return None
        structure = Window(seen.left, 0)
        real = self.real(self.keys)
        if real is None:
            return structure
        if seen.left is not None and _has_holes(real):
            return None
        new = real[:, self.keys - self.queries :]
        return structure if bool(new.all()) else structure & Padding(new)

    def real(self, keys: int) -> Tensor | None:
        """Which of the keys are tokens, `[B, keys]`; None if all are."""
        if self.padding is None:
            return None
        real = self.padding[:, self.key_offset : self.key_offset + keys]
        real = torch.nn.functional.pad(real, (0, keys - real.shape[1]))
        return None if bool(real.all()) else real


class Mask(Tensor):
    """A boolean `[B, 1, Lq, Lk]` whose entries are made when an operator asks for them."""

    question: Question
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type["Mask"], question: Question) -> "Mask":
        shape = (question.batch, 1, question.queries, question.keys)
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=question.device)
        made.question = question
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]

        def filled(x: Any) -> Any:
            return x.question.dense() if isinstance(x, cls) else x

        return func(*torch.utils._pytree.tree_map(filled, args), **torch.utils._pytree.tree_map(filled, kwargs or {}))

    def __repr__(self) -> str:
        return f"Mask({list(self.shape)})"


@torch.compiler.disable  # which gives a tensor that the compiler does not know; a graph ends here
def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Mask:
    """What transformers calls for the mask of an attention implementation of ours.

    What else it passes says how other implementations keep their masks (dtypes, and when to leave them out).
    """
    question = Question(
        batch_size,
        q_length,
        kv_length,
        q_offset.clone() if isinstance(q_offset, Tensor) else q_offset,  # which a static cache counts up in place
        kv_offset,
        mask_function,
        attention_mask,
        torch.device(device),
        {"use_vmap": use_vmap},
    )
    return Mask(question)


def _offsets(sequences: Tensor) -> Tensor | None:
    """Where packed sequences begin and end, `[N + 1]`, if that is the same in every row."""
    if bool((sequences != sequences[:1]).any()):
        return None
    changes = (sequences[0, 1:] != sequences[0, :-1]).nonzero().squeeze(-1) + 1
    return torch.nn.functional.pad(torch.nn.functional.pad(changes, (1, 0)), (0, 1), value=sequences.shape[1])


def _has_holes(real: Tensor) -> bool:
    """Whether padding stands between tokens of a row."""
    starts = (real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0]
    return bool((starts > 1).any())
