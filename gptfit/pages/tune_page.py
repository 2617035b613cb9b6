"""The page of a tuning session: tokens per second and memory against the micro-batch, opens offline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from gptfit.pages.html import table
from gptfit.pages.shell import standalone

# Drawn by plotly in the page's own colours; `plots` is a list of {id, traces, layout}.
SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const style = getComputedStyle(document.body);
const colour = (name) => style.getPropertyValue(name).trim();
const axis = {gridcolor: colour("--grid"), zerolinecolor: colour("--line"), automargin: true};
for (const plot of data.plots) {
  const layout = Object.assign({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {color: style.color, family: "inherit"},
    colorway: [0, 1, 2, 3, 4, 5].map((i) => colour("--run-" + i)), height: 340,
    margin: {l: 60, r: 20, t: 10, b: 45}, legend: {orientation: "h", x: 0, y: 1.02, yanchor: "bottom"},
  }, plot.layout);
  for (const name of ["xaxis", "yaxis"]) layout[name] = Object.assign({}, axis, layout[name]);
  Plotly.newPlot(plot.id, plot.traces, layout, {displayModeBar: false, responsive: true});
}
"""


@dataclass(frozen=True)
class TunedCurve:
    """One setting over its micro-batches, ascending."""

    name: str
    sizes: tuple[int, ...]
    tokens_per_s: tuple[float, ...]
    spread: tuple[float, ...]  # tokens/s up and down
    memory_gib: tuple[float | None, ...]


def tune_page(
    title: str,
    sentences: Sequence[str],
    curves: Sequence[TunedCurve],
    best: tuple[int, float] | None,
    limit_gib: float | None,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> str:
    """The whole HTML text. The first sentence is the answer; `best` is (micro-batch, tokens/s)."""
    first, *rest = sentences
    paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in rest)
    inside = (
        f"<h1>{escape(first)}</h1>{paragraphs}"
        '<h2>Tokens per second</h2><div id="speed"></div><h2>Peak memory</h2><div id="memory"></div>'
        f"<h2>Trials</h2>{table(head, rows)}"
    )
    plots = [speed_plot(curves, best), memory_plot(curves, limit_gib)]
    return standalone(title, inside, {"plots": plots}, SCRIPT)


def speed_plot(curves: Sequence[TunedCurve], best: tuple[int, float] | None) -> dict[str, Any]:
    traces = [
        {
            **_curve(curve),
            "y": list(curve.tokens_per_s),
            "error_y": {"type": "data", "array": list(curve.spread), "thickness": 1},
        }
        for curve in curves
    ]
    if best is not None:
        star = {"symbol": "star", "size": 16}
        traces.append(
            {"type": "scatter", "mode": "markers", "name": "best", "x": [best[0]], "y": [best[1]], "marker": star}
        )
    return {"id": "speed", "traces": traces, "layout": _layout(curves, "tokens/s")}


def memory_plot(curves: Sequence[TunedCurve], limit_gib: float | None) -> dict[str, Any]:
    """The limit is drawn only when the curves come near it; a far line would flatten them."""
    traces = [{**_curve(curve), "y": list(curve.memory_gib)} for curve in curves]
    sizes = sorted({size for curve in curves for size in curve.sizes})
    known = [value for curve in curves for value in curve.memory_gib if value is not None]
    if limit_gib is not None and known and max(known) > limit_gib / 2:
        dotted = {"mode": "lines", "line": {"dash": "dot"}, "name": "limit with head-room"}
        traces.append({"type": "scatter", "x": sizes, "y": [limit_gib] * len(sizes), **dotted})
    return {"id": "memory", "traces": traces, "layout": _layout(curves, "GiB")}


def _curve(curve: TunedCurve) -> dict[str, Any]:
    return {"type": "scatter", "mode": "lines+markers", "name": curve.name, "x": list(curve.sizes)}


def _layout(curves: Sequence[TunedCurve], unit: str) -> dict[str, Any]:
    sizes = sorted({size for curve in curves for size in curve.sizes})
    ticks = {"tickvals": sizes, "ticktext": [str(size) for size in sizes]}
    return {
        "xaxis": {"title": {"text": "micro-batch (rows)"}, "type": "log", **ticks},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
    }
