"""The events of a run log: header, step, eval, sample, message and end. None is what a log does not say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from gptfit.shape import ModelShape


@dataclass(frozen=True, slots=True)
class DeviceSaid:
    """What the run ran on. `gpu` is the card's name in the table of cards, `gpu_basis` where it was read from."""

    name: str | None = None
    kind: str | None = None
    dtype: str | None = None  # this and chunked_loss as the device decided them, never 'auto'
    chunked_loss: bool | None = None
    gpu: str | None = None
    gpu_basis: str | None = None
    peak_tflops: float | None = None
    peak_basis: str | None = None


@dataclass(frozen=True, slots=True)
class DataSaid:
    """What the run was trained on."""

    folder: str | None = None
    tokenizer: str | None = None
    tokenizer_sha256: str | None = None
    vocab_size: int | None = None
    train_tokens: int | None = None
    val_tokens: int | None = None
    bytes_per_token: float | None = None
    chat: str | None = None  # the template of its conversations, of which only the assistant's words count


@dataclass(frozen=True, slots=True)
class Header:
    """What the run was. `config` holds only keys gptfit knows, in their types."""

    name: str | None = None
    kind: str = "gptfit"  # the trainer: gptfit, nanogpt, nanochat
    config: dict[str, Any] = field(default_factory=dict)
    config_file: str | None = None
    shape: ModelShape | None = None
    parameters: int | None = None
    flops_per_token: float | None = None
    flops_per_step: float | None = None  # of all cards; from the log's own MFU where the model is not known
    tokens_per_step: int | None = None
    processes: int = 1
    memory_gib: float | None = None
    device: DeviceSaid = DeviceSaid()
    dataset: DataSaid = DataSaid()
    versions: dict[str, str] = field(default_factory=dict)
    git: dict[str, Any] = field(default_factory=dict)
    time: float | None = None


@dataclass(slots=True)  # not frozen: that would take six times as long to make, and a log may hold a million
class Step:
    """One update. `ms` is there only where it was timed alone; `seconds` is training time so far, evals left out."""

    step: int
    loss: float | None = None
    lr: float | None = None
    ms: float | None = None
    tokens: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    grad_norm: float | None = None
    memory_gib: float | None = None
    epoch: float | None = None
    seconds: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    clock_mhz: float | None = None
    time: float | None = None


@dataclass(frozen=True, slots=True)
class Eval:
    """One evaluation, taken before update `step`; in nats per token, or in bits per byte where a trainer prints those."""

    step: int
    train_loss: float | None = None
    val_loss: float | None = None
    val_bpb: float | None = None
    tokens: float | None = None
    eval_tokens: int | None = None
    ms: float | None = None
    seconds: float | None = None
    time: float | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """Something happened that a person should know: a checkpoint, a resume. Written as `event`."""

    kind: str
    message: str = ""
    step: int | None = None
    seconds: float | None = None
    batch_size: int | None = None
    chunked_loss: bool | None = None
    value: float | None = None
    time: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """What the model wrote after a prompt when it had done `step` updates; an empty prompt is the start of a document."""

    step: int
    prompt: str = ""
    text: str = ""
    time: float | None = None


@dataclass(frozen=True, slots=True)
class End:
    """Why the run stopped. A run that was killed has none."""

    reason: str | None = None
    step: int | None = None
    seconds: float | None = None
    best_val_loss: float | None = None
    time: float | None = None


Event = Header | Step | Eval | Sample | Message | End
EVENT_WORDS: dict[type, str] = {
    Header: "header",
    Step: "step",
    Eval: "eval",
    Sample: "sample",
    Message: "event",
    End: "end",
}


def event_json(event: Event) -> dict[str, Any]:
    """One line of run.jsonl. What is None is left out; NaN and infinity become null, as JSON has neither."""
    return {"event": EVENT_WORDS[type(event)], **_plain(event)}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value):
        named = {item.name: getattr(value, item.name) for item in fields(value)}
        return {name: _plain(item) for name, item in named.items() if item is not None}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
