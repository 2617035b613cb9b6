"""A comparison on the terminal: verdict, table, curves, sentences; plain text when piped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from gptfit.units import percent, si
from gptfit.view.axes import AXES
from gptfit.view.compare import loss_curve
from gptfit.view.rows import UNKNOWN, fact_rows
from gptfit.view.sketch import sketch
from gptfit.view.verdict import AXIS_WORDS, place

if TYPE_CHECKING:
    from rich.console import Console

    from gptfit.view.compare import Comparison
    from gptfit.view.explain import Explanation

SKETCH_ROWS = 12


def print_comparison(out: Console, comparison: Comparison, explanation: Explanation) -> None:
    """Everything in one screen, the answer first."""
    out.print(Text(explanation.verdict, style="bold"))
    out.print()
    out.print(_facts_table(comparison))
    if comparison.duels:
        out.print()
        out.print(_equal_table(comparison))
    _print_sketch(out, comparison)
    out.print()
    for sentence in explanation.sentences:
        out.print(Text(f"- {sentence}"), soft_wrap=not out.is_terminal)
    if len(explanation.what_if) > 2:
        out.print()
        out.print(_what_if_table(explanation))
    for i, run in enumerate(comparison.runs):
        for note in run.notes:
            out.print(Text(f"note on {comparison.letter(i)}: {note}", style="dim"), soft_wrap=not out.is_terminal)


def _facts_table(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for i, run in enumerate(comparison.runs):
        table.add_column(Text(f"{comparison.letter(i)}: {run.name}"), justify="right", overflow="fold")
    for row in fact_rows(comparison.runs):
        table.add_row(*(Text(cell) for cell in row))
    return table


def _equal_table(comparison: Comparison) -> Table:
    """One row per axis and later run: both losses at the last common point, and who is ahead."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("validation at", "where", "losses", "difference", "noise", "ahead", "since"):
        table.add_column(heading, justify="left" if heading in ("validation at", "ahead") else "right")
    for j, duels in enumerate(comparison.duels, 1):
        for axis in AXES:
            if axis in duels:
                found = duels[axis]
                ahead = "-" if found.ahead is None else comparison.letter(0 if found.ahead == 0 else j)
                since = "" if found.ahead_from is None else place(axis, found.ahead_from)
                losses = f"{found.last.losses[0]:.4f} {found.last.losses[1]:.4f}"
                row = (AXIS_WORDS[axis], place(axis, found.last.at), losses, f"{found.last.difference:+.4f}")
                table.add_row(*row, f"{found.noise:.3f}", ahead, since)
    return table


def _print_sketch(out: Console, comparison: Comparison) -> None:
    if comparison.not_comparable:
        return
    bpb = comparison.unit != "nats per token"
    curves = {comparison.letter(i): loss_curve(run, "step", bpb) for i, run in enumerate(comparison.runs)}
    lines = sketch(curves, width=min(out.width, 100), height=SKETCH_ROWS, unit=comparison.unit)
    if lines:
        out.print()
        for line in lines:
            out.print(Text(line))


def _what_if_table(explanation: Explanation) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("A with these changes")
    for heading in ("plan: tokens/s", "range", "MFU", "measured"):
        table.add_column(heading, justify="right")
    for row in explanation.what_if:
        share = UNKNOWN if row.mfu is None else percent(row.mfu)
        span = f"{si(row.predicted.low)} to {si(row.predicted.high)} ({row.predicted.basis})"
        seen = "" if row.measured is None else si(row.measured)
        table.add_row(" + ".join(row.changes) or "none", si(row.predicted.value), span, share, seen)
    return table
