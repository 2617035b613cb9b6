"""A comparison on the terminal: verdict, table, curves, sentences; plain text when piped."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from gptfit.units import count, duration, percent, si
from gptfit.view.axes import AXES
from gptfit.view.compare import loss_curve
from gptfit.view.sketch import sketch
from gptfit.view.verdict import AXIS_WORDS, place

if TYPE_CHECKING:
    from rich.console import Console

    from gptfit.view.compare import Comparison
    from gptfit.view.explain import Explanation
    from gptfit.view.facts import RunFacts

UNKNOWN = "?"
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
    for label, show in FACTS:
        cells = [show(run) for run in comparison.runs]
        if any(cell != UNKNOWN for cell in cells):
            table.add_row(label, *cells)
    return table


def _or_unknown(value: float | None, show: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else show(value)


FACTS: tuple[tuple[str, Callable[[RunFacts], str]], ...] = (
    ("parameters", lambda run: _or_unknown(run.parameters, si)),
    ("FLOPs per token", lambda run: _or_unknown(run.flops_per_token, si)),
    ("tokens per step", lambda run: _or_unknown(run.tokens_per_step, lambda n: count(int(n)))),
    ("ms per step (median, evals excluded)", lambda run: _or_unknown(run.ms_per_step, lambda ms: f"{ms:,.1f}")),
    ("ms per micro-step", lambda run: _or_unknown(run.ms_per_micro_step, lambda ms: f"{ms:,.1f}")),
    ("tokens/s", lambda run: _or_unknown(run.tokens_per_s, si)),
    ("achieved TFLOPS per card", lambda run: _or_unknown(run.tflops, lambda rate: f"{rate:.1f}")),
    (
        "MFU of its own card",
        lambda run: _or_unknown(run.mfu, lambda share: f"{percent(share, 1)} of {run.peak_tflops:g}"),
    ),
    ("MFU as nanoGPT prints it (A100)", lambda run: _or_unknown(run.mfu_a100, lambda share: percent(share, 1))),
    ("memory GiB", lambda run: _or_unknown(run.memory_gib, lambda gib: f"{gib:.2f}")),
    ("steps", lambda run: count(run.last_step) + (f" of {count(run.max_iters)}" if run.max_iters else "")),
    ("training time so far", lambda run: _or_unknown(run.seconds, duration)),
    ("training time to its end", lambda run: _or_unknown(run.total_seconds, duration)),
    ("last validation loss", lambda run: _last_loss(run)),
)


def _last_loss(run: RunFacts) -> str:
    for point in reversed(run.evals):
        if point.val_loss is not None:
            return f"{point.val_loss:.4f} at {count(point.step)}"
        if point.val_bpb is not None:
            return f"{point.val_bpb:.4f} bpb at {count(point.step)}"
    return UNKNOWN


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
    lines = sketch(curves, width=min(out.width, 100), height=SKETCH_ROWS)
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
