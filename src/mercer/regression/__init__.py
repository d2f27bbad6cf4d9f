"""Nadaraya-Watson kernel regression: attention with `Sum`, read as statistics.

    m(x) = sum_i w_i K(x, x_i) y_i / sum_i w_i K(x, x_i)

The queries are the points to predict at, the keys the training points, the values their targets.
"""

from mercer.regression.estimator import KernelRegression
from mercer.regression.function import kernel_regression

__all__ = ["KernelRegression", "kernel_regression"]
