"""Where a run is heading: its own curve and the loss law together, to its own end and to the others' time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gptfit.compare.axes import Curve, curve, value_at
from gptfit.compare.facts import RunFacts, run_letter
from gptfit.compare.noise import eval_error
from gptfit.estimate import Estimate
from gptfit.plan.loss import ALPHA, LEAST_TOKENS, recipe_loss

# Evals that say where the run is now, relative to the law.
RECENT_EVALS = 3
FEWEST_EVALS = 4
# Half-width per e-fold of further tokens. On three public RTX 4070 logs cut at 2,500 to 10,000 steps, the law moved to
# the last evals misses the true end by at most 0.044 per e-fold, 0.03 typically.
ERROR_PER_EFOLD = 0.03


@dataclass(frozen=True)
class Projection:
    """Validation loss of one run where it ends (measured, if it is there) or where another does, if that is further."""

    run: int
    target: str  # "its own end" | "the end of B"
    step: float
    seconds: float | None
    loss: Estimate


def project_runs(runs: tuple[RunFacts, ...], bpb: bool = False) -> tuple[Projection, ...]:
    """Each run to its own end, then to the training time at which each other run ends.

    What a run has passed is not said here: the table of equal training time has it.
    """
    found: list[Projection] = []
    for i, run in enumerate(runs):
        if run.max_iters:
            found += _to_step(i, run, run.max_iters, "its own end", bpb)
        for j, other in enumerate(runs):
            end = other.total_seconds or other.seconds
            if i == j or end is None or not run.ms_per_step or _close(end, run.total_seconds):
                continue
            if run.seconds is None or end > run.seconds:
                found += _to_step(i, run, end * 1000 / run.ms_per_step, f"{run_letter(j)}'s end", bpb)
    return tuple(found)


def _close(end: float, own_end: float | None) -> bool:
    """The other's end is this run's own end too: nothing new to say."""
    return own_end is not None and abs(end / own_end - 1) < 0.02


def _to_step(index: int, run: RunFacts, step: float, target: str, bpb: bool) -> list[Projection]:
    loss = project_loss(run, step)
    scale = run.bits_per_byte_per_nat if bpb else 1.0
    if loss is None or scale is None:
        return []
    at_usual_speed = step * run.ms_per_step / 1000 if run.ms_per_step else None
    seconds = run.total_seconds if step == run.max_iters else at_usual_speed
    return [Projection(index, target, step, seconds, loss.map(scale))]


def project_loss(run: RunFacts, step: float) -> Estimate | None:
    """Measured where an eval is there; else the law, moved to pass through the last evals, with the run's own
    extrapolated curve as the other end of the range."""
    points = curve(run, "step")
    if len(points) < FEWEST_EVALS:
        return None
    last = points[-1][0]
    if step <= last * 1.001:
        return _measured(points, step)
    ends = [predict(step) for predict in (_by_law(run, points, step), _by_own_curve(points)) if predict is not None]
    if min(ends) <= 0:
        return None  # no loss is: the curve is not one that the law knows
    margin = ERROR_PER_EFOLD * math.log(step / last) + 2 * eval_error(run).nats
    return Estimate(ends[0], max(0.0, min(ends) - margin), max(ends) + margin, "fit")


def _measured(points: Curve, step: float) -> Estimate | None:
    """Between two evals as the tables have it, so that one question has one answer. What was measured has no range."""
    value = value_at(points, min(step, points[-1][0]))
    return None if value is None else Estimate(value, value, value, "measured")


def _by_law(run: RunFacts, points: Curve, end: float) -> Callable[[float], float] | None:
    if run.parameters is None or run.tokens_per_step is None or run.tokenizer not in (None, "gpt2"):
        return None  # the law is fitted to GPT-2's tokens
    if points[-1][0] * run.tokens_per_step < LEAST_TOKENS:
        return None  # below its reach it falls so steeply that a short run would end below zero
    parameters = float(run.shape.tied_parameters if run.shape else run.parameters)
    tables = run.shape.value_tables if run.shape else 0
    per_step = run.tokens_per_step
    unique = run.train_tokens or end * per_step
    recipe = str(run.config.get("arch", "gpt2")), str(run.config.get("optimizer", "adamw"))

    def law(step: float) -> float:
        return recipe_loss(parameters, step * per_step, unique, *recipe, tables)

    recent = points[-RECENT_EVALS:]
    offset = sum(y - law(x) for x, y in recent) / len(recent)
    return lambda step: law(step) + offset


def _by_own_curve(points: Curve) -> Callable[[float], float]:
    """a + b * step^-c through the second half of the evals, by least squares with the law's exponent."""
    half = [(x**-ALPHA, y) for x, y in points if x >= 0.4 * points[-1][0]]
    mean_x, mean_y = (sum(column) / len(half) for column in zip(*half, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in half)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in half) / spread if spread else 0.0
    slope = max(slope, 0.0)  # a run that gets worse is not extrapolated downwards, nor upwards
    return lambda step: mean_y + slope * (step**-ALPHA - mean_x)
