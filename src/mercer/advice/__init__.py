"""Which attention costs least, and from which context length a fixed state beats a cache."""

from mercer.advice.measure import measure_machine

__all__ = ["measure_machine"]
