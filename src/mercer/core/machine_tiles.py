"""What is different of the default numbers where bfloat16 is multiplied in the tile registers of AMX.

Measured on one thread of an Intel Xeon (Emerald Rapids) beside other work, the least times of causal attention over
2,048 to 8,192 tokens with heads of 64 and 128, and halved for the two threads of the default machine.
"""

from dataclasses import replace

from mercer.core.machine import Cost, Machine
from mercer.core.machine_default import DEFAULT

SDPA = Cost(5.7e-05, 4e-10, 2e12, 5.4)
FUSED, FUSED_IN_PAIRS = Cost(0.00028, 5e-11, 1.07e12, 3.9), Cost(0.00025, 1.1e-10, 1.9e11, 3.5)


def _with(**costs: Cost) -> Machine:
    half = DEFAULT.costs["half"] | costs
    name = f"{DEFAULT.name}, with bfloat16 in tiles as on an Intel Xeon"
    return replace(DEFAULT, name=name, costs=DEFAULT.costs | {"half": half})


DEFAULTS: dict[tuple[bool, bool], Machine] = {
    (False, False): DEFAULT,
    (True, False): _with(sdpa=SDPA, fused_softmax=FUSED_IN_PAIRS),
    (False, True): _with(fused_softmax=FUSED),
    (True, True): _with(sdpa=SDPA, fused_softmax=FUSED),
}
"""The default numbers by whether torch, and whether the fused attention here, multiplies bfloat16 in tiles."""
