"""Attention over several processes, each of which holds a part of the sequence.

:func:`attention` is :func:`mercer.attention` for a sequence that is cut by a :class:`Sharding`; :func:`plan` says
beforehand what it will send.
"""

from mercer.distributed.links import Traffic, traffic
from mercer.distributed.ops import attention, gather, plan
from mercer.distributed.planning import Plan
from mercer.distributed.request import shard_structure
from mercer.distributed.sharding import Sharding

__all__ = ["Plan", "Sharding", "Traffic", "attention", "gather", "plan", "shard_structure", "traffic"]
