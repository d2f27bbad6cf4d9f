"""Figures: plotly's data and layout, drawn so that the page's style sheet decides the colours of text and "
"background."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

from mercer.studies.records.common import Interval
from mercer.studies.report.blocks import Entry, Figure
from mercer.studies.report.marks import Mark

_GRID = "rgba(128,128,128,0.20)"
_LINE = "rgba(128,128,128,0.55)"


def _axis(title: str, log: bool, **more: Any) -> dict[str, Any]:
    axis: dict[str, Any] = {
        "title": {"text": title, "standoff": 8} if title else None,
        "gridcolor": _GRID,
        "linecolor": _LINE,
        "showline": True,
        "zeroline": False,
        "fixedrange": True,  # a finger on the plot scrolls the page
        "automargin": True,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": _LINE,
    }
    if log:
        axis |= {"type": "log", "dtick": 1, "exponentformat": "power"}
    return axis | more


@dataclass
class Plot:
    """Collects traces and their legend, then becomes a :class:`Figure`."""

    x_title: str
    y_title: str
    x_log: bool = False
    y_log: bool = False
    x_axis: dict[str, Any] = field(default_factory=dict)
    y_axis: dict[str, Any] = field(default_factory=dict)
    traces: list[go.Scatter] = field(default_factory=list)
    shapes: list[dict[str, Any]] = field(default_factory=list)
    annotations: list[dict[str, Any]] = field(default_factory=list)
    legend: list[Entry] = field(default_factory=list)
    left: int = 8

    def line(
        self,
        label: str,
        x: Sequence[float],
        y: Sequence[float | None],
        mark: Mark,
        *,
        mode: str = "lines",
        spread: Sequence[Interval | None] | None = None,
        symbols: Sequence[str] | None = None,
        colours: Sequence[str] | None = None,
        hover: str = "%{y:.3f}",
        text: Sequence[str] | None = None,
        size: float = 7,
        dash: str | None = None,
        legend: bool = True,
        shown: bool = True,
    ) -> None:
        """A line, markers or both; ``spread`` draws the interval of each point, ``colours`` those of the markers."""
        marked = list(colours) if colours else mark.colour
        trace = go.Scatter(
            x=list(x),
            y=list(y),
            mode=mode,
            name=label,
            line={"color": mark.colour, "width": mark.width, "dash": dash or mark.dash},
            marker={
                "color": marked,
                "symbol": list(symbols) if symbols else mark.symbol,
                "size": size,
                "line": {"width": 2, "color": marked},
            },
            hovertemplate=f"<b>{label}</b><br>{hover}<extra></extra>",
            text=list(text) if text else None,
            connectgaps=False,
            visible=shown,
        )
        if spread and any(s is not None and s.decided for s in spread):
            trace.error_y = {
                "type": "data",
                "symmetric": False,
                "array": [s.high - s.mean if s and s.high is not None else None for s in spread],
                "arrayminus": [s.mean - s.low if s and s.low is not None else None for s in spread],
                "color": mark.colour,
                "thickness": 1.5,
                "width": 4,
            }
        self.traces.append(trace)
        if legend:
            self.legend.append(Entry(label, mark.colour, dash or mark.dash, (len(self.traces) - 1,), shown))

    def ribbon(self, x: Sequence[float], spread: Sequence[Interval], mark: Mark) -> None:
        """The intervals around the line drawn last, as one shaded area that shows and hides with it; nothing if some
        point has none."""
        bounds = [(s.low, s.high) for s in spread if s.low is not None and s.high is not None]
        if len(bounds) < len(spread):
            return
        red, green, blue = (int(mark.colour[at : at + 2], 16) for at in (1, 3, 5))
        self.traces.append(
            go.Scatter(
                x=[*x, *reversed(x)],
                y=[*(low for low, _ in bounds), *(high for _, high in reversed(bounds))],
                mode="lines",
                fill="toself",
                fillcolor=f"rgba({red},{green},{blue},0.18)",
                line={"width": 0},
                hoverinfo="skip",
                visible=self.traces[-1].visible,
            )
        )
        self.legend[-1] = self.legend[-1].with_trace(len(self.traces) - 1)

    def upright(self, text: str, x: float) -> None:
        """A vertical line across the plot, named at its top."""
        line = {"color": _LINE, "width": 1.5, "dash": "dash"}
        self.shapes.append(
            {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line, "layer": "below"}
        )
        place = math.log10(x) if self.x_log else x  # annotations, unlike shapes, are placed by the logarithm
        self.annotations.append(
            {
                "x": place,
                "xanchor": "right",
                "yref": "paper",
                "y": 1,
                "yanchor": "top",
                "text": text,
                "showarrow": False,
            }
        )

    def whisker(self, label: str, row: str, value: Interval, mark: Mark, hover: str) -> None:
        """A point with its interval along x, on a row named by its category."""
        trace = go.Scatter(
            x=[value.mean],
            y=[row],
            mode="markers",
            name=label,
            marker={
                "color": mark.colour,
                "symbol": mark.symbol,
                "size": 11,
                "line": {"width": 2, "color": mark.colour},
            },
            hovertemplate=f"<b>{label}</b><br>{hover}<extra></extra>",
        )
        if value.low is not None and value.high is not None:
            trace.error_x = {
                "type": "data",
                "symmetric": False,
                "array": [value.high - value.mean],
                "arrayminus": [value.mean - value.low],
                "color": mark.colour,
                "thickness": 2,
                "width": 6,
            }
        self.traces.append(trace)

    def level(self, text: str, y: float, mark: Mark, *, above: bool = True) -> None:
        """A horizontal line across the plot, named at its right end."""
        self.shapes.append(
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": y,
                "y1": y,
                "line": {"color": mark.colour, "width": 2, "dash": mark.dash},
                "layer": "below",
            }
        )
        self.annotations.append(
            {
                "xref": "paper",
                "x": 1,
                "xanchor": "right",
                "y": y,
                "yanchor": "bottom" if above else "top",
                "text": text,
                "showarrow": False,
            }
        )

    def band(self, low: float, high: float, *, vertical: bool) -> None:
        """A shaded range of x (``vertical``) or of y."""
        along, across = ("x", "y") if vertical else ("y", "x")
        self.shapes.append(
            {
                "type": "rect",
                f"{along}0": low,
                f"{along}1": high,
                f"{across}ref": "paper",
                f"{across}0": 0,
                f"{across}1": 1,
                "fillcolor": "rgba(128,128,128,0.16)",
                "line": {"width": 0},
                "layer": "below",
            }
        )

    def figure(self, name: str, title: str, alt: str, caption: str, height: int = 380) -> Figure:
        """The finished figure."""
        layout = go.Layout(
            template="none",
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            font={"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 13, "color": "#7a8494"},
            margin={"l": self.left, "r": 8, "t": 12, "b": 8},
            showlegend=False,
            dragmode=False,
            hovermode="closest",
            hoverlabel={"bgcolor": "#22262e", "bordercolor": "#22262e", "font": {"color": "#ffffff", "size": 13}},
            xaxis=_axis(self.x_title, self.x_log, **self.x_axis),
            yaxis=_axis(self.y_title, self.y_log, **self.y_axis),
            shapes=self.shapes,
            annotations=self.annotations,
        )
        spec = json.loads(go.Figure(data=self.traces, layout=layout).to_json())
        return Figure(name, title, alt, caption, spec, tuple(self.legend), height)
