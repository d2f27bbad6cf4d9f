"""Pictures of structures: who sees whom, and how strongly.

:func:`weights` asks the layout that the forms use, tile by tile; :func:`plot` draws its answer with plotly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mercer.core.layout import Layout, layout, tokens
from mercer.core.merged import Merged, merge
from mercer.core.structures import Both, Either, Pattern, Structure
from mercer.errors import InvalidArgument

if TYPE_CHECKING:
    import plotly.graph_objects as go  # pyright: ignore[reportMissingTypeStubs]

EXACT = 512
"""Tokens up to which every pair is a cell of its own."""
CELLS = 256
"""Cells on a side where several tokens share one, about."""
LARGEST = 16384
"""Tokens that a picture may have on a side: every pair is asked about."""
PANELS = 16
"""Heads and rows that are drawn side by side at most."""
SEEN, SCALE = "#0f766e", "Viridis"


@dataclass(frozen=True, eq=False)
class Weights:
    """What a structure gives every pair, or blocks of pairs.

    Attributes:
        share: float64 ``[rows, heads, query cells, key cells]``: the share of a cell's pairs that are visible.
        log_weight: the logarithm of their mean weight w_ij, minus infinity where nothing is visible (hidden pairs
            weigh 0); None where all visible pairs weigh 1.
        block: tokens on a side of a cell; 1: cells are pairs.
        query_position, key_position: ``[rows, L]``, counted as the structure counts them.
        query_there, key_there: ``[rows, L]``, False for padding.
    """

    share: Tensor
    log_weight: Tensor | None
    block: int
    query_position: Tensor
    key_position: Tensor
    query_there: Tensor
    key_there: Tensor


def weights(
    structure: Structure,
    queries: int,
    keys: int | None = None,
    *,
    rows: Sequence[int] = (0,),
    heads: Sequence[int] | None = None,
    batch: int | None = None,
    query_heads: int | None = None,
) -> Weights:
    """Visibility and weights as :meth:`mercer.core.structures.Structure.plot` draws them; arguments as there."""
    keys = queries if keys is None else keys
    for name, length in (("queries", queries), ("keys", keys)):
        if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= LARGEST:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"plot: {name} must be an integer from 1 to {LARGEST:,}, not {length!r}.")
    for name, which in (("rows", rows), ("heads", () if heads is None else heads)):
        if not isinstance(which, Sequence) or not all(isinstance(one, int) for one in which):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"plot: {name} says which {name} to draw, such as (0, 1), not {which!r}.")
    merged = merge(structure)
    batch = _batch(merged, rows) if batch is None else batch
    count = _heads(structure, merged, heads) if query_heads is None else query_heads
    shown = tuple(range(count))[:PANELS] if heads is None else tuple(heads)
    _check(rows, shown, batch, count)
    plan = layout(merged, tokens(merged, batch, count, count, queries, keys, torch.device("cpu")))
    block = 1 if max(queries, keys) <= EXACT else -(-max(queries, keys) // CELLS)
    cells = [[_panel(plan, merged, row, head, block) for head in shown] for row in rows]
    share = torch.stack([torch.stack([one[0] for one in line]) for line in cells])
    found = [[one[1] for one in line if one[1] is not None] for line in cells]
    logs = torch.stack([torch.stack(line) for line in found]) if merged.weighted else None
    chosen = torch.tensor(tuple(rows))
    places = [x.expand(batch, -1)[chosen] for x in (plan.query_position, plan.key_position)]
    there = [
        torch.ones_like(at, dtype=torch.bool) if valid is None else valid.expand(batch, -1)[chosen]
        for at, valid in zip(places, (plan.query_valid, plan.key_valid), strict=True)
    ]
    return Weights(share, logs, block, *places, *there)


def _panel(plan: Layout, merged: Merged, row: int, head: int, block: int) -> tuple[Tensor, Tensor | None]:
    """Share visible and, where pairs have weights, the logarithm of the mean weight of one row's and head's cells."""
    rows, heads, every = slice(row, row + 1), slice(head, head + 1), slice(0, plan.key_length)
    shares: list[Tensor] = []
    logs: list[Tensor] = []
    deep = block if block > 1 else plan.query_length
    for start in range(0, plan.query_length, deep):
        at = slice(start, min(start + deep, plan.query_length))
        extent = (at.stop - at.start, plan.key_length)
        visible = plan.visible(at, every, rows, heads)
        seen = torch.ones(extent, dtype=torch.bool) if visible is None else visible[0, 0].expand(extent)
        log = None
        if merged.weighted:
            bias = plan.bias(at, every, rows, heads, torch.float64)
            log = torch.zeros(extent, dtype=torch.float64) if bias is None else bias[0, 0].detach().expand(extent)
            log = log.masked_fill(~seen, -torch.inf)
        if block == 1:
            return seen.double(), log
        pairs = (at.stop - at.start) * (plan.key_length - torch.arange(0, plan.key_length, block)).clamp(max=block)
        shares.append(_in_cells(seen.double(), block, 0).sum(1) / pairs)
        if log is not None:
            logs.append(_in_cells(log, block, -torch.inf).logsumexp(1) - pairs.double().log())
    return torch.stack(shares), torch.stack(logs) if logs else None


def _in_cells(strip: Tensor, block: int, nothing: float) -> Tensor:
    """The numbers of a strip of queries, those of each cell in a row: ``[cells, queries * block]``, ``nothing`` where
    the last cell has fewer keys."""
    whole = torch.nn.functional.pad(strip, (0, -strip.shape[1] % block), value=nothing)
    return whole.unflatten(1, (-1, block)).transpose(0, 1).flatten(1)


def _batch(merged: Merged, rows: Sequence[int]) -> int:
    """Batch rows that a structure's tensors are made for, else as many as are asked for."""
    padding = merged.padding
    if padding is not None:
        return (padding.lengths if padding.lengths is not None else padding.mask).shape[0]  # pyright: ignore[reportOptionalMemberAccess]
    if merged.decay is not None and merged.decay.per_token:
        return merged.decay.logs().shape[0]
    return max(rows, default=0) + 1


def _heads(structure: Structure, merged: Merged, heads: Sequence[int] | None) -> int:
    """Heads that a structure tells apart, else as many as are asked for."""
    if merged.alibi is not None:
        return merged.alibi.slopes.shape[0]
    if merged.decay is not None and merged.decay.heads > 1:
        return merged.decay.heads
    asked = 1 if heads is None else max(heads, default=0) + 1
    return max([asked, *(getattr(p, "heads", None) or 1 for p in _simple(structure) if p.per_head)])


def _simple(structure: Structure) -> list[Pattern]:
    """All patterns that a structure is composed of."""
    if isinstance(structure, Both | Either):
        return [p for member in structure.members for p in _simple(member)]
    return [structure] if isinstance(structure, Pattern) else []


def _check(rows: Sequence[int], heads: Sequence[int], batch: int, count: int) -> None:
    for name, chosen, limit in (("rows", rows, batch), ("heads", heads, count)):
        if not chosen or any(not 0 <= one < limit for one in chosen):
            raise InvalidArgument(f"plot: {name} must be some of 0 to {limit - 1}, not {list(chosen)}.")
    if len(rows) * len(heads) > PANELS:
        raise InvalidArgument(
            f"plot: {len(rows)} rows and {len(heads)} heads are too many panels; draw {PANELS} or fewer."
        )


def plot(structure: Structure, found: Weights, rows: Sequence[int], heads: Sequence[int] | None) -> go.Figure:
    """The figure of :meth:`mercer.core.structures.Structure.plot`."""
    import plotly.graph_objects as go  # pyright: ignore[reportMissingTypeStubs]
    from plotly.subplots import make_subplots  # pyright: ignore[reportMissingTypeStubs]

    down, across = found.share.shape[:2]
    named = range(across) if heads is None else heads
    titles = [f"row {row}, head {head}" for row in rows for head in named] if down * across > 1 else None
    grid: Any = make_subplots(down, across, subplot_titles=titles)
    values, colours = _colours(found)
    for i in range(down):
        places = _places(found, i)
        for j in range(across):
            heat = go.Heatmap(
                x0=(found.block - 1) / 2,
                dx=found.block,
                y0=(found.block - 1) / 2,
                dy=found.block,
                z=values[i, j].numpy(),
                customdata=places,
                hovertemplate=_hover(found),
                coloraxis="coloraxis",
                hoverongaps=False,
            )
            grid.add_trace(heat, i + 1, j + 1)
    grid.update_xaxes(showgrid=False, zeroline=False, constrain="domain")
    grid.update_yaxes(autorange="reversed", showgrid=False, zeroline=False, constrain="domain")
    for i in range(down * across):
        grid.update_yaxes(scaleanchor=f"x{i + 1}" if i else "x", row=i // across + 1, col=i % across + 1)
    grid.update_xaxes(title="key", row=down)
    grid.update_yaxes(title="query", col=1)
    side = 560 if down * across == 1 else 300
    grid.update_layout(
        title=str(structure),
        coloraxis=colours,
        plot_bgcolor="#eef1f6",
        width=min(1600, side * across + 160),
        height=side * down + 120,
    )
    return grid


def _colours(found: Weights) -> tuple[Tensor, dict[str, Any]]:
    """Values of the cells, NaN where nothing is visible, and how they are coloured."""
    hidden = found.share == 0
    if found.log_weight is not None:
        values = found.log_weight.masked_fill(found.log_weight == -torch.inf, torch.nan)
        return values, {"colorscale": SCALE, "colorbar": {"title": {"text": "log-weight"}}}
    scale = [[0, "#d9efec"], [1, SEEN]]
    shown = {"colorscale": scale, "cmin": 0, "cmax": 1, "showscale": found.block > 1}
    return found.share.masked_fill(hidden, torch.nan), {**shown, "colorbar": {"title": {"text": "share visible"}}}


def _places(found: Weights, row: int) -> Any:
    """Positions of every pair, where they are not simply its place: what the hover shows."""
    if found.block > 1:
        return None
    query, key = found.query_position[row], found.key_position[row]
    pairs = torch.stack((query.unsqueeze(1).expand(-1, len(key)), key.unsqueeze(0).expand(len(query), -1)), -1)
    return pairs.numpy()


def _hover(found: Weights) -> str:
    what = "share visible" if found.log_weight is None else "log-weight"
    if found.block > 1:
        block = f"blocks of {found.block}: "
        return f"{block}queries around %{{y:.0f}}, keys around %{{x:.0f}}<br>{what} %{{z:.3g}}<extra></extra>"
    tail = "" if found.log_weight is None else f"<br>{what} %{{z:.3g}}"
    return "query %{y} at position %{customdata[0]}<br>key %{x} at position %{customdata[1]}" + tail + "<extra></extra>"
