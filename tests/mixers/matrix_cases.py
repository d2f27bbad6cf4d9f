"""Inputs of the matrix recurrence, and its formula in numpy and in float64 torch, head by head and token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

DECAYS = {
    "none": None,
    "head": lambda b, h, n, k: (h,),
    "head-channel": lambda b, h, n, k: (h, k),
    "token": lambda b, h, n, k: (b, h, n),
    "channel": lambda b, h, n, k: (b, h, n, k),
}


@dataclass
class Case:
    tensors: dict[str, Tensor]
    """query, key, value, and where there are any log_decay, a and b or delta, bonus, state."""
    lengths: Tensor | None
    scale: float

    def arguments(self) -> dict:
        given = dict(self.tensors)
        if "a" in given:
            given["remove"] = (given.pop("a"), given.pop("b"))
        return given | {"lengths": self.lengths, "scale": self.scale}

    def to(self, dtype: torch.dtype, *names: str) -> Case:
        """With some tensors in another dtype; default all."""
        changed = {n: x.to(dtype) if not names or n in names else x for n, x in self.tensors.items()}
        return replace(self, tensors=changed)

    def leaves(self) -> Case:
        return replace(self, tensors={n: x.detach().clone().requires_grad_() for n, x in self.tensors.items()})

    def spread(self, name: str) -> Tensor:
        """log_decay as [B, H, L, K] in float64."""
        batch, heads, length, dim = self.tensors["key"].shape
        x = self.tensors[name].double()
        if x.ndim == 3:
            x = x[..., None]
        elif x.ndim < 3:
            x = x.reshape(1, heads, 1, -1)
        return x.expand(batch, heads, length, dim)


def draw(
    generator: torch.Generator,
    batch: int = 2,
    heads: int = 2,
    length: int = 7,
    dim: int = 4,
    width: int = 3,
    decay: str = "channel",
    remove: bool = False,
    delta: bool = False,
    bonus: bool = False,
    state: bool = True,
    lengths: list[int] | None = None,
    extreme: bool = False,
    scale: float = 0.7,
) -> Case:
    """Float64 inputs. Removal shrinks: a = -beta b with b of length 1 and beta in (0, 1), so that sums stay of size 1.

    extreme: log-decays are 0, near 0, about -1 and -50, each as often.
    """

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    tensors = {name: normal(batch, heads, length, dim) for name in ("query", "key")}
    tensors["value"] = normal(batch, heads, length, width)
    shape = DECAYS[decay]
    if shape is not None:
        size = shape(batch, heads, length, dim)
        log = -normal(*size).exp() / 4
        if extreme:
            kinds = torch.tensor([0.0, 1e-3, 4.0, 200.0], dtype=torch.float64)
            log = log * kinds[torch.randint(4, size, generator=generator)]
            log = torch.where(log < -8, torch.tensor(-50.0, dtype=torch.float64), log)
        tensors["log_decay"] = log
    if remove:
        b = torch.nn.functional.normalize(normal(batch, heads, length, dim), dim=-1)
        beta = torch.rand(batch, heads, length, 1, generator=generator, dtype=torch.float64)
        tensors |= {"a": -beta * b + 0.05 * normal(batch, heads, length, dim), "b": b}
        if shape is not None:  # a decay of b's direction beside the removal could overshoot
            tensors["a"] = tensors["a"] / 2
    if delta:
        tensors["key"] = torch.nn.functional.normalize(tensors["key"], dim=-1)
        tensors["delta"] = torch.rand(batch, heads, length, generator=generator, dtype=torch.float64)
    if bonus:
        tensors["bonus"] = normal(heads, dim)
    if state:
        tensors["state"] = normal(batch, heads, dim, width)
    counts = None if lengths is None else torch.tensor(lengths)
    return Case(tensors, counts, scale)


def numpy_loop(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The formula, with every transition written as a matrix."""
    x = {n: t.detach().double().numpy() for n, t in case.tensors.items()}
    batch, heads, length, dim = x["key"].shape
    log = case.spread("log_decay").detach().numpy() if "log_decay" in x else np.zeros(x["key"].shape)
    out = np.zeros((batch, heads, length, x["value"].shape[-1]))
    final = x["state"].copy() if "state" in x else np.zeros((batch, heads, dim, x["value"].shape[-1]))
    for i in range(batch):
        for h in range(heads):
            s = final[i, h]
            for t in range(length if case.lengths is None else int(case.lengths[i])):
                step = np.diag(np.exp(log[i, h, t]))
                if "a" in x:
                    step = step + np.outer(x["a"][i, h, t], x["b"][i, h, t])
                new = np.outer(x["key"][i, h, t], x["value"][i, h, t])
                if "delta" in x:
                    k, rate = x["key"][i, h, t], x["delta"][i, h, t]
                    step, new = (np.eye(dim) - rate * np.outer(k, k)) @ step, rate * new
                if "bonus" in x:
                    out[i, h, t] = case.scale * x["query"][i, h, t] @ (s + np.diag(x["bonus"][h]) @ new)
                s = step @ s + new
                if "bonus" not in x:
                    out[i, h, t] = case.scale * x["query"][i, h, t] @ s
            final[i, h] = s
    return out, final


def formula(case: Case) -> tuple[Tensor, Tensor]:
    """The same in float64 torch, for gradients by autograd."""
    x = {n: t.double() for n, t in case.tensors.items()}
    batch, heads, length, dim = x["key"].shape
    log = case.spread("log_decay") if "log_decay" in x else torch.zeros(x["key"].shape, dtype=torch.float64)
    steps = torch.diag_embed(log.exp())
    if "a" in x:
        steps = steps + torch.einsum("bhlk,bhlm->bhlkm", x["a"], x["b"])
    pushed = x["key"]
    if "delta" in x:
        pushed = x["delta"].unsqueeze(-1) * x["key"]
        steps = (torch.eye(dim, dtype=torch.float64) - torch.einsum("bhlk,bhlm->bhlkm", pushed, x["key"])) @ steps
    outs, finals = [], []
    for i in range(batch):
        s = x["state"][i] if "state" in x else torch.zeros(heads, dim, x["value"].shape[-1], dtype=torch.float64)
        count = length if case.lengths is None else int(case.lengths[i])
        rows = []
        for t in range(count):
            new = torch.einsum("hk,hv->hkv", pushed[i, :, t], x["value"][i, :, t])
            seen = s + x["bonus"].unsqueeze(-1) * new if "bonus" in x else None
            s = steps[i, :, t] @ s + new
            rows.append(torch.einsum("hk,hkv->hv", x["query"][i, :, t], s if seen is None else seen) * case.scale)
        rows += [torch.zeros(heads, x["value"].shape[-1], dtype=torch.float64)] * (length - count)
        outs.append(torch.stack(rows, 1) if rows else torch.zeros(heads, 0, x["value"].shape[-1], dtype=torch.float64))
        finals.append(s)
    return torch.stack(outs), torch.stack(finals)


def gradients(outputs: tuple[Tensor, Tensor], case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    """Of <outputs, drawn> with respect to every tensor of a case of leaves."""
    total = sum(0 * x.double().sum() for x in case.tensors.values())  # so that each has a gradient
    for output in outputs:
        total = total + (output * torch.randn(output.shape, generator=generator, dtype=torch.float64)).sum()
    return dict(zip(case.tensors, torch.autograd.grad(total, list(case.tensors.values())), strict=True))
