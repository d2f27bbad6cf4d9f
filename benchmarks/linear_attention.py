"""Linear, random-feature and Taylor attention beside other libraries, and beside what the machine can do at most.

Everyone runs in one process, in turns, with the same threads, allocator and OMP_WAIT_POLICY. Answers are checked
against the formula before anything is timed. A contestant whose one call would take longer than --longest, or keep more
memory than the machine can give, is left out, and the output says so. What is printed and written is explained in
docs/benchmarks.md.

    python -m benchmarks linear_attention [--quick] [--task NAME] [--length N] [--dtype NAME] [--peer NAME]
        [--direction forward|backward] [--rounds N] [--longest S] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._process import in_child, prepare

if TYPE_CHECKING:
    from benchmarks._record import Case

TASKS = ("linear", "exp-features", "random-features", "taylor2", "taylor3", "taylor4", "softmax")
DTYPES = ("float32", "bfloat16")
DIRECTIONS = {"forward": False, "backward": True}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="linear_attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, action="append", help="default: all")
    parser.add_argument("--group", choices=("long", "short"), action="append", help="shapes; default: both")
    parser.add_argument("--length", type=int, action="append", help="of the shapes' lengths; default: all")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both")
    parser.add_argument(
        "--direction", choices=DIRECTIONS, action="append", help="default: both; backward has forward in it"
    )
    parser.add_argument("--peer", action="append", help="a library, or 'none'; default: all")
    parser.add_argument("--rounds", type=int, default=9, help="timed calls each (default 9)")
    parser.add_argument("--budget", type=float, default=6.0, help="seconds a case after which a slow one sits out (6)")
    parser.add_argument("--longest", type=float, default=20.0, help="leave out whose one call takes longer (20 s)")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument(
        "--quick", action="store_true", help="shortest shapes, 3 rounds, calls below 0.5 s: a look, no result"
    )
    parser.add_argument("--json", type=Path, help="also write everything here, after every case")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    if not in_child("benchmarks.linear_attention", arguments):
        return
    prepare(options.threads)

    import torch

    from benchmarks._contest import Rules, contest
    from benchmarks._machine import measure
    from benchmarks._peers import PEERS, peers
    from benchmarks._record import Rates, Record, packages
    from benchmarks._tasks import SHAPES, ours
    from benchmarks._tasks import TASKS as ALL
    from mercer.runtime.environment import environment, memory_bytes

    chosen = tuple(p for p in options.peer or PEERS if p != "none")
    if unknown := [p for p in chosen if p not in PEERS]:
        raise SystemExit(f"there is no peer {unknown[0]!r}; there are {', '.join(PEERS)} and none")
    device = torch.device("cpu")
    dtypes = tuple(options.dtype or DTYPES)
    if options.quick:
        options.rounds, options.budget, options.longest = 3, 0.5, min(options.longest, 0.5)
    rounds = options.rounds
    rules = Rules(rounds, options.budget, options.longest, 0.4 * (memory_bytes() or 16 << 30))
    about = environment()
    print(f"{about['processor']}, {about['threads']} threads, torch {about['packages']['torch']}, ", end="")
    print(f"allocator tuned: {about['allocator']['tuned']}, {about['variables']}", flush=True)
    limits = measure(dtypes, device, quick=options.quick)
    cases: list[Case] = []
    missing: dict[str, str] = {}

    def record() -> Record:
        limited = [case.limited(limits) for case in cases]
        rates = Rates.of(limits)
        return Record(
            environment=about, packages=packages(), missing=missing, rounds=rounds, limits=rates, cases=limited
        )

    def save() -> None:
        if options.json is not None:
            options.json.write_text(record().model_dump_json(indent=1) + "\n")

    for task in options.task or TASKS:
        for group in ALL[task].shapes:
            if group not in (options.group or ALL[task].shapes):
                continue
            shapes = [s for s in SHAPES[group] if not options.length or s.length in options.length]
            for shape in shapes[: 1 if options.quick else None]:
                theirs, absent = peers(task, shape.dim, chosen)
                missing |= absent
                for dtype in dtypes:
                    for direction in options.direction or DIRECTIONS:
                        print(f"  measuring {task}, {shape}, {dtype}, {direction}", flush=True)
                        everyone = [*ours(task, shape, dtype), *theirs]
                        backward = DIRECTIONS[direction]
                        cases.append(contest(task, shape, dtype, backward, everyone, rules, device, print))
                        save()
    if not cases:
        raise SystemExit("no case is left: these tasks do not run on these lengths or shapes")
    limits = limits.merge(measure(dtypes, device, quick=options.quick))
    save()
    show(record())


def show(record: object) -> None:
    """The whole table, with the limits."""
    from benchmarks._table import lines

    print("\n".join(lines(record)))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1:])
