"""The numbers that plans are made with where nothing was measured; written by scripts/machine_default.py."""

from mercer.core.machine import Cost, Machine

DEFAULT = Machine(
    name="2 cores of an AMD EPYC (Zen 4)",
    device="cpu",
    threads=2,
    bandwidth=2e10,
    entry=5.74e-10,
    costs={
        "float32": {
            "dense": Cost(0.000213, 1.92e-09, 1.69e11, 1.98),
            "tiles": Cost(0.000286, 5.22e-10, 1.42e11, 3.37),
            "exp_tiles": Cost(0.000357, 1.2e-09, 1.52e11, 2.67),
            "sdpa": Cost(0.000114, 4.72e-10, 1.34e11, 3.68),
            "fused_causal": Cost(0.000158, 2.04e-10, 1.58e11, 2.9),
            "scan": Cost(0.000233, 7.55e-06, 8.99e10, 3.59),
            "fused_scan": Cost(0.00021, 4.5e-09, 1.78e11, 4),
            "step": Cost(0.000233, 6.23e-06, 1.89e11, 2.51),
            "fused_step": Cost(0.000132, 5.76e-07, 1.89e11, 1),
        },
        "float64": {
            "dense": Cost(0.0002, 3.23e-09, 8.83e10, 2.27),
            "tiles": Cost(0.000275, 1.78e-09, 6.25e10, 3.79),
            "exp_tiles": Cost(0.000344, 2.87e-09, 6.42e10, 2.72),
            "sdpa": Cost(0.000103, 2.55e-09, 6.6e10, 3.94),
            "fused_causal": Cost(0.000158, 2.04e-10, 1.58e11, 2.9),
            "scan": Cost(6.41e-05, 2.08e-05, 4.16e10, 3.34),
            "fused_scan": Cost(0.00021, 4.5e-09, 1.78e11, 4),
            "step": Cost(0.000224, 6.84e-06, 1.37e10, 2.39),
            "fused_step": Cost(0.000132, 5.76e-07, 1.89e11, 1),
        },
        "half": {
            "dense": Cost(0.000214, 2.17e-09, 1.45e11, 2.07),
            "tiles": Cost(0.000291, 7.76e-10, 1.35e11, 3.04),
            "exp_tiles": Cost(0.000357, 1.15e-09, 1.31e11, 2.8),
            "sdpa": Cost(0.000125, 4.41e-10, 1.23e11, 3.86),
            "fused_causal": Cost(0.000163, 2.17e-10, 1.52e11, 3.16),
            "scan": Cost(0.000213, 1.07e-05, 8.76e10, 3.64),
            "fused_scan": Cost(0.000213, 6.13e-09, 1.73e11, 4),
            "step": Cost(0.000314, 6.39e-06, 1.77e11, 1.76),
            "fused_step": Cost(0.000143, 4.2e-07, 1.77e11, 1),
        },
    },
)
