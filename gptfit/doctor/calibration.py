"""Calibrate this device from outside: whole models and tiny trials in processes of their own; one record for all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from gptfit.config.keys import TrainConfig
from gptfit.doctor.calibrate import TINY, complete, tiny_config
from gptfit.errors import DeviceError
from gptfit.plan.calibration import Calibration, calibration_from_json
from gptfit.shape import ModelShape
from gptfit.tune.measuring import find_machine, make_measure
from gptfit.tune.space import base_variant
from gptfit.tune.trial_process import run_process
from gptfit.tune.trials import Candidate, Machine, Timing, timing_from_json

MODULE = "gptfit.doctor.card_process"
COMMAND = (sys.executable, "-m", MODULE)
CHECK = "costs"
LIMIT_S = 180.0  # beyond what it was given: the compiler's time is not foreseen
TRIAL_LIMIT_S = 120.0
TINY_S = 0.5  # dozens of micro-steps of next to nothing
USUAL_S = 135.0  # of a whole calibration
TINY_TRIALS_S = 12.0


def calibrate(
    config: TrainConfig,
    on_stage: Callable[[str], None] = lambda stage: None,
    machine: Machine | None = None,
    command: Sequence[str] = COMMAND,
    most_s: float = USUAL_S,
) -> Calibration:
    """By as many models as end in `most_s`; DeviceError where the device did not answer.

    `command` runs what is timed.
    """
    machine = machine or find_machine(config)
    compiled = config.compile and machine.compile_problem is None
    request = {"check": CHECK, "config": config.as_dict(), "compiled": compiled, "most_s": most_s - TINY_TRIALS_S}
    ended = run_process(request, most_s + LIMIT_S, on_stage, command)
    if ended.outcome != "ok":
        raise DeviceError(f"whole models could not be timed: {ended.message}", fix="see `gptfit doctor`")
    tiny = {}
    for is_compiled in (False, True) if compiled else (False,):
        on_stage(f"tiny model {'compiled' if is_compiled else 'eager'}")
        tiny[is_compiled] = _trial(tiny_config(config, is_compiled), TINY, machine)
    return complete(calibration_from_json(ended.values), tiny)


def _trial(config: TrainConfig, shape: ModelShape, machine: Machine) -> Timing:
    """As `tune` runs it, in a fresh process: a fork has not all of the memory of one."""
    here = replace(machine, dtype=config.dtype if config.dtype != "auto" else machine.dtype)
    measure = make_measure(config, shape, here, timed_s=TINY_S)
    ended = measure(Candidate(config.batch_size, base_variant(config, here)), False, TRIAL_LIMIT_S, lambda stage: None)
    if ended.outcome != "ok":
        raise DeviceError(f"a small model could not be timed: {ended.message}", fix="see `gptfit doctor`")
    return timing_from_json(ended.values)
