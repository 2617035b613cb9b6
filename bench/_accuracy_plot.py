"""Predicted against published as a small SVG, drawn by hand so that it needs no library and never changes by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

Points = Sequence[tuple[str, float, float]]  # kind, published, predicted

COLOURS = {
    "GeForce": "#2f7d32",
    "other NVIDIA": "#1565c0",
    "eager": "#ef6c00",
    "naive attention": "#8e8e8e",
    "laptop": "#ad1457",
    "device": "#1565c0",
    "allocated": "#ef6c00",
}
SIDE, MARGIN, GAP = 320, 56, 90


def plot(speeds: Points, memories: Points) -> str:
    width, height = 2 * SIDE + 2 * MARGIN + GAP, SIDE + 2 * MARGIN
    body = _panel(MARGIN, "tokens per second", speeds, 0.20) + _panel(
        MARGIN + SIDE + GAP, "memory, MiB", memories, 0.10
    )
    style = "font-family:sans-serif;font-size:11px"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'style="{style}">\n<rect width="{width}" height="{height}" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _panel(left: int, title: str, points: Points, band: float) -> list[str]:
    """One square with equal logarithmic axes, the diagonal, and a band of plus and minus `band` around it."""
    values = [value for _, *pair in points for value in pair]
    low, high = math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1
    top = MARGIN

    def x(value: float) -> float:
        return left + SIDE * (math.log10(value) - low) / (high - low)

    def y(value: float) -> float:
        return top + SIDE * (1 - (math.log10(value) - low) / (high - low))

    first, last = 10**low, 10**high
    lines = [f'<text x="{left}" y="{top - 24}" font-size="13" fill="#222">{title}: predicted against published</text>']
    corners = [
        (first, first * (1 - band)),
        (first, first * (1 + band)),
        (last, last * (1 + band)),
        (last, last * (1 - band)),
    ]
    polygon = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in corners)
    clip = f"clip{left}"
    lines.append(f'<clipPath id="{clip}"><rect x="{left}" y="{top}" width="{SIDE}" height="{SIDE}"/></clipPath>')
    lines.append(f'<polygon points="{polygon}" fill="#eeeeee" clip-path="url(#{clip})"/>')
    lines.append(f'<line x1="{x(first):.1f}" y1="{y(first):.1f}" x2="{x(last):.1f}" y2="{y(last):.1f}" stroke="#999"/>')
    lines.append(f'<rect x="{left}" y="{top}" width="{SIDE}" height="{SIDE}" fill="none" stroke="#444"/>')
    for power in range(math.ceil(low), math.floor(high) + 1):
        label = f"{10**power:,}"
        lines.append(
            f'<text x="{x(10**power):.1f}" y="{top + SIDE + 16}" text-anchor="middle" fill="#222">{label}</text>'
        )
        lines.append(f'<text x="{left - 4}" y="{y(10**power) + 4:.1f}" text-anchor="end" fill="#222">{label}</text>')
    lines.append(f'<text x="{left + SIDE / 2}" y="{top + SIDE + 34}" text-anchor="middle" fill="#222">published</text>')
    for kind, published, predicted in points:
        lines.append(
            f'<circle cx="{x(published):.1f}" cy="{y(predicted):.1f}" r="3.2" fill="{COLOURS[kind]}" fill-opacity="0.75"/>'
        )
    for index, kind in enumerate(dict.fromkeys(kind for kind, _, _ in points)):
        height = top + 16 + 16 * index
        lines.append(f'<circle cx="{left + 12}" cy="{height - 4}" r="4" fill="{COLOURS[kind]}"/>')
        lines.append(f'<text x="{left + 22}" y="{height}" fill="#222">{kind}</text>')
    percent = f"{100 * band:.0f} %"
    lines.append(
        f'<text x="{left + SIDE - 6}" y="{top + SIDE - 8}" text-anchor="end" fill="#777">grey: within {percent}</text>'
    )
    return lines
