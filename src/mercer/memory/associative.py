"""An associative memory on a state: store pairs, recall a value by its key."""

from __future__ import annotations

import torch
from torch import Tensor

from mercer.core.kernels import Kernel
from mercer.core.log_weights import Decay
from mercer.core.normalizers import Normalizer, Sum
from mercer.core.state import CacheState, FeatureState, State
from mercer.core.structures import Causal, Full
from mercer.errors import InvalidArgument, Unsupported
from mercer.ops import attention


class AssociativeMemory:
    """Stores pairs (k_j, v_j) and recalls N( sum_j K(q, k_j) v_j ) for a query q.

    A finite kernel keeps the fixed-size state S = sum_j phi(k_j) v_j^T, z = sum_j phi(k_j), whatever the number of
    pairs: for ``Power(1)`` the linear associator S = sum_j k_j v_j^T. An exponential kernel keeps the pairs, and
    recall is the update of a modern Hopfield network, softmax(scale q K^T) V. :func:`~mercer.memory.capacity` measures
    how many pairs each can tell apart.

    The memory holds an immutable state and replaces it when it stores, so ``memory.state`` kept from before is a
    snapshot.

    Args:
        kernel: K.
        dim: length D of keys and queries.
        value_dim: length Dv of values.
        normalizer: N. Default ``Sum()``, an average of values; kernels that go negative, such as ``Power(1)``, need
            another: ``Identity()`` (the plain sum), ``L2()`` or ``RMS()``.
        scale: the kernel's scale; default its own.
        decay: None, or a number in (0, 1] by which each stored pair multiplies all earlier ones. Needs a finite kernel.
        path: ``"features"``, ``"pairs"`` or ``"auto"``: features for a finite kernel, pairs otherwise.
        dtype: of keys and values, which are converted to it. Sums are float32 (float64 for float64).
        device: where the state lies.

    Raises:
        InvalidArgument: sizes or options that are wrong in themselves.
        Unsupported: parts that cannot be combined, a feature state over the memory limit included; the message says
            what would work.

    >>> import torch
    >>> from mercer import AssociativeMemory, Exp
    >>> memory = AssociativeMemory(Exp(), dim=2, value_dim=1, scale=50.0)
    >>> memory.store(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[10.0], [20.0]]))
    AssociativeMemory(Exp(), dim=2, value_dim=1, pairs=2)
    >>> memory.recall(torch.tensor([[0.9, 0.2], [0.1, 0.8]])).tolist()
    [[10.0], [20.0]]

    Source: Kohonen 1972 (the linear associator); Ramsauer et al. 2020, arXiv 2008.02217 (softmax as a Hopfield update).
    """

    def __init__(
        self,
        kernel: Kernel,
        dim: int,
        value_dim: int,
        *,
        normalizer: Normalizer | None = None,
        scale: float | None = None,
        decay: float | None = None,
        path: str = "auto",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if dim < 1 or value_dim < 1:
            raise InvalidArgument(f"dim and value_dim must be 1 or more, not {dim} and {value_dim}.")
        if decay is not None and not 0 < decay <= 1:
            raise InvalidArgument(f"decay must be in (0, 1], not {decay}.")
        self.kernel, self.dim, self.value_dim, self.scale, self.decay = kernel, dim, value_dim, scale, decay
        self.normalizer = Sum() if normalizer is None else normalizer
        self.path = ("features" if kernel.feature_dim(dim) is not None else "pairs") if path == "auto" else path
        if decay is not None and self.path == "pairs":
            raise Unsupported(
                f"A memory of pairs does not decay: leave decay=None, or use a finite kernel by features, not {kernel}."
            )
        self._form = "chunked" if self.path == "features" else "auto"
        self._like = torch.empty(0, dtype=dtype, device=device)
        none = self._like.new_empty(0, dim)
        self._state = self._absorb(none, self._like.new_empty(0, value_dim), None)

    def __repr__(self) -> str:
        return f"AssociativeMemory({self.kernel}, dim={self.dim}, value_dim={self.value_dim}, pairs={len(self)})"

    def __len__(self) -> int:
        """Pairs stored so far, decayed ones included."""
        return int(self._state.length)

    @property
    def state(self) -> State:
        """A :class:`~mercer.FeatureState` or :class:`~mercer.CacheState`: a value that no later call changes."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        needed = FeatureState if self.path == "features" else CacheState
        if not isinstance(state, needed) or state.batch != 1:
            raise InvalidArgument(
                f"This memory needs a {needed.__name__} of batch 1, not a {type(state).__name__} of {state.batch}."
            )
        self._recalled(self._like.new_zeros(1, self.dim), state)  # refuses what does not fit
        self._state = state

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return self._state.nbytes

    def store(self, keys: Tensor, values: Tensor) -> AssociativeMemory:
        """Add pairs ``[n, D]`` and ``[n, Dv]``, in order; returns the memory."""
        keys, values = self._rows(keys, self.dim, "keys"), self._rows(values, self.value_dim, "values")
        if len(keys) != len(values):
            raise InvalidArgument(
                f"keys and values come in pairs, but there are {len(keys)} keys and {len(values)} values."
            )
        self._state = self._absorb(keys, values, self._state)
        return self

    def recall(self, queries: Tensor, *, steps: int = 1) -> Tensor:
        """Values ``[m, Dv]`` for queries ``[m, D]``; zeros from an empty memory.

        With ``steps`` above 1 what was recalled is the next query, as in a Hopfield network that completes a pattern;
        then Dv must be D.
        """
        if steps < 1 or (steps > 1 and self.dim != self.value_dim):
            raise InvalidArgument(
                f"steps must be 1, or more where Dv = D (here {self.value_dim} and {self.dim}), not {steps}."
            )
        out = self._rows(queries, self.dim, "queries")
        for _ in range(steps):
            out = self._recalled(out, self._state)
        return out

    def merge(self, later: AssociativeMemory) -> AssociativeMemory:
        """A new memory: this one's pairs followed by ``later``'s. Order matters only under decay."""
        for name in ("kernel", "dim", "value_dim", "scale", "decay", "path"):
            if getattr(self, name) != getattr(later, name):
                raise InvalidArgument(
                    f"Cannot merge memories of {name} {getattr(self, name)} and {getattr(later, name)}."
                )
        merged = self.clone()
        if isinstance(self._state, FeatureState):
            assert isinstance(later._state, FeatureState)
            merged._state = self._state.merge(later._state)
        else:
            assert isinstance(later._state, CacheState)
            merged._state = merged._absorb(later._state.keys[0, 0], later._state.values[0, 0], self._state)
        return merged

    def clone(self) -> AssociativeMemory:
        """A copy that shares no memory."""
        copy = AssociativeMemory.__new__(AssociativeMemory)
        copy.__dict__.update(self.__dict__)
        copy._state = self._state.clone()
        return copy

    def _absorb(self, keys: Tensor, values: Tensor, state: State | None) -> State:
        structure = Full()
        if self.decay is not None:
            structure = Causal() & Decay(rate=torch.tensor([self.decay], dtype=torch.float64, device=keys.device))
        _, after = attention(
            keys[None, None, :0],
            keys[None, None],
            values[None, None],
            kernel=self.kernel,
            normalizer=self.normalizer,
            structure=structure,
            scale=self.scale,
            state=state,
            return_state=True,
            form=self._form,
            path=self.path,
        )
        return after

    def _recalled(self, queries: Tensor, state: State) -> Tensor:
        no_keys, no_values = (self._like.new_empty(1, 1, 0, width) for width in (self.dim, self.value_dim))
        out = attention(
            queries[None, None],
            no_keys,
            no_values,
            kernel=self.kernel,
            normalizer=self.normalizer,
            scale=self.scale,
            state=state,
            form=self._form,
            path=self.path,
        )
        return out[0, 0]

    def _rows(self, x: Tensor, width: int, name: str) -> Tensor:
        if x.dim() != 2 or x.shape[1] != width:
            raise InvalidArgument(f"{name} must be [n, {width}], not {list(x.shape)}.")
        return x.to(self._like)
