"""Calibrate this device from outside: pieces, whole models and tiny trials in processes of their own; one record for all."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gptfit.config.keys import TrainConfig
from gptfit.doctor.calibrate import TINY, complete, tiny_config
from gptfit.doctor.whole_models import Pass, settled
from gptfit.errors import DeviceError
from gptfit.plan.calibration import Calibration, calibration_from_json
from gptfit.shape import ModelShape
from gptfit.tune.measuring import find_machine, make_measure
from gptfit.tune.space import base_variant
from gptfit.tune.trial_process import run_process
from gptfit.tune.trials import Candidate, Machine, Timing, timing_from_json

MODULE = "gptfit.doctor.card_process"
COMMAND = (sys.executable, "-m", MODULE)
LIMIT_S = 300.0
TRIAL_LIMIT_S = 120.0
TINY_S = 0.5  # dozens of micro-steps of next to nothing
USUAL_S = 135.0  # of a whole calibration
AFTER_PIECES_S = 25.0  # whole models again and the tiny ones


def calibrate(
    config: TrainConfig,
    on_stage: Callable[[str], None] = lambda stage: None,
    machine: Machine | None = None,
    command: Sequence[str] = COMMAND,
    most_s: float = USUAL_S,
) -> Calibration:
    """As many rounds as end in `most_s`, at least one; DeviceError where the device did not answer.

    `command` runs what is timed.
    """
    until = time.monotonic() + most_s
    machine = machine or find_machine(config)
    compiled = config.compile and machine.compile_problem is None
    # Whole models before and after: a machine with neighbours is faster in one minute than in another.
    passes = [_whole_models(config, command, on_stage, compiled, is_first=True)]
    left_s = until - time.monotonic() - AFTER_PIECES_S
    found = calibration_from_json(_timed("pieces", config, command, on_stage, compiled=compiled, most_s=left_s))
    passes.append(_whole_models(config, command, on_stage))
    tiny = {}
    for is_compiled in (False, True) if compiled else (False,):
        on_stage(f"tiny model {'compiled' if is_compiled else 'eager'}")
        tiny[is_compiled] = _trial(tiny_config(config, is_compiled), TINY, machine)
    return complete(settled(found, passes), tiny, passes[0].saved)


def _whole_models(
    config: TrainConfig,
    command: Sequence[str],
    on_stage: Callable[[str], None],
    compiled: bool = False,
    is_first: bool = False,
) -> Pass:
    found = _timed("whole models", config, command, on_stage, is_first=is_first, compiled=compiled)
    return Pass(found["times"], found["saved"])


def _timed(
    what: str, config: TrainConfig, command: Sequence[str], on_stage: Callable[[str], None], **more: Any
) -> dict[str, Any]:
    """In a process of its own."""
    ended = run_process({"check": what, "config": config.as_dict(), **more}, LIMIT_S, on_stage, command)
    if ended.outcome != "ok":
        raise DeviceError(f"the {what} could not be timed: {ended.message}", fix="see `gptfit doctor`")
    return ended.values


def _trial(config: TrainConfig, shape: ModelShape, machine: Machine) -> Timing:
    """As `tune` runs it, in a fresh process: a fork has not all of the memory of one."""
    here = replace(machine, dtype=config.dtype if config.dtype != "auto" else machine.dtype)
    measure = make_measure(config, shape, here, timed_s=TINY_S)
    ended = measure(Candidate(config.batch_size, base_variant(config, here)), False, TRIAL_LIMIT_S, lambda stage: None)
    if ended.outcome != "ok":
        raise DeviceError(f"a small model could not be timed: {ended.message}", fix="see `gptfit doctor`")
    return timing_from_json(ended.values)
