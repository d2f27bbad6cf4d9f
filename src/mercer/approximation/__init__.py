"""How far a kernel's attention is from softmax attention, with intervals, and what it takes to come closer."""

from mercer.approximation.estimate import approximation_error
from mercer.approximation.inputs import gaussian_inputs
from mercer.approximation.intervals import Estimate
from mercer.approximation.needed import NeededFeatures, NeededOrder
from mercer.approximation.result import ApproximationError
from mercer.approximation.spread import Spread
from mercer.approximation.state_cost import StateCost
from mercer.approximation.truncation import truncation_error, truncation_order

__all__ = [
    "ApproximationError",
    "Estimate",
    "NeededFeatures",
    "NeededOrder",
    "Spread",
    "StateCost",
    "approximation_error",
    "gaussian_inputs",
    "truncation_error",
    "truncation_order",
]
