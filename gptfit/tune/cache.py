"""What `tune` leaves in the cache of measured facts, and the best micro-batch read back from it."""

from __future__ import annotations

import time
from dataclasses import replace

from gptfit.config.keys import TrainConfig
from gptfit.measured import MeasuredSpeed, Measurements
from gptfit.plan.setting import speed_key
from gptfit.shape import ModelShape
from gptfit.tune.rank import Score, winner
from gptfit.tune.space import base_variant, candidate_setting, divisors, usable_bytes
from gptfit.tune.trials import Candidate, Machine, Timing
from gptfit.units import GIB


def measured_speed(score: Score, config: TrainConfig, shape: ModelShape, machine: Machine) -> MeasuredSpeed:
    """A candidate's standing as one line of the cache; the newest line of a setting is the one that counts."""
    timing, micro_batch = score.timing, score.candidate.micro_batch
    expected = candidate_setting(config, shape, machine, score.candidate)
    ran = replace(expected, compile=timing.compiled, chunked_loss=timing.chunked_loss)
    key = speed_key(ran, timing.device)
    return MeasuredSpeed(
        key=key,
        torch=machine.torch,
        tokens_per_s=1e3 * micro_batch * shape.block_size / score.ms_per_micro_step,
        ms_per_micro_step=score.ms_per_micro_step,
        ms_per_update=timing.ms_per_update,
        allocated_gib=timing.allocated_gib,
        reserved_gib=timing.reserved_gib,
        device_gib=timing.device_gib,
        source="tune",
        time=time.time(),
    )


def best_known(
    config: TrainConfig,
    shape: ModelShape,
    machine: Machine,
    measurements: Measurements,
    processes: int = 1,
    headroom: float = 0.08,
) -> Score | None:
    """The winner among what `tune` measured here for this model and these settings; None when it has not.

    One size alone is no comparison, unless it is the only one that divides the step.
    """
    rows = config.tokens_per_iter(processes) // config.block_size // processes
    sizes = divisors(rows)
    scores = []
    for micro_batch in sizes:
        found = _newest(measurements, config, shape, machine, micro_batch)
        if found is not None:
            scores.append(_score(found, config, machine, rows))
    if len(scores) < min(2, len(sizes)):
        return None
    return winner(scores, (1 - headroom) * usable_bytes(machine) / GIB)


def _newest(
    measurements: Measurements, config: TrainConfig, shape: ModelShape, machine: Machine, micro_batch: int
) -> MeasuredSpeed | None:
    """`chunked_loss='auto'` was resolved by the trial, so either answer counts."""
    candidate = Candidate(micro_batch, base_variant(config, machine))
    wanted = speed_key(candidate_setting(config, shape, machine, candidate), machine.device)
    keys = [wanted]
    if config.chunked_loss == "auto":
        keys.append(replace(wanted, chunked_loss=not wanted.chunked_loss))
    matching = [
        speed
        for speed in measurements.speeds
        if speed.key in keys and speed.source == "tune" and speed.torch == machine.torch
    ]
    return max(matching, key=lambda speed: speed.time) if matching else None


def _score(speed: MeasuredSpeed, config: TrainConfig, machine: Machine, rows: int) -> Score:
    ms, update_ms = speed.ms_per_micro_step, speed.ms_per_update or 0.0
    timing = Timing(
        device=speed.key.device,
        chunked_loss=speed.key.chunked_loss,
        compiled=speed.key.compile,
        ms_per_micro_step=ms,
        ms_low=ms,
        ms_high=ms,
        samples=1,
        ms_per_update=update_ms,
        allocated_gib=speed.allocated_gib,
        reserved_gib=speed.reserved_gib,
        device_gib=speed.device_gib,
    )
    micro_batch = speed.key.micro_batch
    return Score(
        candidate=Candidate(micro_batch, base_variant(config, machine)),
        trials=1,
        ms_per_micro_step=ms,
        tokens_per_s=1e3 * rows * config.block_size / (ms * (rows // micro_batch) + update_ms),
        spread=0.0,
        memory_gib=timing.memory_gib,
        timing=timing,
    )
