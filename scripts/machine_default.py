"""Measure this machine and write src/mercer/core/machine_default.py, the numbers that plans are made with by default.

python scripts/machine_default.py NAME    NAME is how the machine is called there; run it on an idle one
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "src" / "mercer" / "core" / "machine_default.py"
HEAD = '''"""The numbers that plans are made with where nothing was measured; written by scripts/machine_default.py."""

from mercer.core.machine import Cost, Machine

DEFAULT = Machine(
'''


def render(machine: Any) -> str:
    """The module's text, numbers to three digits."""
    from dataclasses import astuple

    lines = [
        f'    name="{machine.name}",',
        f'    device="{machine.device}",',
        f"    threads={machine.threads},",
        f"    bandwidth={machine.bandwidth:.3g},",
        f"    entry={machine.entry:.3g},",
        "    costs={",
    ]
    for dtype, ways in machine.costs.items():
        lines.append(f'        "{dtype}": {{')
        lines += [
            f'            "{way}": Cost({", ".join(f"{x:.3g}" for x in astuple(cost))}),' for way, cost in ways.items()
        ]
        lines.append("        },")
    return HEAD + "\n".join(lines) + "\n    },\n)\n"


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python scripts/machine_default.py NAME", file=sys.stderr)
        return 2
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    from mercer.runtime.allocator import tune

    tune()
    from mercer.advice import measure_machine

    text = render(replace(measure_machine(), name=sys.argv[1]))
    PAGE.write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
