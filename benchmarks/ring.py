"""Attention over several processes: what is sent, how long it takes, and the longest context in a fixed memory.

Ring softmax against one state of a finite kernel, forward and backward, causal, in float32. Starts its processes by
torchrun; `torchrun --nproc-per-node 4 -m benchmarks.ring` does the same. Bytes are counted as they are sent, beside
what the plan said. Memory is the peak of a process's resident pages above what it held before its inputs were made;
Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

CASES = {
    "softmax, ring": ("exp-sum", "ring", "zigzag"),
    "elu, ring": ("elu-sum", "ring", "zigzag"),
    "elu, state": ("elu-sum", "state", "contiguous"),
    "taylor2 (D 16), state": ("taylor2-sum", "state", "contiguous"),
}


class Bench:
    """The measurements of one process."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        from mercer.distributed import Sharding

        self.options, self.torch, self.dist, self.sharding = options, torch, dist, Sharding
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.record: dict[str, Any] = {"processes": self.size, "threads": torch.get_num_threads(), "rows": []}

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def most(self, value: float) -> float:
        """The largest of all processes."""
        found = self.torch.tensor([float(value)], dtype=self.torch.float64)
        self.dist.all_reduce(found, op=self.dist.ReduceOp.MAX)
        return found.item()

    def total(self, value: float) -> float:
        found = self.torch.tensor([float(value)], dtype=self.torch.float64)
        self.dist.all_reduce(found)
        return found.item()

    def inputs(self, label: str, length: int, processes: int) -> tuple[list[Any], dict[str, Any]]:
        """This process's tensors, with gradients, and the arguments of a call."""
        from mercer import Causal, parse_attention

        name, exchange, order = CASES[label]
        kernel, normalizer = parse_attention(name)
        dim = 16 if "D 16" in label else self.options.dim
        sharding = self.sharding(length, processes, order)
        size = sharding.size(self.rank if processes > 1 else 0)
        tensors = [self.torch.randn(1, self.options.heads, size, dim, requires_grad=True) for _ in range(3)]
        parts: dict[str, Any] = {"kernel": kernel, "normalizer": normalizer, "structure": Causal()}
        return tensors, parts | {"sharding": sharding, "exchange": exchange, "timeout": 600.0}

    def bytes_and_time(self, label: str, length: int) -> None:
        from mercer.distributed import attention, plan, traffic

        tensors, asked = self.inputs(label, length, self.size)
        planned = plan(*tensors, rank=self.rank, **{k: v for k, v in asked.items() if k != "timeout"})
        row: dict[str, Any] = {
            "case": label,
            "length": length,
            "exchange": planned.exchange,
            "backend": planned.backend,
        }
        for overlap in (True, False) if planned.exchange == "ring" else (True,):
            attention(*tensors, **asked).sum().backward()  # compiles, and brings pages in
            times: dict[str, list[float]] = {"forward": [], "backward": [], "waited": []}
            for _ in range(self.options.rounds):
                self.dist.barrier()
                with traffic() as forward:
                    began = perf_counter()
                    out = attention(*tensors, overlap=overlap, **asked)
                    times["forward"].append(self.most(perf_counter() - began))
                grad = self.torch.ones_like(out)
                self.dist.barrier()
                with traffic() as backward:
                    began = perf_counter()
                    out.backward(grad)
                    times["backward"].append(self.most(perf_counter() - began))
                times["waited"].append(self.most(forward.waited + backward.waited))
            suffix = "" if overlap else " without overlap"
            row |= {f"{name}{suffix}": sorted(found)[len(found) // 2] for name, found in times.items()}
            if overlap:
                kinds = ("keys", "gradients", "state", "state gradients")
                counted = [sum(t.sent.get(kind, 0) for kind in kinds) for t in (forward, backward)]
                said = planned.forward_bytes[self.rank], planned.backward_bytes[self.rank]
                row["as planned"] = self.most(float(tuple(counted) != said)) == 0
                row["bytes a token"] = [self.total(n) / length for n in counted]
                row["overhead bytes"] = self.total(sum(forward.sent.values()) - counted[0])
                row["pairs"] = [min(planned.pairs), max(planned.pairs)]
        self.record["rows"].append(row)
        sent = row["bytes a token"]
        line = f"{label:24}{length:>9,}{sent[0]:>13,.1f}{sent[1]:>13,.1f}{'yes' if row['as planned'] else 'NO':>9}"
        line += f"{1e3 * row['forward']:>10.1f}{1e3 * row['backward']:>10.1f}{1e3 * row['waited']:>9.1f}"
        if "forward without overlap" in row:
            line += f"{1e3 * (row['forward without overlap'] + row['backward without overlap']):>12.1f}"
            line += f"{1e3 * row['waited without overlap']:>9.1f}"
        self.say(line)

    def peak(self, label: str, length: int, processes: int) -> tuple[float, float]:
        """Peak bytes above the start of inputs, output and one pass of the process that needs most, and seconds."""
        from mercer.distributed import attention

        def high_water() -> int:
            lines = Path("/proc/self/status").read_text().splitlines()
            return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

        def one(size: int) -> Callable[[], None]:
            def run() -> None:
                tensors, asked = self.inputs(label, size, processes)
                group = None if processes > 1 else self.alone
                attention(*tensors, group=group, **asked).backward(self.torch.ones_like(tensors[2]))

            return run

        active = processes > 1 or self.rank == 0
        used = took = 0.0
        if active:
            one(min(length, 2048))()
            Path("/proc/self/clear_refs").write_text("5")
            before, began = high_water(), perf_counter()
            one(length)()
            used, took = high_water() - before, perf_counter() - began
        self.dist.barrier()
        return self.most(used), self.most(took)

    def longest(self, label: str) -> None:
        """The longest context whose peak stays below the limit, tried in steps of a half octave."""
        limit = self.options.limit * 2**20
        found: dict[int, dict[int, float]] = {}
        for processes in (1, self.size):
            found[processes], length = {}, self.options.shortest
            while True:
                used, took = self.peak(label, length, processes)
                found[processes][length] = used
                if used > limit or took > self.options.patience:
                    break
                length = int(length * 2**0.5 / 64 + 0.5) * 64
        held = {p: max((n for n, used in tried.items() if used <= limit), default=0) for p, tried in found.items()}
        last = {p: max(tried) for p, tried in found.items()}
        self.record.setdefault("longest", []).append({"case": label, "limit": limit, "held": held, "tried": found})
        told = [f"{held[p]:>12,}{'' if held[p] < last[p] else '+':1}" for p in (1, self.size)]
        per_token = found[self.size][last[self.size]] / last[self.size]
        self.say(f"{label:24}{told[0]}{told[1]}{held[self.size] / max(held[1], 1):>9.1f}{per_token:>22,.0f}")

    def run(self) -> None:
        options = self.options
        self.alone = self.dist.new_group([0])
        self.say(
            f"{self.size} processes of {self.record['threads']} threads, {options.heads} heads of {options.dim}, "
            f"float32, causal; medians of {options.rounds}.\nBytes a token: those that all processes send, by the "
            "tokens of the whole sequence. Times in ms, of the slowest process.\n"
        )
        self.say(
            f"{'':24}{'tokens':>9}{'forward B':>13}{'backward B':>13}{'planned':>9}{'forward':>10}{'backward':>10}"
            f"{'waited':>9}{'no overlap':>12}{'waited':>9}"
        )
        for label in CASES:
            for length in options.lengths:
                self.bytes_and_time(label, length)
        self.say(
            f"\nLongest context, forward and backward, with a peak of {options.limit} MiB a process above what it held "
            f"before its inputs;\n+: not the memory but {options.patience:g} s a pass ended the search.\n\n{'':24}"
            f"{'1 process':>13}{f'{self.size} processes':>13}{'ratio':>9}{'bytes a token there':>22}"
        )
        for label in ("softmax, ring", "elu, state"):
            self.longest(label)
        if options.json and self.rank == 0:
            options.json.write_text(json.dumps(self.record, indent=1))
        self.dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="ring", description=__doc__)
    parser.add_argument("--processes", type=int, default=4, help="without torchrun: how many to start")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 16384])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=64, help="MiB a process for the longest context")
    parser.add_argument("--shortest", type=int, default=2048, help="where the search for the longest context begins")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds a pass that end the search")
    parser.add_argument(
        "--quick", action="store_true", help="short sequences and one round, to see that all of it runs"
    )
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args(arguments)
    if options.quick:
        options.lengths, options.rounds, options.limit, options.shortest = [1024], 1, 12, 512
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(options.processes), "-m", "benchmarks.ring", *arguments]
        usual = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        answer = subprocess.run(command, check=False, env=usual | os.environ)
        if answer.returncode:
            raise SystemExit(answer.returncode)
        return
    Bench(options).run()


if __name__ == "__main__":
    main(sys.argv[1:])
