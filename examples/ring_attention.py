"""Attention over several processes, checked against one:

    torchrun --nproc-per-node 4 examples/ring_attention.py
    torchrun --nproc-per-node 4 examples/ring_attention.py --attention taylor2-sum --length 10007

Every process holds a part of the sequence. Softmax goes by a ring of keys and values; a finite kernel, by one state
that runs along the sequence. With GPUs, each process takes one of them and the group is nccl's; otherwise it is gloo's.
"""

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist

import mercer
from mercer import Causal
from mercer.distributed import Sharding, attention, gather, plan, traffic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", default="exp-sum", help="a kernel and a normaliser, such as taylor2-l2")
    parser.add_argument("--length", type=int, default=2**12 + 1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=32)
    options = parser.parse_args()

    gpus = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if gpus else "cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()

    # A real program makes only its own part; here every process makes all of it, to compare.
    kernel, normalizer = mercer.parse_attention(options.attention)
    generator = torch.Generator().manual_seed(0)
    shape = (3, 1, options.heads, options.length, options.dim)
    query, key, value = torch.randn(shape, generator=generator).to(device).requires_grad_()

    sharding = Sharding(options.length, size)
    own = [sharding.shard(x.detach(), rank).requires_grad_() for x in (query, key, value)]
    parts = {"kernel": kernel, "normalizer": normalizer, "structure": Causal()}
    if rank == 0:
        print(plan(*own, rank=rank, sharding=sharding, **parts), flush=True)
    with traffic() as sent:
        out = attention(*own, sharding=sharding, timeout=60.0, **parts)
        out.exp().sum().backward()

    whole = mercer.attention(query, key, value, **parts)
    grads = torch.autograd.grad(whole.exp().sum(), (query, key, value))
    pairs = [("output", out, whole), *zip(("d query", "d key", "d value"), (x.grad for x in own), grads, strict=True)]
    for name, part, wanted in pairs:
        assert part is not None
        error = (gather(part, sharding) - wanted).abs().max() / wanted.abs().max()
        if rank == 0:
            print(f"{name:8} differs from one process by {error.item():.1e} of its largest entry", flush=True)
    if rank == 0:
        print("process 0 sent " + ", ".join(f"{n:,} bytes of {kind}" for kind, n in sent.sent.items()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
