"""Attention read as an associative memory: keys are addresses, values are contents, and the state is the store."""

from mercer.memory.associative import AssociativeMemory
from mercer.memory.measure import Capacity, Point, capacity

__all__ = ["AssociativeMemory", "Capacity", "Point", "capacity"]
