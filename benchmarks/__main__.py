"""Run measurements: `python -m benchmarks` runs all, `python -m benchmarks NAME [ARGUMENT...]` one.

A fast wrong answer is worth nothing, so the contract tests run first, some four minutes on two cores, and while one of
them fails no number is shown. A measurement with ``OWN_CONTRACTS`` runs them itself, on another device.
`--list` names the measurements and `NAME --help` says what one takes, both without running anything.
`python -m benchmarks.NAME [ARGUMENT...]` skips the contract tests.
"""

import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONTRACTS = ROOT / "tests" / "contracts"
HELP = {"-h", "--help"}


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]) if module.name[0] != "_")


def contracts_hold() -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "auto", "--maxprocesses", "8", str(CONTRACTS)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode == 0


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] in HELP:
        print(f"{(__doc__ or '').strip()}\n\nMeasurements: {', '.join(names())}.")
        return 0
    if arguments == ["--list"]:
        for name in names():
            summary = (importlib.import_module(f"benchmarks.{name}").__doc__ or "").strip().splitlines()[0]
            print(f"{name:22}{summary}")
        return 0
    if arguments and arguments[0] not in names():
        print(f"there is no benchmark {arguments[0]!r}; there are {', '.join(names())}", file=sys.stderr)
        return 2
    if HELP & set(arguments):  # the measurement's own parser answers and exits
        importlib.import_module(f"benchmarks.{arguments[0]}").main(["--help"])
        return 0
    chosen = {name: importlib.import_module(f"benchmarks.{name}") for name in arguments[:1] or names()}
    alone = all(getattr(module, "OWN_CONTRACTS", False) for module in chosen.values())
    if not alone and not contracts_hold():
        print("The contract tests fail, so no measurement is shown.", file=sys.stderr)
        return 1
    for name, module in chosen.items():
        print(f"\n== {name}", flush=True)
        module.main(arguments[1:])
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
