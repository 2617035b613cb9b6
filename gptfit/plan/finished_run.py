"""What a finished run teaches later plans: its speed and its loss, as lines of the cache of measured facts."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from gptfit.config.keys import TrainConfig
from gptfit.logs.runlog import RunLog
from gptfit.measured import MeasuredLoss, MeasuredSpeed
from gptfit.plan.resolve import Place, setting_of
from gptfit.plan.setting import Setting, speed_key
from gptfit.shape import ModelShape

LEAST_STEPS = 20  # fewer say more about warming up than about speed
FINISHED = "max_iters"  # only a run that decayed its rate to the end says what a run ends at


def of_run(log: RunLog) -> list[MeasuredSpeed | MeasuredLoss]:
    """Nothing for a log that does not say what it ran, where, or that it ended."""
    if log.end is None or log.header.shape is None:
        return []
    try:
        found = [_speed(log, log.header.shape), _loss(log, log.header.shape)]
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return []  # another version's header, or a foreign log's
    return [record for record in found if record is not None]


def _speed(log: RunLog, shape: ModelShape) -> MeasuredSpeed | None:
    device = log.header.device
    times = [step.ms for step in log.steps[1:] if step.ms is not None]
    ran_out = "oom" in _told(log)  # the micro-batch is not the config's any more
    if len(times) < LEAST_STEPS or log.header.processes != 1 or ran_out or not (device.name and device.dtype):
        return None
    micro_tokens = int(log.header.config["batch_size"]) * shape.block_size
    micro_steps = (log.header.tokens_per_step or 0) // micro_tokens
    ms = median(times) / micro_steps
    peak_gib = max((step.memory_gib or 0.0 for step in log.steps), default=0.0) or None
    on_card = device.kind == "cuda"
    return MeasuredSpeed(
        key=speed_key(_setting(log, shape), device.name),
        torch=log.header.versions["torch"],
        tokens_per_s=1e3 * micro_tokens / ms,
        ms_per_micro_step=ms,
        ms_per_update=0.0,  # a step's time has it already
        allocated_gib=peak_gib if on_card else None,
        device_gib=None if on_card else peak_gib,
        source="train",
        time=_time(log),
    )


def _setting(log: RunLog, shape: ModelShape) -> Setting:
    """What really ran: the header says what the device made of the keys that were left open."""
    config, device = log.header.config, log.header.device
    ran = {
        "dtype": device.dtype,
        "compile": "compile" in _told(log),  # it may have been tried and failed
        "chunked_loss": device.chunked_loss if device.chunked_loss is not None else config["chunked_loss"] is True,
    }
    return setting_of(TrainConfig.unchecked(**config | ran), shape, Place(kind=device.kind or "cuda"))


def _told(log: RunLog) -> set[str]:
    return {message.kind for message in log.messages}


def _loss(log: RunLog, shape: ModelShape) -> MeasuredLoss | None:
    config, data = log.header.config, log.header.dataset
    if log.end is None or log.end.reason != FINISHED or not log.evals:
        return None
    last = log.evals[-1]
    if last.val_loss is None or last.tokens is None or config.get("init_from") not in ("scratch", "resume"):
        return None
    return MeasuredLoss(
        dataset=Path(data.folder or "").name,
        tokenizer=data.tokenizer,
        parameters=shape.tied_parameters,
        tokens=int(last.tokens),
        unique_tokens=data.train_tokens,
        arch=config["arch"],
        optimizer=config["optimizer"],
        val_loss=last.val_loss,
        run=log.name,
        time=_time(log),
    )


def _time(log: RunLog) -> float:
    ended = log.end.time if log.end else None
    return ended or log.header.time or 0.0
