"""What a call over several processes will send and compute, as a value that can be read before anything runs.

Nothing is sent to make a plan: it follows from the sharding, the structure and the shapes of one process's tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import mercer.ops
from mercer.core.support import sums_weights
from mercer.distributed.blocks import Fused
from mercer.distributed.chain import stops
from mercer.distributed.request import Request
from mercer.distributed.scene import Scene
from mercer.errors import InvalidArgument, Unsupported
from mercer.planning import duration

EXCHANGES = ("ring", "state")
BANDWIDTH = 1e9
"""Bytes a second that processes are taken to send each other, where an exchange is chosen by time."""
SLAB = 2**22
"""Bytes of one process's keys and values that travel as one message of a ring, about: 4 MiB."""


@dataclass(frozen=True)
class Plan:
    """How a call will be computed over its processes, and what that costs.

    Attributes:
        exchange: ``"ring"`` (keys and values go round) or ``"state"`` (one state runs along the sequence).
        backend: what computes with them: ``"torch"`` or ``"numba"``; of ``"state"``, what each process's own plan says.
        forward_bytes: what each process sends in the forward pass, by rank.
        backward_bytes: what each sends in the backward pass, if there is one.
        pairs: visible query-key pairs of each process, batch and heads not counted; with padding or patterns, those
            that would be visible without. What the ring balances.
        seconds: how long the slowest process should take, sending included, on the machine in use
            (:func:`mercer.use_machine`) and at :data:`BANDWIDTH`.
        reason: why this exchange.
    """

    exchange: str
    backend: str
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    pairs: tuple[int, ...]
    seconds: float
    reason: str

    def __str__(self) -> str:
        most, least = max(self.pairs), min(self.pairs)
        return (
            f"{self.exchange} exchange ({self.backend}) over {len(self.pairs)} processes: each sends at most "
            f"{max(self.forward_bytes):,} bytes forward and {max(self.backward_bytes):,} backward; pairs of a process "
            f"from {least:,} to {most:,}; about {duration(self.seconds)}. {self.reason}"
        )


def scene_of(made: Request) -> Scene:
    """The scene without its masks: enough to tell who needs whose keys."""
    return Scene.of(made.merged, made.sharding, None, made.query.shape[0], made.query.shape[1])


def choose(made: Request, exchange: str, backend: str) -> Plan:
    """The plan of a request; the same on every process."""
    if exchange != "auto" and exchange not in EXCHANGES:
        raise InvalidArgument(f"exchange must be 'auto' or one of {', '.join(map(repr, EXCHANGES))}, not {exchange!r}.")
    if backend not in ("auto", "torch", "numba"):
        raise InvalidArgument(f"backend must be 'auto', 'torch' or 'numba', not {backend!r}.")
    asked = EXCHANGES if exchange == "auto" else (exchange,)
    found: dict[str, Plan] = {}
    refused: list[Unsupported] = []
    for name in asked:
        try:
            found[name] = _ring(made, backend) if name == "ring" else _state(made, backend)
        except Unsupported as why:
            text = str(why).replace("path='pairs'", "exchange='ring'").replace("path='features'", "exchange='state'")
            refused.append(Unsupported(text))
    if not found:
        raise refused[0]
    if exchange != "auto":
        return found[exchange]
    best = min(found.values(), key=lambda plan: plan.seconds)
    others = [f"{p.exchange} about {duration(p.seconds)}" for p in found.values() if p is not best]
    why = f"The faster one: {', '.join(others)}." if others else f"The only one that serves: {refused[0]}"
    return _because(best, why)


def _because(plan: Plan, why: str) -> Plan:
    return Plan(plan.exchange, plan.backend, plan.forward_bytes, plan.backward_bytes, plan.pairs, plan.seconds, why)


def _own_plan(made: Request, path: str, backend: str = "auto") -> mercer.ops.Plan:
    """The plan of the largest process's own tokens as a call in one process; refuses what cannot be computed."""
    longest = max(made.sharding.size(rank) for rank in range(made.sharding.processes))
    sizes = [(*x.shape[:2], longest, x.shape[3]) for x in (made.query, made.key, made.value)]
    shapes = [
        torch.empty(size, dtype=x.dtype, device="meta", requires_grad=x.requires_grad and torch.is_grad_enabled())
        for size, x in zip(sizes, (made.query, made.key, made.value), strict=True)
    ]
    query, key, value = shapes
    return mercer.ops.plan(
        query,
        key,
        value,
        kernel=made.kernel,
        normalizer=made.normalizer,
        structure=made.local(slice(None), None),
        scale=made.given_scale,
        path=path,
        backend=backend,
    )


def _ring(made: Request, backend: str) -> Plan:
    if made.kernel.log_features:
        raise Unsupported(
            f"{made.kernel} has features given as logarithms, which a ring does not merge: use exchange='state', or "
            "one process."
        )
    scene, sharding = scene_of(made), made.sharding
    alone = _own_plan(made, "pairs")
    every = range(sharding.processes)
    pairs = tuple(sum(scene.pairs(b) for source in every for b in scene.blocks(rank, source)) for rank in every)
    passed, returned = _ring_tokens(scene)
    per_token, gradient_per_token = ring_bytes(made)
    here = max(sum(scene.pairs(b) for b in scene.blocks(rank, rank)) for rank in every)
    compute = alone.seconds * max(pairs) / max(here, 1)
    forward = tuple(per_token * n for n in passed)
    backward = tuple(per_token * n + gradient_per_token * m for n, m in zip(passed, returned, strict=True))
    sent = max(forward) + (max(backward) if made.wants_gradient else 0)
    fused = engine_name(made, backend)
    return Plan("ring", fused, forward, backward, pairs, max(compute, sent / BANDWIDTH), "As asked.")


def engine_name(made: Request, backend: str) -> str:
    """``"numba"`` or ``"torch"``: what computes the blocks of a ring, the same on every process."""
    fused = Fused.serves(made.query, made.value, made.kernel, made.normalizer, made.merged)
    if backend == "numba" and not fused:
        raise Unsupported(
            f"The numba backend does not compute {made.kernel} with {made.normalizer} for this structure, dtype and "
            "device round a ring: use backend='torch'."
        )
    if backend == "auto":
        return "numba" if fused and Fused.worth_while(made.query, made.sharding) else "torch"
    return backend


def _ring_tokens(scene: Scene) -> tuple[list[int], list[int]]:
    """Tokens whose keys and values, and whose gradients, each process sends."""
    size = scene.sharding.size
    count = scene.sharding.processes
    passed, returned = [0] * count, [0] * count
    for source in range(count):
        for hop in range(scene.last_hop(source)):
            passed[(source + hop) % count] += size(source)
            returned[(source + hop + 1) % count] += size(source)
    return passed, returned


def slabs(made: Request) -> int:
    """Into how many slabs of heads a ring is cut, so that the keys of a process make messages of about :data:`SLAB`."""
    heads = made.key.shape[1]
    if any(p.per_head or p.asks for p in made.merged.patterns):  # which count the heads of a call
        return 1
    width = made.kernel.mapped_dim(made.key.shape[3]) + made.value.shape[3]
    tokens = -(-made.sharding.length // made.sharding.processes)
    return max(1, min(heads, made.key.shape[0] * heads * tokens * width * made.key.element_size() // SLAB))


def ring_bytes(made: Request) -> tuple[int, int]:
    """Bytes of one token's keys and values on their way round, and of their gradients."""
    batch, heads, _, dim = made.key.shape
    mapped = not made.keeps_keys
    width = made.kernel.mapped_dim(dim) if mapped else dim
    sums = torch.finfo(made.precision).bits // 8
    own = made.key.element_size()
    logs = 0
    decay = made.merged.decay
    if decay is not None:
        rates = decay.logs().shape
        rows = batch if decay.per_token or made.merged.padding is not None else 1
        logs = 8 * rows * (slabs(made) if rates[1] == 1 else made.query.shape[1])  # shared ones go with every slab
    keys = batch * heads * (width * (sums if mapped else own) + made.value.shape[3] * own) + logs
    gradients = batch * heads * (width + made.value.shape[3]) * sums + logs
    return keys, gradients


def _state(made: Request, backend: str) -> Plan:
    sharding, merged = made.sharding, made.merged
    if merged.patterns:
        raise Unsupported(f"A state cannot tell which of its keys {merged.patterns[0]} hides: use exchange='ring'.")
    alone = _own_plan(made, "features", backend)
    scene = scene_of(made)
    nbytes = state_bytes(made)
    counts = [0] * sharding.processes
    back = [0] * sharding.processes
    for rank in range(sharding.processes):
        for backwards in (False,) if merged.causal else (False, True):
            for stop in stops(sharding, scene.bounds, rank, backwards):
                step = -1 if backwards else 1
                counts[rank] += stop.leaves and sharding.owner(stop.index + step) != rank
                back[rank] += stop.arrives and sharding.owner(stop.index - step) != rank
    every = range(sharding.processes)
    pairs = tuple(sum(scene.pairs(b) for source in every for b in scene.blocks(rank, source)) for rank in every)
    forward, backward = tuple(nbytes * n for n in counts), tuple(nbytes * n for n in back)
    hops = sum(counts) * (2 if made.wants_gradient else 1)  # one after the other
    seconds = 1.5 * alone.seconds + hops * nbytes / BANDWIDTH  # keys are absorbed twice
    return Plan("state", alone.backend, forward, backward, pairs, seconds, "As asked.")


def state_bytes(made: Request) -> int:
    """Bytes of the state that is handed on: sums, masses, and three numbers a head or row."""
    batch, width = made.query.shape[0], made.value.shape[3]
    heads = made.merged.weight_heads(made.query.shape[1], made.key.shape[1])
    features = made.kernel.feature_dim(made.query.shape[3])
    assert features is not None
    mass = sums_weights(made.kernel, made.normalizer)
    sums = torch.finfo(made.precision).bits // 8
    peak = 8 * batch * heads if made.kernel.log_features else 0
    return batch * heads * (features * (width + mass) * sums + 8) + 8 * batch + peak
