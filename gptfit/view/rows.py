"""The rows of the side-by-side table as text, the same on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gptfit.units import count, duration, percent, si
from gptfit.view.facts import RunFacts

UNKNOWN = "?"


def fact_rows(runs: Sequence[RunFacts]) -> list[list[str]]:
    """A label and one cell per run; a row nothing is known about is left out."""
    rows = [[label, *(show(run) for run in runs)] for label, show in _FACTS]
    return [row for row in rows if any(cell != UNKNOWN for cell in row[1:])]


def value_words(value: object) -> str:
    """A config value as people write it: 0.0003, 524,288, True."""
    if isinstance(value, float):
        return f"{value:g}"
    return count(value) if type(value) is int and value >= 10000 else str(value)


def _or_unknown(value: float | None, show: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else show(value)


def _one_place(value: float) -> str:
    return f"{value:,.1f}"


def _last_loss(run: RunFacts) -> str:
    for point in reversed(run.evals):
        if point.val_loss is not None:
            return f"{point.val_loss:.4f} at {count(point.step)}"
        if point.val_bpb is not None:
            return f"{point.val_bpb:.4f} bits/byte at {count(point.step)}"
    return UNKNOWN


_FACTS: tuple[tuple[str, Callable[[RunFacts], str]], ...] = (
    ("parameters", lambda run: _or_unknown(run.parameters, si)),
    ("FLOPs per token", lambda run: _or_unknown(run.flops_per_token, si)),
    ("tokens per step", lambda run: _or_unknown(run.tokens_per_step, lambda n: count(int(n)))),
    ("ms per step (median, evals excluded)", lambda run: _or_unknown(run.ms_per_step, _one_place)),
    ("ms per micro-step", lambda run: _or_unknown(run.ms_per_micro_step, _one_place)),
    ("tokens/s", lambda run: _or_unknown(run.tokens_per_s, si)),
    ("achieved TFLOPS per card", lambda run: _or_unknown(run.tflops, lambda rate: f"{rate:.3g}")),
    (
        "MFU of its own card",
        lambda run: _or_unknown(run.mfu, lambda share: f"{percent(share, 1)} of {run.peak_tflops:.3g}"),
    ),
    ("MFU as nanoGPT prints it (A100)", lambda run: _or_unknown(run.mfu_a100, lambda share: percent(share, 1))),
    ("peak memory GiB", lambda run: _or_unknown(run.memory_gib, lambda gib: f"{gib:.2f}")),
    ("steps", lambda run: count(run.last_step) + (f" of {count(run.max_iters)}" if run.max_iters else "")),
    ("training time so far", lambda run: _or_unknown(run.seconds, duration)),
    ("training time to its end", lambda run: _or_unknown(run.total_seconds, duration)),
    ("last validation loss", _last_loss),
)
