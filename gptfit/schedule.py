"""Learning rate, momentum and batch as pure functions of the step: cosine (nanoGPT's), wsd, linear, constant."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

# The first updates, over which momentum rises: nanochat's 400, a tenth of a run that is shorter than 4,000.
MOMENTUM_STEPS, MOMENTUM_FRACTION = 400, 0.1


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
    @property
    def max_iters(self) -> int: ...
    @property
    def momentum(self) -> float: ...
    @property
    def momentum_start(self) -> float: ...
    @property
    def momentum_end(self) -> float: ...
    @property
    def cautious_decay(self) -> bool: ...
    @property
    def lookahead(self) -> float: ...
    @property
    def average_tail(self) -> float: ...


@dataclass(frozen=True)
class Knobs:
    """What an update is turned to. Muon's momentum and share of the weight decay; None leaves them as they are."""

    rate: float
    momentum: float | None = None
    decay_share: float | None = None
    lookahead: float = 0.0
    is_averaged: bool = False  # the weights after it are part of the tail's average


def knobs(config: ScheduleKeys, step: int) -> Knobs:
    """All of update number `step` (from 0): a function of the step alone, so that a resumed run has the same."""
    share = max(0.0, 1.0 - step / config.max_iters) if config.cautious_decay and config.max_iters else 1.0
    is_averaged = config.average_tail > 0 and step >= (1 - config.average_tail) * config.max_iters
    return Knobs(learning_rate(config, step), momentum(config, step), share, lookahead(config, step), is_averaged)


# Updates 500 to 2,400 of 3,125 in modded-nanogpt's record.
LOOKAHEAD_FROM, LOOKAHEAD_UNTIL = 0.16, 0.768


def lookahead(config: ScheduleKeys, step: int) -> float:
    """In the middle of the run, in proportion to the rate."""
    if not LOOKAHEAD_FROM * config.max_iters <= step < LOOKAHEAD_UNTIL * config.max_iters or not config.learning_rate:
        return 0.0
    return config.lookahead * learning_rate(config, step) / config.learning_rate


def momentum(config: ScheduleKeys, step: int) -> float:
    """From momentum_start up to momentum over the first updates, down to momentum_end with the rate."""
    rise = max(1.0, min(MOMENTUM_STEPS, MOMENTUM_FRACTION * config.max_iters))
    if config.momentum_start and step < rise:
        return config.momentum_start + step / rise * (config.momentum - config.momentum_start)
    begin = decay_start(config)
    if not config.momentum_end or begin is None or step <= begin:
        return config.momentum
    progress = min(1.0, (step - begin) / max(1, config.lr_decay_iters - begin))
    return config.momentum + progress * (config.momentum_end - config.momentum)


WARMUP_FRACTION = 0.03  # GPT-3 warms up over 375M of 300B tokens; short runs need relatively more, nanoGPT's owt 0.3 %


def usual_warmup(max_iters: int) -> int:
    """Three per cent of the run, nanoGPT's 2,000 at most, 10 at least."""
    return max(min(10, max_iters), min(2_000, round(max_iters * WARMUP_FRACTION)))


# A batch that grows has these parts of its micro-steps, each for as many updates, before it has all.
GROWING_PARTS = (4, 2)


def batch_part(grow_iters: int, step: int) -> int:
    """1 over the share of its micro-steps that update number `step` has."""
    stage = len(GROWING_PARTS) * step // grow_iters if step < grow_iters else len(GROWING_PARTS)
    return GROWING_PARTS[stage] if stage < len(GROWING_PARTS) else 1


def batches_until(grow_iters: int, step: int) -> float:
    """How many whole batches all updates before `step` have read; a multiple of the smallest part."""
    count = len(GROWING_PARTS)
    bounds = [-(-grow_iters * stage // count) for stage in range(count + 1)]
    stages = zip(GROWING_PARTS, bounds, bounds[1:], strict=False)
    return sum(max(0, min(step, end) - start) / part for part, start, end in stages) + max(0, step - grow_iters)


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
