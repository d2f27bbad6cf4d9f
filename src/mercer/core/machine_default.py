"""The numbers that plans are made with where nothing was measured; written by scripts/machine_default.py."""

from mercer.core.machine import Cost, Machine

DEFAULT = Machine(
    name="2 cores of an AMD EPYC (Zen 4)",
    device="cpu",
    threads=2,
    bandwidth=2e10,
    entry=5.85e-10,
    costs={
        "float32": {
            "dense": Cost(0.000197, 1.97e-09, 1.51e11, 1.93),
            "tiles": Cost(0.00027, 6.15e-10, 1.66e11, 3.33),
            "exp_tiles": Cost(0.000334, 1.09e-09, 1.66e11, 2.81),
            "sdpa": Cost(9.58e-05, 4e-10, 1.24e11, 3.78),
            "fused_causal": Cost(0.000131, 2.12e-10, 1.59e11, 3.08),
            "cache": Cost(5.55e-05, 0, 1.83e11, 1),
            "scan": Cost(0.000175, 1.07e-05, 9.67e10, 3.87),
            "fused_scan": Cost(0.000183, 4.56e-09, 1.81e11, 4),
            "step": Cost(0.00022, 6.4e-06, 1.83e11, 2.49),
            "fused_step": Cost(0.000112, 3.98e-07, 1.83e11, 1),
        },
        "float64": {
            "dense": Cost(0.000184, 2.68e-09, 6.03e10, 2.32),
            "tiles": Cost(0.000255, 2.06e-09, 6.7e10, 3.33),
            "exp_tiles": Cost(0.000324, 2.58e-09, 6.32e10, 2.95),
            "sdpa": Cost(8.94e-05, 2.33e-09, 6.4e10, 4),
            "fused_causal": Cost(0.000131, 2.12e-10, 1.59e11, 3.08),
            "cache": Cost(6.65e-05, 0, 9.04e10, 1),
            "scan": Cost(5.26e-05, 1.95e-05, 4.33e10, 3.17),
            "fused_scan": Cost(0.000183, 4.56e-09, 1.81e11, 4),
            "step": Cost(0.000213, 6.82e-06, 1.16e12, 2.49),
            "fused_step": Cost(0.000112, 3.98e-07, 1.83e11, 1),
        },
        "half": {
            "dense": Cost(0.000202, 1.77e-09, 1.15e11, 2.12),
            "tiles": Cost(0.000264, 6.65e-10, 1.38e11, 3.39),
            "exp_tiles": Cost(0.000342, 1.29e-09, 1.48e11, 2.64),
            "sdpa": Cost(0.000101, 4.59e-10, 1.25e11, 3.8),
            "fused_causal": Cost(0.000139, 2.46e-10, 1.64e11, 3.01),
            "cache": Cost(7.12e-05, 0, 1.83e11, 1),
            "scan": Cost(0.000167, 1.1e-05, 8.98e10, 3.16),
            "fused_scan": Cost(0.000179, 7.19e-09, 1.83e11, 4),
            "step": Cost(0.000228, 6.11e-06, 1.83e11, 2.49),
            "fused_step": Cost(0.000115, 4.52e-07, 1.83e11, 1),
        },
    },
)
