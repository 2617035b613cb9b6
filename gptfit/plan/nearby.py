"""This machine's CPU at a setting nobody timed: the arithmetic rate of the most similar run that was timed on it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from gptfit.estimate import Estimate
from gptfit.gpus import find_or_none
from gptfit.measured import MeasuredSpeed, Measurements, SpeedKey
from gptfit.plan.setting import Setting
from gptfit.plan.speed import Speed, from_measurement
from gptfit.shape import ModelShape

# The rate of one CPU from 2 x 64 to 6 x 384 layers x width, eager and compiled, lay within a factor of two either way.
ERROR = 2.0


def timed_on_cpu(measurements: Measurements) -> tuple[MeasuredSpeed, ...]:
    """What was timed on this machine's CPU: every device that is no card of the table."""
    return tuple(speed for speed in measurements.speeds if _is_no_card(speed.key.device))


@lru_cache  # propose asks for thousands of settings, and a name is compared with every card
def _is_no_card(device: str) -> bool:
    return find_or_none(device) is None


def scaled_speed(setting: Setting, measurements: Measurements) -> Speed | None:
    """At the FLOPs per second of the nearest timed run; None where nothing was timed here."""
    nearest = _nearest(setting, timed_on_cpu(measurements))
    if nearest is None:
        return None
    flops_per_s = _flops_per_token(nearest.key) * nearest.tokens_per_s
    seconds = setting.shape.flops_per_token * setting.micro_tokens / flops_per_s
    guess = replace(nearest, tokens_per_s=setting.micro_tokens / seconds, ms_per_micro_step=1e3 * seconds)
    exact = from_measurement(setting, replace(guess, ms_per_update=0.0))
    return replace(
        exact,
        tokens_per_s=_widely(exact.tokens_per_s),
        ms_per_step=_widely(exact.ms_per_step),
        ms_per_micro_step=_widely(exact.ms_per_micro_step),
    )


def _widely(estimate: Estimate) -> Estimate:
    return Estimate(estimate.value, estimate.value / ERROR, estimate.value * ERROR, "fit")


def _nearest(setting: Setting, timed: Iterable[MeasuredSpeed]) -> MeasuredSpeed | None:
    """In size first of all, then the same kind of model, the same number format, and the newest."""

    def distance(found: MeasuredSpeed) -> tuple[float, float]:
        size = abs(math.log(_flops_per_token(found.key) / setting.shape.flops_per_token))
        unlike = (found.key.arch != setting.shape.arch) + (found.key.dtype != setting.dtype)
        return size + unlike, -found.time

    return min(timed, key=distance, default=None)


@lru_cache
def _flops_per_token(key: SpeedKey) -> int:
    return ModelShape(
        key.n_layer, key.n_head, key.n_embd, key.block_size, key.vocab_size, key.bias, key.arch
    ).flops_per_token
