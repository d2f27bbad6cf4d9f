"""Attention over several processes, each holding a part of the sequence."""

from mercer.distributed.links import Traffic, traffic
from mercer.distributed.ops import ring_attention, state_attention
from mercer.distributed.request import shard_structure
from mercer.distributed.sharding import Sharding

__all__ = ["Sharding", "Traffic", "ring_attention", "shard_structure", "state_attention", "traffic"]
