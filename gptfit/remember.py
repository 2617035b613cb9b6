"""What a finished run teaches about this machine and this data, as lines for the cache of measured facts."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

from gptfit.measured import MeasuredLoss, MeasuredSpeed, speed_key
from gptfit.runlog import RunLog
from gptfit.shape import ModelShape

LEAST_STEPS = 20  # fewer say more about warming up than about speed
FINISHED = "max_iters"  # only a run that decayed its rate to the end says what a run ends at


def of_run(log: RunLog) -> list[MeasuredSpeed | MeasuredLoss]:
    """Nothing for a log that does not say what it ran, where, or that it ended."""
    if log.end is None:
        return []
    try:
        found = [_speed(log), _loss(log)]
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return []  # another version's header, or a foreign log's
    return [record for record in found if record is not None]


def _speed(log: RunLog) -> MeasuredSpeed | None:
    config, device, processes = log.header["config"], log.header["device"], log.header["processes"]
    steps = [step for step in log.steps[1:] if isinstance(step.get("ms"), int | float) and step["ms"] > 0]
    ran_out = any(event.get("kind") == "oom" for event in log.events)  # the micro-batch is not the config's any more
    if len(steps) < LEAST_STEPS or processes != 1 or ran_out:
        return None
    shape, micro_batch = _shape(log), int(config["batch_size"])
    micro_tokens = micro_batch * shape.block_size
    micro_steps = int(log.header["tokens_per_step"]) // micro_tokens
    ms = median(step["ms"] for step in steps) / micro_steps
    peak_gib = max((step.get("memory_gib") or 0.0 for step in steps), default=0.0) or None
    on_card = device["kind"] == "cuda"
    return MeasuredSpeed(
        key=speed_key(
            device["name"],
            shape,
            micro_batch,
            dtype=device["dtype"],
            compile=any(event.get("kind") == "compile" for event in log.events),  # it may have been tried and failed
            chunked_loss=config["chunked_loss"] is True,
            checkpoint_activations=bool(config["checkpoint_activations"]),
            optimizer=config["optimizer"],
        ),
        torch=log.header["versions"]["torch"],
        tokens_per_s=1e3 * micro_tokens / ms,
        ms_per_micro_step=ms,
        ms_per_update=0.0,  # a step's time has it already
        allocated_gib=peak_gib if on_card else None,
        device_gib=None if on_card else peak_gib,
        source="train",
        time=_time(log),
    )


def _loss(log: RunLog) -> MeasuredLoss | None:
    config, data = log.header["config"], log.header["dataset"]
    if log.end is None or log.end.get("reason") != FINISHED or not log.evals:
        return None
    last = log.evals[-1]
    if not isinstance(last.get("val_loss"), float) or config.get("init_from") not in ("scratch", "resume"):
        return None
    return MeasuredLoss(
        dataset=Path(data["folder"]).name,
        tokenizer=data["tokenizer"],
        parameters=_shape(log).tied_parameters,
        tokens=int(last["tokens"]),
        unique_tokens=data["train_tokens"],
        arch=config["arch"],
        optimizer=config["optimizer"],
        val_loss=last["val_loss"],
        run=log.name,
        time=_time(log),
    )


def _shape(log: RunLog) -> ModelShape:
    values: dict[str, Any] = log.header["shape"]
    known = {field.name for field in fields(ModelShape)}
    return ModelShape(**{name: value for name, value in values.items() if name in known})


def _time(log: RunLog) -> float:
    end = log.end or {}
    time = end.get("time", log.header.get("time", 0.0))
    return float(time) if isinstance(time, int | float) else 0.0
