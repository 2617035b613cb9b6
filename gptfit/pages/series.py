"""The points a chart draws: training steps thinned to what a screen can show, every eval, numbers rounded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gptfit.compare.facts import RunFacts
from gptfit.config.keys import TrainConfig
from gptfit.logs.events import Eval, Sample, Step
from gptfit.logs.runlog import RunLog
from gptfit.schedule import learning_rate

# Training points per page, shared by its runs. A screen has fewer columns; a point is about 60 bytes of JSON.
MOST_POINTS = 8000
MOST_EVALS = 2000
MOST_SAMPLES = 40
DIGITS = 6
STEP_COLUMNS = ("step", "loss", "seconds", "ms", "lr", "grad_norm", "memory_gib")
EVAL_COLUMNS = ("step", "train_loss", "val_loss", "val_bpb", "seconds")


def run_series(log: RunLog, facts: RunFacts, most_points: int = MOST_POINTS) -> dict[str, Any]:
    """Columns by name, thinned so that no spike is lost, plus what the page needs to change axes."""
    chosen = [log.steps[i] for i in thin([event.loss for event in log.steps], most_points)]
    evals = log.evals if len(log.evals) <= MOST_EVALS else [log.evals[i] for i in _evenly(len(log.evals), MOST_EVALS)]
    return {
        "steps": step_columns(chosen, facts.config),
        "evals": columns(evals, EVAL_COLUMNS),
        **scales(facts),
    }


def scales(facts: RunFacts) -> dict[str, float | None]:
    """What turns a step into tokens and FLOPs, and a step time into tokens/s and MFU."""
    return {
        "tokens_per_step": facts.tokens_per_step,
        "flops_per_token": facts.flops_per_token,
        "flops_per_step": facts.flops_per_step,
        "peak_tflops": facts.peak_tflops,
        "processes": facts.processes,
        "bits_per_byte_per_nat": facts.bits_per_byte_per_nat,
    }


def thin(values: Sequence[float | None], most: int) -> list[int]:
    """Indexes to keep: the lowest and highest of each of most/2 equal stretches, and both ends.

    >>> thin([3.0, 1.0, 2.0], 10)
    [0, 1, 2]
    """
    if len(values) <= most:
        return list(range(len(values)))
    numbers = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    edges = np.linspace(0, len(values), max(2, most // 2) + 1).astype(np.int64)
    keep = {0, len(values) - 1}
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        stretch = numbers[start:stop]
        if np.isnan(stretch).all():
            keep.add(start)  # a gap stays a gap
        else:
            keep.add(start + int(np.nanargmin(stretch)))
            keep.add(start + int(np.nanargmax(stretch)))
    return sorted(keep)


def step_columns(events: Sequence[Step], config: dict[str, Any]) -> dict[str, list[Any]]:
    """The step columns; a log without learning rates gets the schedule's, where the whole schedule is known."""
    found = columns(events, STEP_COLUMNS)
    schedule = ("learning_rate", "min_lr", "warmup_iters", "lr_decay_iters")
    if "lr" not in found and all(key in config for key in schedule):
        known = TrainConfig.unchecked(**config)
        found["lr"] = [rounded(learning_rate(known, event.step)) for event in events]
    return found


def columns(events: Sequence[Step] | Sequence[Eval], names: tuple[str, ...]) -> dict[str, list[Any]]:
    """One list per name; a name no event has is left out."""
    found: dict[str, list[Any]] = {}
    for name in names:
        values = [rounded(getattr(event, name)) for event in events]
        if name == "step" or any(value is not None for value in values):
            found[name] = values
    return found


def rounded(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.{DIGITS}g}")


def samples(made: Sequence[Sample]) -> list[dict[str, Any]]:
    """The latest, newest last: those made while it trained, with their prompt, and those asked for afterwards."""
    newest = sorted(made, key=lambda sample: sample.step)[-MOST_SAMPLES:]
    return [{"step": sample.step, "prompt": sample.prompt, "text": sample.text} for sample in newest]


def _evenly(count: int, most: int) -> list[int]:
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
