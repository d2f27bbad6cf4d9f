"""Quick inference of a decoder on the CPU: packed weights, and a step of the whole model in one compiled call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from mercer.backends.packed import FEW
from mercer.backends.sharing import follow, installed
from mercer.core.mixer_state import JoinedState
from mercer.core.state import CacheState, State
from mercer.errors import InvalidArgument, Unsupported
from mercer.inference.packed_model import packed_model, weights_of
from mercer.inference.step_program import Builder, Program, ranges, unfit, widest
from mercer.inference.step_states import NOWHERE, DecoderStates, empty_states, gathered
from mercer.models.token_ids import token_ids
from mercer.nn.reach import longest
from mercer.nn.rotary import Turns

if TYPE_CHECKING:
    from mercer.models.config import ModelConfig
    from mercer.models.decoder import DecoderLM

WEIGHTS = ("as_is", "bfloat16", "int8", "int4")


def prepare(model: DecoderLM, weights: str = "as_is", *, keep: bool = True) -> Engine:
    """Pack a decoder's weights for inference on the CPU. Needs the extra `cpu`.

    The engine is called as the model is and gives the same logits up to rounding: its residual stream, sums and logits
    are float32. What is done to the model's parameters later does not reach the engine.

    Args:
        model: of float32 or bfloat16, on the CPU.
        weights: "as_is"; "bfloat16"; "int8" (for each row, 32 columns share a factor: an error of half of max / 127) or
            "int4" (the same with a factor and a least value, half of (max - min) / 15, but int8 for what embeds and
            scores tokens). All but float32 as it is keep
            keys and values in bfloat16 where the step is compiled, and multiply prompts in bfloat16.
        keep: leave the model as it is, so that all weights are there twice. False takes each matrix from it when that
            is packed, and leaves a model that computes nothing any more.

    Raises:
        InvalidArgument: another name of weights.
        Unsupported: Numba is missing, the model is elsewhere or of another dtype, or has parts that cannot be packed.
    """
    if weights not in WEIGHTS:
        raise InvalidArgument(f"weights must be one of {', '.join(WEIGHTS)}, not {weights!r}")
    if not installed():
        raise Unsupported("packed weights need Numba: install the extra cpu (pip install 'mercer[cpu]')")
    found = {p.dtype for p in model.parameters()}
    device = model.embedding.weight.device
    if device.type != "cpu":
        raise Unsupported(f"packed weights are for the CPU, and the model is on {device}: move it, or use it as it is")
    if len(found) > 1 or not found <= {torch.float32, torch.bfloat16}:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in found))
        raise Unsupported(f"a model of float32 or of bfloat16 can be packed, not one of {names}: convert it first")
    return Engine(model, weights, keep)


class Engine:
    """A decoder with packed weights. Made by `prepare`.

    Attributes:
        model: the modules, with packed matrices.
        weights: the name that was asked for.
        kind: what the weights are kept as.
        reason: why a step of one token is computed module by module; None if it is one compiled call.
    """

    def __init__(self, model: DecoderLM, weights: str, keep: bool = True) -> None:
        plain = model.embedding.weight.dtype
        self.kind = str(plain).removeprefix("torch.") if weights == "as_is" else weights
        self.weights, self.reason = weights, unfit(model)
        narrow = plain == torch.bfloat16 or (self.kind != "float32" and self.reason is None)
        self.dtype = torch.bfloat16 if narrow else torch.float32
        with torch.no_grad():
            self.model = packed_model(model, self.kind, self.dtype, keep)
        self.config: ModelConfig = model.config
        self._lock = Lock()  # a program has its own memory, for one step at a time
        self._programs: dict[tuple[int, int, bool], Program] = {}
        self._turns: Turns | None = None
        self._window = None if self.reason is not None else widest(self.model)

    @property
    def reach(self) -> int | None:
        """The longest sequence that the model does not refuse; None: any."""
        return self.model.reach

    @property
    def endless(self) -> bool:
        """Whether the model reads a text of any length as one sequence, in states of bounded size."""
        return self.model.endless

    def parameters(self) -> Iterator[Tensor]:
        """The tensors that are not packed, such as norms: on the device and of the dtype of the model."""
        return self.model.parameters()

    @property
    def nbytes(self) -> int:
        """Bytes of packed weights, all of which a step of one token reads, but for those of experts that rest."""
        return sum(weight.data.numel() for weight in weights_of(self.model))

    @overload
    def __call__(
        self, tokens: Tensor, *, padding: Tensor | None = None, states: Sequence[State] | None = None,
        return_states: Literal[False] = False,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def __call__(
        self, tokens: Tensor, *, padding: Tensor | None = None, states: Sequence[State] | None = None,
        return_states: Literal[True],
    ) -> tuple[Tensor, Sequence[State]]: ...  # fmt: skip

    def __call__(
        self, tokens: Tensor, *, padding: Tensor | None = None, states: Sequence[State] | None = None,
        return_states: bool = False,
    ) -> Tensor | tuple[Tensor, Sequence[State]]:  # fmt: skip
        """As `DecoderLM.forward`: logits [B, T, vocab_size], float32, and the states if return_states.

        states: of this engine or of the model itself; those that are returned go into the model too, if it has their
        dtype (`states_for` converts them).
        """
        return self._call(tokens, padding, states, return_states, head=True)

    def hidden(
        self, tokens: Tensor, *, padding: Tensor | None = None, states: Sequence[State] | None = None,
        return_states: bool = False,
    ) -> Any:  # fmt: skip
        """As `DecoderLM.hidden`: the last hidden states [B, T, dim], float32, ready for `score`."""
        return self._call(tokens, padding, states, return_states, head=False)

    def score(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab_size] of last hidden states [..., dim]."""
        with torch.no_grad():
            logits = self.model.head(hidden)
            cap = self.config.logit_cap
            return logits if cap is None else torch.tanh(logits / cap) * cap

    def states_for(self, states: Sequence[State], dtype: torch.dtype) -> list[State]:
        """The same states with keys and values of another dtype, for a model of that dtype."""
        return [_converted(state, dtype) for state in states]

    def _call(
        self, tokens: Tensor, padding: Tensor | None, states: Sequence[State] | None, return_states: bool, head: bool
    ) -> Tensor | tuple[Tensor, Sequence[State]]:
        with torch.no_grad():
            if self.reason is None and tokens.ndim == 2 and tokens.shape[1] == 1 and 0 < tokens.shape[0] <= FEW:
                out, after = self._step(tokens, padding, states, head)
            else:
                given = None if states is None else self.states_for(states, self.dtype)
                out, after = self.model.hidden(tokens, padding=padding, states=given, return_states=True)
                if head:
                    out = self.score(out)
        return (out, after) if return_states else out

    def _step(
        self, tokens: Tensor, padding: Tensor | None, states: Sequence[State] | None, head: bool
    ) -> tuple[Tensor, DecoderStates]:
        model, batch = self.model, tokens.shape[0]
        before = self._states(states, batch, padding)
        tokens = token_ids(tokens)
        if model.reach is not None and self.config.position != "learned":
            model._refuse_longer(longest(1, padding, before.length))
        x = model.embed(tokens, padding=padding, offset=before.length)
        place, buffer = before.stop, before.buffer
        if not buffer.take(place):
            before = before.grown(padding is not None, self._window)
            place, buffer = before.stop, before.buffer
            buffer.take(place)
        if buffer.positions is not None:
            new = before.length if padding is None else before.length.masked_fill(~padding[:, 0], NOWHERE)
            buffer.positions[:, place] = new
        threads = torch.get_num_threads()
        with self._lock:
            out = self._run(self._program(batch, threads, head), before, x[:, 0], threads)
        width = self.config.vocab_size if head else self.config.dim
        more = 1 if padding is None else padding[:, 0].to(torch.int64)
        ahead = before.longest + 1 if padding is None else int((before.length + more).max())
        after = DecoderStates(buffer, before.start, place + 1, before.length + more, ahead)
        return out[:batch, :width].unsqueeze(1), after

    def _states(self, states: Sequence[State] | None, batch: int, padding: Tensor | None) -> DecoderStates:
        attention = self.model.blocks[0].attention
        if padding is not None and (padding.shape != (batch, 1) or padding.dtype != torch.bool):
            raise InvalidArgument(
                f"padding must be a bool tensor [{batch}, 1], got {padding.dtype} of shape {list(padding.shape)}"
            )
        if states is None:
            shape = (len(self.model.blocks), batch, attention.kv_heads, 64, attention.head_dim)
            found = empty_states(*shape, self.dtype)
        elif len(states) != len(self.model.blocks):
            raise InvalidArgument(
                f"the model needs a state for each of its {len(self.model.blocks)} layers, got {len(states)}"
            )
        elif isinstance(states, DecoderStates) and states.dtype == self.dtype:
            found = states
        else:
            found = gathered(list(states), self.dtype)
        shape = found.buffer.entries.shape
        if (shape[2], shape[3], shape[5]) != (batch, attention.kv_heads, attention.head_dim):
            raise InvalidArgument(
                f"states of {shape[2]} rows, {shape[3]} key heads and {shape[5]} channels do not fit {batch} rows of "
                f"tokens and a model of {attention.kv_heads} key heads and {attention.head_dim} channels"
            )
        if padding is not None and found.buffer.positions is None:
            found = found.grown(True)
        return found

    def _program(self, batch: int, threads: int, head: bool) -> Program:
        key = (batch, threads, head)
        if key not in self._programs:
            self._programs[key] = Builder(self.model, batch, threads, self.dtype).build(head)
        return self._programs[key]

    def _run(self, program: Program, before: DecoderStates, x: Tensor, threads: int) -> Tensor:
        from mercer.backends import program_kernels as k

        entries, positions, s = before.buffer.entries, before.buffer.positions, program.step
        batch, dim = x.shape
        program.first[:batch, :dim] = x
        size = entries.element_size()
        strides = entries.stride()
        s[k.CACHE], s[k.LAYER_STRIDE], s[k.VALUES] = entries.data_ptr(), size * strides[0], size * strides[1]
        s[k.ROW_STRIDE], s[k.HEAD_STRIDE] = size * strides[2], size * strides[3]
        s[k.FIRST], s[k.STOP] = before.start, before.stop + 1
        s[k.RANGES] = ranges(batch * entries.shape[3], before.stop + 1 - before.start)
        s[k.POSITIONS], s[k.POSITION_STRIDE] = 0, 0
        if positions is not None:
            s[k.POSITIONS], s[k.POSITION_STRIDE] = positions.data_ptr(), 4 * positions.stride(0)
        here = before.length.contiguous()
        s[k.HERE] = here.data_ptr()
        turns = self._table(before.longest + 1)
        if turns is not None:
            s[k.COS], s[k.SIN_AHEAD], s[k.SIN_BEHIND] = (t.data_ptr() for t in turns[:3])
        program.counters.zero_()
        out = torch.empty(program.first.shape[0], program.out_width)
        program.operations[-1, k.OUT], program.operations[-1, k.OUT_PITCH] = out.data_ptr(), 4 * program.out_width

        follow(threads, lambda thread: program.run(program.operations, program.numbers, s, thread, threads))
        return out

    def _table(self, length: int) -> Turns | None:
        """The factors of positions up to a length."""
        rotary = self.model.blocks[0].attention.rotary
        if rotary is None:
            return None
        if self._turns is None or self._turns.cos.shape[1] < length:
            device = torch.device("cpu")
            size = 1 << max(length - 1, 255).bit_length()
            self._turns = rotary.first_turns(size, heads=1, dtype=torch.float32, device=device)
        return self._turns

    def __repr__(self) -> str:
        way = "one compiled call" if self.reason is None else f"module by module ({self.reason})"
        return f"Engine({self.kind}, {self.nbytes:,} bytes of weights; a step is {way})"


def _converted(state: State, dtype: torch.dtype) -> State:
    if isinstance(state, JoinedState):
        return JoinedState({name: _converted(part, dtype) for name, part in state.parts.items()})
    if not isinstance(state, CacheState) or state.keys.dtype == dtype:
        return state
    return CacheState(state.keys.to(dtype), state.values.to(dtype), state.length, state.valid, state.log)
