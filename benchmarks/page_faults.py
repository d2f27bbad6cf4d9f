"""Page faults and time of a small training step under several settings of glibc's malloc.

The step: 16 sequences of 256 bytes, width 128, 4 layers, 8 heads of 16, attention by dense scores exp(qk)v with an L2
norm, AdamW; plain torch, so that the allocator is all that differs. Each setting has a process of its own. On a busy
machine believe the processor time, not the clock.
"""

import argparse
import ctypes
import resource
import subprocess
import sys
import time

# Numbers of <malloc.h> for mallopt.
SETTINGS: dict[str, list[tuple[int, int]]] = {
    "default": [],
    "threshold 32 MiB": [(-3, 32 << 20)],
    "threshold 1 GiB": [(-3, 1 << 30)],
    "threshold 1 GiB, trim 2 GiB": [(-3, 1 << 30), (-1, 2**31 - 1)],
    "threshold 1 GiB, trim 2 GiB, pad 16 MiB": [(-3, 1 << 30), (-1, 2**31 - 1), (-2, 16 << 20)],
    "threshold 1 GiB, trim 2 GiB, pad 64 MiB": [(-3, 1 << 30), (-1, 2**31 - 1), (-2, 64 << 20)],
    "no mappings": [(-4, 0)],
    "no mappings, trim 2 GiB, pad 16 MiB": [(-4, 0), (-1, 2**31 - 1), (-2, 16 << 20)],
}
BATCH, LENGTH, WIDTH, LAYERS, HEADS = 16, 256, 128, 4, 8


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="page_faults", description=__doc__)
    parser.add_argument("setting", nargs="?", choices=SETTINGS, help="one setting, in this process; default: all")
    options = parser.parse_args(arguments)
    if options.setting:
        measure(options.setting)
        return
    print(f"{'setting':42}{'faults a step':>14}{'ms a step':>11}{'CPU ms':>9}{'of it system':>14}{'peak MB':>9}")
    for name in SETTINGS:
        subprocess.run([sys.executable, "-m", "benchmarks.page_faults", name], check=True)


def measure(name: str, steps: int = 5) -> None:
    """Apply one setting to this process, which has not imported torch yet, and print a line of the table."""
    libc = ctypes.CDLL(None)
    for number, value in SETTINGS[name]:
        if not libc.mallopt(number, value):
            print(f"{name:42}refused by this glibc")
            return
    step = make_step()
    for _ in range(2):
        step()
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(steps):
        step()
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    faults, system = after.ru_minflt - before.ru_minflt, after.ru_stime - before.ru_stime
    processor = system + after.ru_utime - before.ru_utime
    print(
        f"{name:42}{faults / steps:14,.0f}{1e3 * seconds / steps:11.0f}{1e3 * processor / steps:9.0f}"
        f"{1e3 * system / steps:14.0f}{after.ru_maxrss / 1024:9,.0f}"
    )


def make_step():  # noqa: ANN201 - torch is imported inside
    import torch
    from torch import nn
    from torch.nn import functional

    torch.manual_seed(0)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
            self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 6 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.mix(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            scores = (q @ k.mT) * q.shape[-1] ** -0.5
            rows = functional.normalize(scores.masked_fill(future, -torch.inf).exp() @ v, dim=-1)
            x = x + self.out(rows.transpose(1, 2).flatten(-2))
            value, gate = self.up(self.norms[1](x)).chunk(2, -1)
            return x + self.down(functional.silu(gate) * value)

    model = nn.Sequential(nn.Embedding(256, WIDTH), *[Block() for _ in range(LAYERS)], nn.Linear(WIDTH, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        tokens = torch.randint(256, (BATCH, LENGTH + 1))
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main(sys.argv[1:])
