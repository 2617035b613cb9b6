"""The tables of a comparison as text, the same on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gptfit.compare.axes import AXES
from gptfit.compare.comparison import Comparison
from gptfit.compare.facts import RunFacts
from gptfit.compare.verdict import AXIS_WORDS, place
from gptfit.compare.what_if import WhatIf
from gptfit.units import count, duration, percent, si

UNKNOWN = "?"


class TextTable(NamedTuple):
    """Headings and rows of cells."""

    head: list[str]
    rows: list[list[str]]


def fact_rows(comparison: Comparison) -> list[list[str]]:
    """A label and one cell per run; a row nothing is known about is left out."""
    runs = comparison.runs
    rows = [[label, *(show(run) for run in runs)] for label, show in _FACTS]
    rows.append(
        [
            f"last validation, {'bits/byte' if comparison.bpb else 'nats/token'}",
            *(_last_loss(run, comparison.bpb) for run in runs),
        ]
    )
    return [row for row in rows if any(cell != UNKNOWN for cell in row[1:])]


def equal_table(comparison: Comparison) -> TextTable:
    """One row per axis and later run: both losses at the last common point, and who is ahead."""
    rows = []
    for j, duels in enumerate(comparison.duels, 1):
        for axis in (axis for axis in AXES if axis in duels):
            found = duels[axis]
            ahead = "level" if found.ahead is None else comparison.letter(0 if found.ahead == 0 else j)
            since = "" if found.ahead_from is None else place(axis, found.ahead_from)
            losses = [f"{loss:.4f}" for loss in found.last.losses]
            gap = [f"{found.last.difference:+.4f}", f"{found.noise:.3f}"]
            rows.append(
                [
                    AXIS_WORDS[axis].removeprefix("equal training ").removeprefix("equal "),
                    place(axis, found.last.at),
                    *losses,
                    *gap,
                    ahead,
                    since,
                ]
            )
    others = " / ".join(comparison.letter(j) for j in range(1, len(comparison.runs)))
    return TextTable(["at equal", "where", "A", others, "difference", "noise", "ahead", "since"], rows)


def what_if_table(predictions: Sequence[WhatIf]) -> TextTable:
    """What plan predicts for each combination of the changes; empty where there is nothing to combine."""
    rows = []
    for row in predictions if len(predictions) > 2 else ():
        share = UNKNOWN if row.mfu is None else percent(row.mfu)
        span = f"{si(row.predicted.low)} to {si(row.predicted.high)} ({row.predicted.basis})"
        seen = "" if row.measured is None else si(row.measured)
        rows.append([" + ".join(row.changes) or "none", si(row.predicted.value), span, share, seen])
    return TextTable(["A with these changes", "plan: tokens/s", "range", "MFU", "measured"], rows)


def value_words(value: object) -> str:
    """A config value as people write it: 0.0003, 524,288, True."""
    if isinstance(value, float):
        return f"{value:g}"
    return count(value) if type(value) is int and value >= 10000 else str(value)


def _or_unknown(value: float | None, show: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else show(value)


def _one_place(value: float) -> str:
    return f"{value:,.1f}"


def _last_loss(run: RunFacts, bpb: bool) -> str:
    for point in reversed(run.evals):
        loss = run.validation(point, bpb)
        if loss is not None:
            return f"{loss:.4f} at {count(point.step)}"
    return UNKNOWN


def _step_time(run: RunFacts) -> str:
    """With its spread where that is so large that the figure says little."""
    if run.ms_per_step is None:
        return UNKNOWN
    return _one_place(run.ms_per_step) + (f" +-{percent(run.ms_spread)}" if run.ms_spread and run.is_busy else "")


_FACTS: tuple[tuple[str, Callable[[RunFacts], str]], ...] = (
    ("parameters", lambda run: _or_unknown(run.parameters, si)),
    ("FLOPs per token", lambda run: _or_unknown(run.flops_per_token, si)),
    ("tokens per step", lambda run: _or_unknown(run.tokens_per_step, lambda n: count(int(n)))),
    ("ms per step (median)", _step_time),
    ("ms per micro-step", lambda run: _or_unknown(run.ms_per_micro_step, _one_place)),
    ("tokens/s", lambda run: _or_unknown(run.tokens_per_s, si)),
    ("achieved TFLOPS per card", lambda run: _or_unknown(run.tflops, lambda rate: f"{rate:.3g}")),
    (
        "MFU of its own card",
        lambda run: _or_unknown(run.mfu, lambda share: f"{percent(share, 1)} of {run.peak_tflops:.3g}"),
    ),
    ("MFU of an A100 (nanoGPT)", lambda run: _or_unknown(run.mfu_a100, lambda share: percent(share, 1))),
    ("peak memory GiB", lambda run: _or_unknown(run.memory_gib, lambda gib: f"{gib:.2f}")),
    ("steps", lambda run: count(run.last_step) + (f" of {count(run.max_iters)}" if run.max_iters else "")),
    ("training time so far", lambda run: _or_unknown(run.seconds, duration)),
    ("training time to its end", lambda run: _or_unknown(run.total_seconds, duration)),
)
