"""Which attention and form cost least at given sizes, and from which length a fixed state beats a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mercer.advice.crossing import LIMIT, first_length
from mercer.advice.result import Advice, Choice, Crossings, Option
from mercer.core.kernels import Exp, Kernel
from mercer.core.machine import Machine, machine_in_use, use_machine
from mercer.core.merged import Merged, merge
from mercer.core.mixed import Mixed
from mercer.core.names import attention_name, parse_attention
from mercer.core.normalizers import Normalizer, Sum
from mercer.core.structure_names import causal, parse_structure, structure_name
from mercer.core.structures import Pattern, Structure
from mercer.core.support import Sizes, unsupported
from mercer.errors import InvalidArgument, Unsupported
from mercer.planning import Plan, choose

KERNELS = ("softmax", "elu-sum", "taylor2-sum", "favor256-sum", "dpfp1-sum", "exp@64:taylor2-sum")
"""What is compared by default; of these under another structure than causal those without a window of their own."""
LIMIT_OF_PATTERNS = 131_072
"""Tokens of a context under a pattern, all of whose tiles are laid out to be counted."""
DTYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def advise(
    *,
    dim: int,
    heads: int,
    context: int,
    value_dim: int | None = None,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    kernels: Sequence[str | Kernel] | None = None,
    normalizer: Normalizer | None = None,
    device: str = "cpu",
    machine: Machine | None = None,
    training: bool = False,
    structure: str | Structure = "causal",
) -> Advice:
    """Compare what attentions cost for a causal context: time to read it, time of a further token, bytes of the state.

    Nothing is run: times come from the model of :class:`~mercer.Machine`, in the form, path and backend that
    :func:`~mercer.attention` chooses by itself. Bytes are exact. Only the operator counts, not the projections around
    it.

    Args:
        dim: D, of queries and keys.
        heads: query heads.
        context: tokens, 1 to 16,777,216.
        value_dim: Dv. Default ``dim``.
        kv_heads: key heads, a divisor of ``heads``. Default ``heads``.
        dtype: of queries, keys, values and the cache: float64, float32, bfloat16 or float16.
        batch: sequences at once.
        kernels: names such as ``"taylor2-l2"``, or kernels. Default softmax and one of each family.
        normalizer: for all kernels. Default: a name's own, and ``Sum()`` for a kernel.
        device: what the call would run on; its numbers must be the machine's.
        machine: whose numbers. Default: those of :func:`~mercer.use_machine`, or else those of docs/lab.md.
        training: forward and backward without a state, instead of reading a context and keeping the state.
        structure: which of the tokens before it a token sees, softmax's too: a name such as ``"window(512)"`` or
            ``"strided(128)"`` (:func:`~mercer.parse_structure`), or patterns. Default all of them. Under patterns a
            context has at most 131,072 tokens.

    Raises:
        InvalidArgument: sizes, names or a device that are wrong.
        Unsupported: a kernel and normaliser that do not go together or with the structure, or a structure that a state
            cannot continue.
    """
    named, merged = _structure(structure)
    value_dim = dim if value_dim is None else value_dim
    kv_heads = heads if kv_heads is None else kv_heads
    for name, value in (
        ("dim", dim),
        ("value_dim", value_dim),
        ("heads", heads),
        ("kv_heads", kv_heads),
        ("context", context),
        ("batch", batch),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"advise: {name} must be an integer of 1 or more, not {value!r}.")
    if context > LIMIT:
        raise InvalidArgument(f"advise: context must be at most {LIMIT:,} tokens, not {context:,}.")
    if merged.patterns and context > LIMIT_OF_PATTERNS:
        raise InvalidArgument(
            f"advise: under {named} context must be at most {LIMIT_OF_PATTERNS:,} tokens, not {context:,}: the tiles "
            "of a pattern are laid out to be counted."
        )
    if heads % kv_heads:
        raise InvalidArgument(f"advise: kv_heads must divide the {heads} heads, which {kv_heads} does not.")
    if dtype not in DTYPES:
        raise InvalidArgument(f"advise: dtype must be {', '.join(map(str, DTYPES))}, not {dtype!r}.")
    machine = machine_in_use() if machine is None else machine
    with use_machine(machine):
        if machine.device != device.partition(":")[0]:
            raise InvalidArgument(
                f"advise: the numbers in use are of a {machine.device} ({machine.name}), not of {device!r}: pass "
                f"machine=mercer.measure_machine({device!r}), measured where there is one."
            )
        ask = _Question(dim, value_dim, heads, kv_heads, batch, dtype, device.partition(":")[0], training, merged)
        plain = merged.left is None and not merged.patterns
        usual = KERNELS if plain else tuple(name for name in KERNELS if not isinstance(parse_attention(name)[0], Mixed))
        candidates = _candidates(usual if kernels is None else kernels, normalizer)
        softmax = ask.option("softmax", Exp(), Sum(), context, None)
        options = tuple(
            softmax if (name, kernel, norm) == ("softmax", Exp(), Sum())
            else ask.option(name, kernel, norm, context, (Exp(), Sum()))
            for name, kernel, norm in candidates
        )  # fmt: skip
    return Advice(
        dim, value_dim, heads, kv_heads, context, DTYPES[dtype], batch, training, machine.name, softmax.state_bytes,
        softmax, options, named,
    )  # fmt: skip


def _structure(given: str | Structure) -> tuple[str, Merged]:
    """A structure's name, and what it is, made causal."""
    found = parse_structure(given) if isinstance(given, str) else given
    if not isinstance(found, Structure) or not all(isinstance(part, Pattern) for part in found.parts):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(
            f"advise: structure must be a name such as 'strided(128)', or patterns, which say who sees whom, not "
            f"{given}."
        )
    try:
        name = structure_name(found)
    except InvalidArgument:  # patterns of one's own have none
        name = str(found)
    return name, merge(causal(found))


def _candidates(given: Sequence[str | Kernel], normalizer: Normalizer | None) -> list[tuple[str, Kernel, Normalizer]]:
    if isinstance(given, str) or not given:
        raise InvalidArgument(f"advise: kernels must be a list of names or kernels, one or more, not {given!r}.")
    if normalizer is not None and not isinstance(normalizer, Normalizer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"advise: normalizer must be a Normalizer, such as L2(), not {normalizer!r}.")
    found: list[tuple[str, Kernel, Normalizer]] = []
    for item in given:
        if isinstance(item, str):
            kernel, own = parse_attention(item)
            name = item
        elif isinstance(item, Kernel):  # pyright: ignore[reportUnnecessaryIsInstance]
            kernel, own = item, Sum()
            name = _name(kernel, own)
        else:
            raise InvalidArgument(f"advise: kernels must be names or kernels, and {item!r} is neither.")
        if normalizer is None:
            found.append((name, kernel, own))
        else:
            found.append((_name(kernel, normalizer), kernel, normalizer))
    return found


def _name(kernel: Kernel, normalizer: Normalizer) -> str:
    try:
        return attention_name(kernel, normalizer)
    except InvalidArgument:  # parts of one's own have none
        return str(kernel) if normalizer == Sum() else f"{kernel} {normalizer}"


@dataclass(frozen=True)
class _Question:
    dim: int
    value_dim: int
    heads: int
    kv_heads: int
    batch: int
    dtype: torch.dtype
    device: str
    training: bool
    merged: Merged

    def sizes(self, length: int, stateful: bool, past: int = 0) -> Sizes:
        item = self.dtype.itemsize
        return Sizes(
            self.batch, self.heads, self.kv_heads, length, length, self.dim, self.value_dim,
            past, max(item, 4), item, self.device, trained=not stateful, bfloat16=self.dtype == torch.bfloat16,
        )  # fmt: skip

    def plan(self, kernel: Kernel, norm: Normalizer, length: int, stateful: bool, past: int = 0) -> Plan:
        """Of a call with ``length`` tokens; ``past`` keys are cached before them."""
        return choose(kernel, norm, self.merged, self.sizes(length, stateful, past), stateful=stateful)

    def grows_because(self, kernel: Kernel, norm: Normalizer, length: int) -> str:
        """Why there is no state of a fixed size; empty if there is one."""
        sizes = self.sizes(length, True)
        return unsupported(kernel, norm, self.merged, "chunked", "features", sizes, True) or ""

    def reading(self, kernel: Kernel, norm: Normalizer, length: int) -> Plan:
        return self.plan(kernel, norm, length, not self.training)

    def state(self, kernel: Kernel, norm: Normalizer, length: int) -> Plan:
        return self.plan(kernel, norm, length, True)

    def decode(self, kernel: Kernel, norm: Normalizer, length: int) -> Plan:
        """Of one token after the state that ``length`` tokens leave."""
        cached = length if self.merged.left is None else min(length, self.merged.left)
        if self.state(kernel, norm, length).path == "features":
            cached = min(length, kernel.window) if isinstance(kernel, Mixed) else 0
        return self.plan(kernel, norm, 1, True, cached)

    def option(
        self, name: str, kernel: Kernel, norm: Normalizer, context: int, other: tuple[Kernel, Normalizer] | None
    ) -> Option:
        """One attention; ``other`` is what its crossings are with."""
        # (An attention layer brings maps and directions; here any will do.)
        kernel = kernel.bind(self.dim, self.heads, self.kv_heads, torch.Generator().manual_seed(0))
        kernel.check(self.dim, self.heads, self.kv_heads)
        try:
            reading, decode = self.reading(kernel, norm, context), self.decode(kernel, norm, context)
        except Unsupported as error:
            raise Unsupported(f"advise: {name}: {error}") from error
        state, why = self.state(kernel, norm, context), self.grows_because(kernel, norm, context)
        found = None
        if other is not None and not why:
            found = Crossings(
                state=first_length(
                    lambda n: self.state(kernel, norm, n).state_bytes < self.state(*other, n).state_bytes
                ),
                decode=first_length(lambda n: self.decode(kernel, norm, n).seconds < self.decode(*other, n).seconds),
                reading=first_length(lambda n: self.reading(kernel, norm, n).seconds < self.reading(*other, n).seconds),
            )
        fixed = not why or (self.merged.left is not None and context >= self.merged.left)
        return Option(name, _choice(reading), _choice(decode), state.state_bytes, fixed, why, found)


def _choice(plan: Plan) -> Choice:
    return Choice(plan.form, plan.path, plan.backend, plan.seconds)
