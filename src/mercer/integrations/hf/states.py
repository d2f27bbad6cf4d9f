"""A cache of transformers that keeps mercer's states: of constant size where the kernel has one."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from mercer.core.state import State
from mercer.errors import Unsupported

_TAG = "mercer_layer"


class StateLayer(CacheLayerMixin):
    """What one layer has absorbed, as a :class:`mercer.State`.

    `update` hands on the new keys and values alone, with a mark by which the attention function finds this layer; the
    function continues `state` and leaves the next one here.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.state: State | None = None
        self.seen = 0  # positions so far, padding too
        self._open = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._check()
        self.lazy_initialization(key_states, value_states)
        self.seen += key_states.shape[-2]
        self._open = True
        marked = key_states.view(key_states.shape)  # a tensor object of its own
        setattr(marked, _TAG, self)
        return marked, value_states

    def commit(self, state: State) -> None:
        """Take the state after the tokens of the last update."""
        self.state, self._open = state, False

    def _check(self) -> None:
        if self._open:
            raise Unsupported(
                "The keys of the last call never reached an attention of mercer, so this StateCache lacks them: "
                "use it with attn_implementation='mercer:...', in models that hand on the keys they are given back."
            )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state, self.seen, self._open = None, 0, False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise Unsupported("A state cannot forget its last tokens: keep a copy of the StateCache from before them.")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.batch_select_indices(torch.arange(self.state.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._check()
        if self.state is not None:
            self.state = self.state.select(indices.to(self.state.length.device))

    def offload(self) -> None:
        raise Unsupported("StateCache is not moved between devices; its states are small.")

    prefetch = offload


class StateCache(Cache):
    """A cache whose layers keep mercer's states: pass it to a swapped model as `cache`, to `generate` too.

        model.generate(**inputs, cache=StateCache())

    A layer with a finite kernel then keeps a :class:`mercer.FeatureState` of constant size and takes the same time for
    every token, however long the text; a kernel or a window that needs keys keeps a :class:`mercer.CacheState`, and
    `Mixed` both. Layers are made as they come. Beam search reorders states; `crop` raises, since a state cannot forget
    its last tokens, which assisted generation asks for: keep `copy.copy(cache)` from before, as states are values.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=StateLayer)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(layer.state.nbytes for layer in self.layers if layer.state is not None)

    def __copy__(self) -> "StateCache":
        """Another cache with the same states, which go on without touching one another."""
        other = StateCache()
        for layer in self.layers:
            layer._check()
            made = StateLayer()
            made.state, made.seen, made.is_initialized = layer.state, layer.seen, layer.is_initialized
            other.layers.append(made)
        return other


def layer_of(key: Tensor) -> StateLayer | None:
    """The layer of a :class:`StateCache` that handed out these keys."""
    return getattr(key, _TAG, None)
