"""The numbers that plans are made with where nothing was measured; written by scripts/machine_default.py."""

from mercer.core.machine import Cost, Machine

DEFAULT = Machine(
    name="2 cores of an AMD EPYC (Zen 4)",
    device="cpu",
    threads=2,
    bandwidth=2e10,
    entry=5.97e-10,
    costs={
        "float32": {
            "dense": Cost(0.000187, 1.8e-09, 1.6e11, 2),
            "tiles": Cost(0.000257, 7.76e-10, 1.46e11, 3.32),
            "exp_tiles": Cost(0.000332, 1.52e-09, 2.36e11, 2.26),
            "sdpa": Cost(9.17e-05, 4.09e-10, 1.29e11, 3.75),
            "fused_softmax": Cost(0.00025, 1.1e-10, 2e11, 3.6),
            "fused_decode": Cost(6e-05, 5e-11, 1.5e11, 1),
            "cache": Cost(9.05e-05, 0, 2e11, 1),
            "scan": Cost(0.000213, 6.21e-06, 1.09e11, 3.91),
            "fused_scan": Cost(0.000175, 3.84e-09, 1.88e11, 3.51),
            "step": Cost(0.000211, 1.45e-06, 2e11, 2.64),
            "fused_step": Cost(0.000118, 4.36e-07, 2e11, 1),
        },
        "float64": {
            "dense": Cost(0.000179, 2.95e-09, 8.24e10, 2.18),
            "tiles": Cost(0.000249, 1.4e-09, 7e10, 3.67),
            "exp_tiles": Cost(0.000313, 2.33e-09, 8.5e10, 3.12),
            "sdpa": Cost(8.68e-05, 2.29e-09, 6.65e10, 4),
            "fused_softmax": Cost(0.00025, 1.1e-10, 2e11, 3.6),
            "fused_decode": Cost(6e-05, 5e-11, 1.5e11, 1),
            "cache": Cost(8.31e-05, 0, 9.47e10, 1),
            "scan": Cost(0.000155, 1.04e-05, 4.36e10, 3.48),
            "fused_scan": Cost(0.000175, 3.84e-09, 1.88e11, 3.51),
            "step": Cost(0.000199, 2.65e-06, 9.47e10, 2.73),
            "fused_step": Cost(0.000118, 4.36e-07, 2e11, 1),
        },
        "half": {
            "dense": Cost(0.000191, 1.8e-09, 1.24e11, 2.14),
            "tiles": Cost(0.000259, 5.22e-10, 1.6e11, 3.38),
            "exp_tiles": Cost(0.000328, 9.96e-10, 1.64e11, 2.84),
            "sdpa": Cost(9.91e-05, 4.13e-10, 1.27e11, 3.89),
            "fused_softmax": Cost(0.00025, 1.1e-10, 3.9e11, 3.5),
            "fused_decode": Cost(6e-05, 1.5e-10, 1.5e11, 1),
            "cache": Cost(0.000101, 0, 1.9e11, 1),
            "scan": Cost(9.89e-05, 1.62e-05, 1.29e11, 3.47),
            "fused_scan": Cost(0.000178, 6.12e-09, 1.92e11, 4),
            "step": Cost(0.000219, 1.35e-06, 1.9e11, 2.68),
            "fused_step": Cost(0.000114, 3.52e-07, 1.9e11, 1),
        },
    },
)
