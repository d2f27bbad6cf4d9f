"""The attention function that transformers calls in place of its own."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mercer.core.kernels import Exp, Kernel
from mercer.core.merged import merge
from mercer.core.normalizers import Normalizer, Sum
from mercer.core.pairwise import Bias
from mercer.core.structures import Causal, Full, Structure, Window
from mercer.errors import InvalidArgument, Unsupported
from mercer.integrations.given import structure_of
from mercer.integrations.hf.extras import with_extras
from mercer.integrations.hf.kernels import bound, missing
from mercer.integrations.hf.masks import Mask
from mercer.integrations.hf.states import StateLayer, layer_of
from mercer.ops import attention

PREFIX = "mercer:"

IGNORED = frozenset(
    {
        "cache_position",
        "deterministic",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Arguments that say nothing of the attention itself: what they mean for it is in the mask."""

_PACKED = "give position_ids that start from 0 in each packed sequence instead, no attention_mask, and use_cache=False"
REFUSED = {
    "sinks": "sinks that differ from token to token are not computed: use attn_implementation='eager'",
    "head_mask": "heads cannot be masked here: set the columns of the output projection that read them to 0 instead",
    "indices": "a selection of keys for each query is no structure of mercer: use 'eager'",
    "block_indices": "a selection of key blocks for each query is no structure of mercer: use 'eager'",
    "cu_seq_lens_q": _PACKED,
    "cu_seq_lens_k": _PACKED,
    "seq_idx": _PACKED,
    "output_attentions": "weights are not kept while attention is computed: use attn_implementation='eager'",
}
"""Arguments that change the attention in ways that are not computed here, and what to do."""


@dataclass(frozen=True)
class Parts:
    """A kernel, a normaliser, and a structure beside the one that the model asks for."""

    kernel: Kernel
    normalizer: Normalizer
    structure: Structure | None = None


SOFTMAX = Parts(Exp(), Sum())


@dataclass(frozen=True)
class AttentionFunction:
    """`(module, query, key, value, mask, ...) -> (output [B, Lq, Hq, Dv], None)`, registered with transformers.

    The model's own mask says who sees whom, its scaling is the scale, and its key and value heads may be fewer.
    """

    name: str
    parts: Parts
    layers: frozenset[int] | None = None
    """Numbers of the layers that have these parts; the others have softmax. None: all of them."""
    leave_out_dropout: bool = False

    @cached_property
    def unmade(self) -> bool:
        """Whether the kernel cannot run without tensors that each module must have."""
        kernel = self.parts.kernel
        return any(kernel.bind(4, 1, 1).is_parameter(name) for name in missing(kernel))

    @torch.compiler.disable  # what is chosen here depends on the mask's entries; the rest of a model is compiled
    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        self._refuse(dropout, others)
        parts = self._parts(module)
        kernel, normalizer = with_extras(parts.kernel, parts.normalizer, softcap, s_aux)
        state = layer_of(key)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (x if x.shape[0] == batch else x.expand(batch, -1, -1, -1) for x in (query, key, value))
        query, key, value = _alike(query, key, value)
        structure, keys = _structure(attention_mask, query, key, bool(causal), sliding_window, state)
        if parts.structure is not None and causal and query.shape[2] != keys:
            _refuse_ending(parts.structure)
        if position_bias is not None:
            structure = structure & Bias(position_bias[..., :keys])
        given = {
            "kernel": kernel,
            "normalizer": normalizer,
            "structure": structure if parts.structure is None else structure & parts.structure,
            "scale": None if scaling is None else float(scaling),
        }
        if state is None:
            out = attention(query, key[:, :, :keys], value[:, :, :keys], **given)
        else:
            out, after = attention(query, key, value, state=state.state, return_state=True, **given)
            state.commit(after)
        return out.transpose(1, 2).contiguous(), None

    def _parts(self, module: nn.Module) -> Parts:
        """The parts for a module, its own tensors among them."""
        if self.layers is not None:
            number = getattr(module, "layer_idx", None)
            if number is None:
                raise Unsupported(
                    f"{type(module).__name__} has no layer_idx, so layers= cannot tell it from the others."
                )
            if number not in self.layers:
                return SOFTMAX
        kernel = bound(module, self.parts.kernel)
        if kernel is None and self.unmade:
            raise InvalidArgument(
                f"{self.parts.kernel} is learned, and this model has no tensors for it: call "
                f"swap_attention(model, {self.name.removeprefix(PREFIX)!r}), which makes them."
            )
        return self.parts if kernel is None else replace(self.parts, kernel=kernel)

    def _refuse(self, dropout: float, others: dict[str, Any]) -> None:
        if dropout and not self.leave_out_dropout:
            raise Unsupported(
                f"{self.name} has no dropout of attention weights, and the model asks for {dropout:g}: load it with "
                "that rate at 0 in its configuration (attention_dropout, attn_pdrop or attention_probs_dropout_prob; "
                "dropout elsewhere stays), or say leave_out_dropout=True to swap_attention."
            )
        for word, given in others.items():
            if given is None or given is False or word in IGNORED:
                continue
            if word in REFUSED:
                raise Unsupported(f"{self.name} was given {word}: {REFUSED[word]}.")
            raise Unsupported(
                f"{self.name} was given {word}, and what it means for the attention is not known here; leave it out or "
                "use attn_implementation='eager'."
            )


def _alike(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All in one dtype: inside autocast, models turn queries and keys in float32 and leave values as they came."""
    device = query.device.type
    if query.dtype == key.dtype == value.dtype or not torch.is_autocast_enabled(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _structure(
    mask: Tensor | None, query: Tensor, key: Tensor, causal: bool, window: int | None, state: StateLayer | None
) -> tuple[Structure, int]:
    """The structure of a call and the number of keys, from the first, that it is about."""
    queries, keys = query.shape[2], key.shape[2]
    if state is not None:
        return _continued(mask, queries, state.seen), keys
    if mask is None:
        if not causal:
            return Full(), keys
        if queries == keys:
            return Causal() if window is None else Window.last(window), keys
        if queries == 1 and window is None:
            return Full(), keys
        raise Unsupported(
            f"{queries} queries and {keys} keys came without a mask, which leaves open where the queries stand: pass "
            "attention_mask, or attend without a cache."
        )
    if isinstance(mask, Mask):
        if mask.question.keys != keys or mask.question.queries != queries:
            raise InvalidArgument(
                f"The mask was made for {mask.question.queries} queries and {mask.question.keys} keys, but there are "
                f"{queries} and {keys}."
            )
        sight = mask.question.sight
        if sight is not None:
            return sight.structure, sight.keys
        mask = mask.question.dense()
    if mask.dim() != 4 or mask.shape[-2:] != (queries, keys):
        raise InvalidArgument(f"The mask must be [B, heads or 1, {queries}, {keys}], not {list(mask.shape)}.")
    return structure_of(mask, query.shape[0]), keys


def _refuse_ending(structure: Structure) -> None:
    """Refuse patterns that would be others for the tokens before, now that there are more."""
    for pattern in merge(Causal() & structure).patterns:
        if pattern.ends is not None:
            raise Unsupported(
                f"{pattern} {pattern.ends}, so tokens behind a cache would not see what they see in the whole text: "
                "pass use_cache=False, which reads the text anew for each token."
            )


def _continued(mask: Tensor | None, queries: int, seen: int) -> Structure:
    """The structure of new tokens behind a state, which knows the tokens before them."""
    if not isinstance(mask, Mask):
        raise Unsupported(
            "A StateCache needs a mask that the model makes itself from attention_mask [B, L]: pass no mask of four "
            "dimensions."
        )
    asked = mask.question
    if asked.queries != queries or asked.keys != seen:
        raise InvalidArgument(f"The mask was made for {asked.keys} tokens so far, but the StateCache has {seen}.")
    structure = asked.continued()
    if structure is None:
        raise Unsupported(
            "A StateCache continues causal attention and sliding windows, without padding between tokens; this model's "
            "mask is another: use transformers' own caches."
        )
    return structure
