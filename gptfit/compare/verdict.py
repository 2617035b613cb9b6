"""The verdict on a comparison: one or two sentences, and no winner inside the noise."""

from __future__ import annotations

from gptfit.compare.axes import Axis, Duel
from gptfit.compare.comparison import Comparison
from gptfit.compare.facts import RunFacts
from gptfit.units import count, duration, perplexity, si

AXIS_WORDS: dict[Axis, str] = {
    "step": "equal steps",
    "tokens": "equal tokens",
    "seconds": "equal training time",
    "flops": "equal FLOPs",
}


def verdict(comparison: Comparison) -> str:
    """One or two sentences; no winner inside the noise."""
    if comparison.not_comparable:
        return f"No winner can be named: {comparison.not_comparable}."
    if len(comparison.runs) == 1:
        return _alone(comparison.runs[0])
    if len(comparison.runs) > 2:
        return _of_many(comparison)
    duels = comparison.duels[0]
    if not duels:
        return "No winner can be named: the runs have no validation loss at a common point."
    lines = [_verdict_on(comparison, duels[axis]) for axis in _telling_axes(duels)]
    return " ".join(lines)


def _telling_axes(duels: dict[Axis, Duel]) -> list[Axis]:
    """Time is what people pay, so it comes first; steps second; tokens only where steps do not compare."""
    first: tuple[Axis, ...] = ("seconds", "step")
    return [axis for axis in first if axis in duels] or list(duels)[:1]


def _verdict_on(comparison: Comparison, duel: Duel) -> str:
    where, last = AXIS_WORDS[duel.axis], place(duel.axis, duel.last.at)
    a, b = duel.last.losses
    if duel.ahead is None:
        gap = f"{a:.3f} and {b:.3f} differ by {abs(b - a):.3f}, inside the noise of {duel.noise:.3f}"
        return f"At {where} neither is ahead ({last}): {gap}."
    best, other = (a, b) if duel.ahead == 0 else (b, a)
    leader = comparison.letter(duel.ahead)
    return (
        f"{leader} is ahead at {where}: {best:.3f} against {other:.3f} at {last}, beyond the noise of {duel.noise:.3f}."
    )


def _alone(run: RunFacts) -> str:
    found = ((run.validation(point, run.is_in_bits), point.step) for point in run.evals)
    losses = [(loss, step) for loss, step in found if loss is not None]
    if not losses:
        return f"{run.name}: {count(run.last_step)} steps, no validation loss yet."
    best, step = min(losses)
    if run.is_in_bits:
        return f"{run.name}: best validation {best:.4f} bits per byte at step {count(step)}."
    return f"{run.name}: best validation loss {best:.4f} (perplexity {perplexity(best):.1f}) at step {count(step)}."


def _of_many(comparison: Comparison) -> str:
    """Best of the last common point on each axis, against the first run only where the noise allows."""
    lines = []
    axes: tuple[Axis, ...] = ("seconds", "step")
    for axis in axes:
        leads = [(duels[axis].last.difference, j) for j, duels in enumerate(comparison.duels, 1) if axis in duels]
        beaten = [(gap, j) for gap, j in leads if -gap > comparison.duels[j - 1][axis].noise]
        if not leads:
            continue
        if beaten:
            gap, j = min(beaten)
            lines.append(f"At {AXIS_WORDS[axis]} {comparison.letter(j)} leads A by the most, {-gap:.3f}.")
        else:
            lines.append(f"At {AXIS_WORDS[axis]} no run is ahead of A beyond the noise.")
    return " ".join(lines) or "No winner can be named: the runs have no validation loss at a common point."


def place(axis: Axis, x: float) -> str:
    """Where on an axis, in the words of that axis."""
    if axis == "step":
        return f"step {count(round(x))}"
    if axis == "tokens":
        return f"{si(x)} tokens"
    return duration(x) if axis == "seconds" else f"{x:.2e} FLOPs".replace("e+", "e")
