"""Learning rate as a pure function of the step: cosine (nanoGPT's), wsd, linear, constant."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol


class ScheduleKeys(Protocol):
    """The keys a schedule reads; TrainConfig has them all."""

    @property
    def schedule(self) -> str: ...
    @property
    def decay_lr(self) -> bool: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def min_lr(self) -> float: ...
    @property
    def warmup_iters(self) -> int: ...
    @property
    def lr_decay_iters(self) -> int: ...
    @property
    def decay_fraction(self) -> float: ...


def learning_rate(config: ScheduleKeys, step: int) -> float:
    """The rate used for update number `step` (from 0), as nanoGPT's get_lr."""
    if not config.decay_lr:
        return config.learning_rate
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if config.schedule == "constant":
        return config.learning_rate
    if step > config.lr_decay_iters:
        return config.min_lr
    share = SCHEDULES[config.schedule](config, step)
    return config.min_lr + share * (config.learning_rate - config.min_lr)


def decay_start(config: ScheduleKeys) -> int | None:
    """The first step of wsd's decay: until it every update had the full rate, so a longer run can go on from there."""
    if config.schedule != "wsd" or not config.decay_lr:
        return None
    return max(config.warmup_iters, math.ceil(config.lr_decay_iters - _decay_steps(config)))


def _progress(config: ScheduleKeys, step: int) -> float:
    length = config.lr_decay_iters - config.warmup_iters
    return (step - config.warmup_iters) / length if length > 0 else 1.0


def _cosine(config: ScheduleKeys, step: int) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * _progress(config, step)))


def _linear(config: ScheduleKeys, step: int) -> float:
    return 1.0 - _progress(config, step)


def _wsd(config: ScheduleKeys, step: int) -> float:
    """Warm-up, stable, decay: flat until the last `decay_fraction` of the horizon, then straight down."""
    return min(1.0, (config.lr_decay_iters - step) / _decay_steps(config))


def _decay_steps(config: ScheduleKeys) -> float:
    return max(1.0, config.decay_fraction * config.lr_decay_iters)


# From a schedule's name to the share of (learning_rate - min_lr) that is left at a step.
SCHEDULES: dict[str, Callable[[ScheduleKeys, int], float]] = {"cosine": _cosine, "linear": _linear, "wsd": _wsd}
SCHEDULE_NAMES = (*SCHEDULES, "constant")
