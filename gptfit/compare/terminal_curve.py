"""A small curve of characters for the terminal: several runs, loss against steps, a letter per run."""

from __future__ import annotations

from gptfit.compare.axes import Curve, value_at
from gptfit.units import si

MARGIN = 8  # columns for the loss labels
SKIP_SHARE = 0.04  # the first steps fall so steeply that they would flatten everything else


def sketch(curves: dict[str, Curve], width: int = 80, height: int = 12, unit: str = "nats per token") -> list[str]:
    """Lines of plain text, or none when there is no curve to draw."""
    known = {letter: points for letter, points in curves.items() if len(points) >= 2}
    columns = width - MARGIN
    if not known or columns < 20:
        return []
    last = max(points[-1][0] for points in known.values())
    places = [last * (SKIP_SHARE + (1 - SKIP_SHARE) * i / (columns - 1)) for i in range(columns)]
    heights = {letter: [value_at(points, x) for x in places] for letter, points in known.items()}
    values = [y for row in heights.values() for y in row if y is not None]
    if not values or max(values) == min(values):
        return []
    low, high = min(values), max(values)
    grid = [[" "] * columns for _ in range(height)]
    for letter, row in heights.items():
        for column, y in enumerate(row):
            if y is not None:
                grid[round((high - y) / (high - low) * (height - 1))][column] = letter[-1]
    labels = [f"{high - (high - low) * i / (height - 1):6.2f} |" for i in range(height)]
    lines = [label + "".join(cells).rstrip() for label, cells in zip(labels, grid, strict=True)]
    axis = f"{'':6} +" + "-" * columns
    left, right = si(places[0]), f"{si(last)} steps"
    return [f"validation loss, {unit}", *lines, axis, " " * MARGIN + left + right.rjust(columns - len(left))]
