"""Which attention costs least, and from which context length a fixed state beats a cache."""

from mercer.advice.advise import advise
from mercer.advice.crossing import LIMIT
from mercer.advice.measure import measure_machine
from mercer.advice.result import Advice, Choice, Crossings, Option

__all__ = ["LIMIT", "Advice", "Choice", "Crossings", "Option", "advise", "measure_machine"]
