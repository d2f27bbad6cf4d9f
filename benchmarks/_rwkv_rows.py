"""Whole models of RWKV for `mixers`, beside the package of its authors: a prompt, and one token from a state."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import lru_cache, partial
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM

if TYPE_CHECKING:
    from benchmarks._mixer_rows import Case, Run
    from mercer.inference.engine import Engine

DIM, LAYERS, HEADS, VOCABULARY = 768, 4, 12, 4096
READ = 32
"""Tokens that stand in the state which a step goes on from; its size does not depend on them."""
AVERAGE = 14
"""Operations of RWKV-4's average for a channel and token, as in the row of the operator."""
HALF = 0.05
"""Largest difference of bfloat16 logits, relative to the largest: two models that round at different places, each
product to 8 bits, through four layers."""

COMMON = (
    ("embedding_norm.", "blocks.0.ln0."),
    ("embedding.", "emb."),
    ("feedforward_norm.", "ln2."),
    ("mixer_norm.", "ln1."),
    ("mixer.norm.", "att.ln_x."),
    ("mixer.", "att."),
    ("feedforward.", "ffn."),
)
OWN = {
    4: (
        *((f"mix_{name}", f"time_mix_{name[0]}") for name in ("key", "value", "receptance")),
        ("decay", "time_decay"),
        ("bonus", "time_first"),
    ),
    7: (
        *((f"mix_{ours}", f"x_{theirs}") for ours, theirs in zip(
            ("receptance", "decay", "key", "value", "rate", "gate"), "rwkvag", strict=True
        )),
        ("key_scale", "k_k"),
        ("key_rate", "k_a"),
        ("bonus", "r_k"),
        *((f"{ours}.{part}", f"{theirs}{number}") for ours, theirs in zip(
            ("decay", "rate", "first_share", "gate"), "wavg", strict=True
        ) for part, number in (("down.weight", 1), ("up.weight", 2), ("up.bias", 0))),
    ),
}  # fmt: skip
"""What becomes what in the name of a parameter, in this order, until it is the one of the authors' files."""


def model_of(version: int) -> DecoderLM:
    """A model whose parameters are all drawn, matrices to keep the size of what they are given."""
    name: Any = f"rwkv{version}"
    config = ModelConfig(
        vocab_size=VOCABULARY,
        dim=DIM,
        layers=LAYERS,
        heads=HEADS,
        attention=name,
        feedforward=name,
        norm="layer",
        norm_eps=1e-5,
        bias=("norm",),
        position="none",
        embedding_norm=True,
        tie_embeddings=False,
    )
    model, generator = DecoderLM(config).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            wide = parameter.dim() == 2 and part.endswith("weight")
            parameter.normal_(std=parameter.shape[1] ** -0.5 if wide else 0.3, generator=generator)
            if part.endswith(("norm.weight", "key_scale", "key_rate")):
                parameter.add_(1.0)
    return model


def authors_tensors(model: DecoderLM, version: int) -> dict[str, Tensor]:
    """The parameters as the authors' files have them, whose low-rank matrices are [in, out]."""
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        low_rank = name.endswith(("down.weight", "up.weight"))
        changed = f"ln_out.{name.removeprefix('norm.')}" if name.startswith("norm.") else name
        for ours, theirs in (*COMMON, *OWN[version]):
            changed = changed.replace(ours, theirs)
        found[changed] = (tensor.T if low_rank else tensor).contiguous()
    return found


@lru_cache
def package(version: int) -> ModuleType:
    """The package as it is for one version: it takes that from the environment, once, while it is imported."""
    root = importlib.util.find_spec("rwkv")
    if root is None or not root.submodule_search_locations:
        raise ImportError("No module named 'rwkv'")
    found = importlib.util.spec_from_file_location(
        f"rwkv{version}_model", Path(root.submodule_search_locations[0]) / "model.py"
    )
    if found is None or found.loader is None:
        raise ImportError("rwkv has no file model.py")
    module = importlib.util.module_from_spec(found)
    os.environ |= {"RWKV_JIT_ON": "1", "RWKV_CUDA_ON": "0", "RWKV_V7_ON": str(int(version == 7))}
    with redirect_stdout(StringIO()):
        found.loader.exec_module(module)
    return module


@lru_cache
def whole(version: int, dtype: str) -> DecoderLM:
    return model_of(version).to(getattr(torch, dtype))


@lru_cache
def packed(version: int, dtype: str) -> Engine:
    from mercer.inference.engine import prepare

    return prepare(whole(version, dtype))


@lru_cache
def theirs(version: int, dtype: str) -> Any:
    """The same model in the authors' package, which scripts what it can."""
    strategy = {"float32": "cpu fp32", "bfloat16": "cpu bf16"}[dtype]
    module = package(version)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        path = Path(folder) / "model"
        torch.save(authors_tensors(whole(version, dtype), version), f"{path}.pth")  # noqa: TID251  (what it reads)
        return module.RWKV(model=str(path), strategy=strategy)


def _forms(version: int, dtype: str) -> dict[str, Callable[[], Any]]:
    """Makers of the model and, where they can be had, of packed weights."""
    from mercer.backends.sharing import installed

    plain = {"ours": lambda: whole(version, dtype)}
    return plain | ({"ours, prepared": lambda: packed(version, dtype)} if installed() else {})


def _matrices(module: torch.nn.Module) -> list[Tensor]:
    return [p.detach() for name, p in module.named_parameters() if p.dim() == 2 and name.endswith("weight")]


def _counts(version: int, dtype: str) -> tuple[int, int, float]:
    """Numbers in the layers' matrices and in the head, and operations of the recurrences for a token."""
    from benchmarks._mixer_rows import REMOVING

    model = whole(version, dtype)
    inside = sum(p.numel() for p in _matrices(model.blocks))
    token = REMOVING[0] * DIM * (DIM // HEADS) if version == 7 else AVERAGE * DIM
    return inside, VOCABULARY * DIM, float(LAYERS * token)


def _words(version: int) -> str:
    return f"{LAYERS} layers of {DIM}" + (f", {HEADS} heads" if version == 7 else "")


def prompt(version: int, dtype: str, length: int) -> Case:
    """Logits after the last token of a text, and the state there, which all make and none shows."""
    from benchmarks._mixer_rows import AGREES, Case

    ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))

    def ours(made: Callable[[], Any]) -> Run:
        def run(ids: Tensor) -> Tensor:
            model = made()
            return model.score(model.hidden(ids, return_states=True)[0][0, -1])

        return run

    inside, head, token = _counts(version, dtype)
    flops = 2 * (length * inside + head) + length * token
    name = f"rwkv, {dtype}"
    return Case(
        f"B=1 n={length:,}, {_words(version)}",
        (ids,),
        {form: ours(made) for form, made in _forms(version, dtype).items()},
        {name: lambda ids: theirs(version, dtype).forward(ids[0].tolist(), None)[0]},
        (flops, None),
        slow=frozenset({name}),
        moved=(inside + head) * getattr(torch, dtype).itemsize,
        dtype=dtype,
        agrees=AGREES if dtype == "float32" else HALF,
    )


def step(version: int, dtype: str) -> Case:
    """Logits of a token after a state, and the next state. The least is reading all matrices once, and the state once
    and writing it; beside it stands a sum over the same matrices.
    """
    from benchmarks._mixer_rows import AGREES, Case

    ids = torch.randint(VOCABULARY, (1, READ), generator=torch.Generator().manual_seed(1))

    def ours(made: Callable[[], Any]) -> Run:
        before: list[Any] = []

        def run(token: Tensor) -> Tensor:
            if not before:
                before.append(made()(ids, return_states=True)[1])
            return made()(token, states=before[0], return_states=True)[0][0, 0]

        return run

    def authors(token: Tensor) -> Tensor:
        model = theirs(version, dtype)
        if not state:
            state.extend(model.forward(ids[0].tolist(), None)[1])
        return model.forward([int(token)], list(state))[0]  # it puts the next state into the list

    state: list[Tensor] = []
    model = whole(version, dtype)
    inside, head, token = _counts(version, dtype)
    read = [*_matrices(model.blocks), model.head_weight.detach()]
    with torch.no_grad():
        _, states = model(ids, return_states=True)
    return Case(
        f"B=1, a token, {_words(version)}",
        (torch.tensor([[7]]),),
        {form: ours(made) for form, made in _forms(version, dtype).items()},
        {f"rwkv, {dtype}": authors},
        (2 * (inside + head) + token, None),
        moved=(inside + head) * getattr(torch, dtype).itemsize + 2 * sum(one.nbytes for one in states),
        dtype=dtype,
        agrees=AGREES if dtype == "float32" else HALF,
        beside={"a sum over the matrices": lambda: [p.view(torch.float32).sum() for p in read]},
    )


DTYPES = {"": "float32", "-bf16": "bfloat16"}
PROMPTS: dict[str, Callable[[int], Case]] = {
    f"rwkv{version}-model{short}": partial(prompt, version, dtype)
    for version in (7, 4)
    for short, dtype in DTYPES.items()
}
TOKENS: dict[str, Callable[[], Case]] = {
    f"rwkv{version}-model{short}-step": partial(step, version, dtype)
    for version in (7, 4)
    for short, dtype in DTYPES.items()
}
