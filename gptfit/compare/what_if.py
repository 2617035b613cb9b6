"""What plan predicts for every combination of the changes, and the tune command that would measure it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gptfit import measured
from gptfit.compare.changes import MICRO_BATCH, Change
from gptfit.compare.facts import RunFacts
from gptfit.config.keys import DEFAULTS, KEYS, TUNABLE, TrainConfig
from gptfit.estimate import Estimate
from gptfit.gpus import GPU
from gptfit.plan.calibration import Calibration, newest, place_for
from gptfit.plan.resolve import PLANNED_KEYS, setting_of
from gptfit.plan.speed import Speed, from_calibration, predict
from gptfit.shell import command

if TYPE_CHECKING:
    from gptfit.compare.comparison import Comparison

# Keys that make a speed measurement of a model what it is; the rest of a config does not change a step's time.
SPEED_KEYS = tuple(name for name, key in KEYS.items() if "speed" in key.affects or name == "tokens_per_step")
MOST_CHANGES = 4  # 16 rows; beyond that a table explains nothing


@dataclass(frozen=True)
class WhatIf:
    """The first run with some of the changes made. `measured` is what the log says, where a run did exactly this."""

    changes: tuple[str, ...]
    predicted: Estimate  # tokens/s
    mfu: float | None
    measured: float | None


def what_if(comparison: Comparison) -> tuple[WhatIf, ...]:
    """All combinations of what changed between the first two runs and bears on speed, from none to all."""
    if len(comparison.runs) != 2:
        return ()
    a, b = comparison.runs
    base, gpu = a.as_config(), a.gpu
    changes = [change for change in comparison.differences.changed if change.on_speed and _modelled(change)]
    own = newest(measured.read(), a.device_name) if a.device_name and a.device_name == b.device_name else None
    if gpu != b.gpu or (gpu is None and own is None):
        return ()
    if base is None or not 1 <= len(changes) <= MOST_CHANGES:
        return ()
    found = []
    for size in range(len(changes) + 1):
        for chosen in itertools.combinations(changes, size):
            found.append(_predict(base, b, gpu, chosen, _seen(a, b, chosen, changes), own))
    return tuple(row for row in found if row is not None)


def _modelled(change: Change) -> bool:
    return bool(change.keys) and all(key in PLANNED_KEYS for key in change.keys)


def _seen(a: RunFacts, b: RunFacts, chosen: tuple[Change, ...], changes: list[Change]) -> float | None:
    """The measured speed where the combination is one of the two runs themselves, as far as plan can tell."""
    if not chosen:
        return a.tokens_per_s
    return b.tokens_per_s if len(chosen) == len(changes) else None


def _predict(
    base: TrainConfig,
    b: RunFacts,
    gpu: GPU | None,
    chosen: tuple[Change, ...],
    seen: float | None,
    own: Calibration | None,
) -> WhatIf | None:
    """On a card, or on what was calibrated."""
    values = base.as_dict() | {key: b.config[key] for change in chosen for key in change.keys}
    config = TrainConfig.unchecked(**values)
    setting = setting_of(config, config.shape(), place_for(gpu, None, own), b.processes)
    speed: Speed | None = None
    if gpu is not None:
        speed = predict(setting, gpu, calibrated=own)
    elif own is not None and own.knows(setting):
        speed = from_calibration(setting, own)
    if speed is None:
        return None
    return WhatIf(tuple(change.key for change in chosen), speed.tokens_per_s, speed.mfu, seen)


def tune_command(comparison: Comparison) -> str | None:
    """`gptfit tune` on the second run's model, where the micro-batch or a key it can vary is among several changes."""
    if len(comparison.runs) != 2 or not comparison.confounded:
        return None
    changed = {
        key for change in comparison.differences.changed if change.on_speed for key in (change.key, *change.keys)
    }
    also = [key for key in TUNABLE if key in changed]
    b = comparison.runs[1]
    if b.as_config() is None or not (MICRO_BATCH in changed or also):
        return None
    words = ["gptfit", "tune", *_config_words(b)]
    return command(words + (["--also", ",".join(also)] if also else []))


def _config_words(run: RunFacts) -> Iterable[str]:
    """The config file where one is known, else every key that matters to speed and is not the default."""
    if run.config_file:
        return [run.config_file]
    keys = [key for key in SPEED_KEYS if _said(run.config, key)]
    return [f"--{key}={run.config[key]}" for key in keys]


def _said(config: dict[str, Any], key: str) -> bool:
    return key in config and config[key] != DEFAULTS[key]
