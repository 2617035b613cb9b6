"""Measured facts of this machine: one JSON line per speed trial or finished run, kept in the user's cache."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from gptfit import sane
from gptfit.errors import RunError
from gptfit.files import append_text, cache_folder, read_tail, reason_of

FILE_NAME = "measured.jsonl"
VERSION = 1
MOST_BYTES = 32 * 2**20  # of the file that are read, its end: a hundred thousand facts
LEAST, MOST = 1e-12, 1e18  # of any number measured: beyond them a division overflows


@dataclass(frozen=True)
class SpeedKey:
    """What must be equal for one timing to speak for another run on the same device."""

    device: str  # as torch names it: 'NVIDIA GeForce RTX 4070'; 'cpu (2 threads)' style for a CPU
    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int
    bias: bool
    arch: str
    micro_batch: int
    dtype: str  # resolved, never 'auto'
    compile: bool
    chunked_loss: bool  # resolved, never 'auto'
    checkpoint_activations: str | bool
    optimizer: str
    more: str = ""  # of the setting, where it is not the default: 'flash=False'
    ingredients: str = ""  # of arch='modern', where they are not the default: 'norm=layer smear=False'


@dataclass(frozen=True)
class MeasuredSpeed:
    """One timing. Unknown is None; `torch` is not part of the key, the newest matching line wins."""

    key: SpeedKey
    torch: str
    tokens_per_s: float  # of micro-steps alone
    ms_per_micro_step: float
    ms_per_update: float | None = None  # the optimizer's share of a step; 0: already in the micro-steps'
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    device_gib: float | None = None  # what nvidia-smi shows
    source: str = "tune"  # tune | train
    time: float = 0.0  # seconds since the epoch


@dataclass(frozen=True)
class MeasuredLoss:
    """How a finished run ended: what the loss law learns its offset from."""

    dataset: str
    tokenizer: str | None
    parameters: int
    tokens: int
    unique_tokens: int | None
    arch: str
    optimizer: str
    val_loss: float
    run: str = ""
    time: float = 0.0


@dataclass(frozen=True)
class MeasuredDevice:
    """What `doctor --card` timed of a device, as plan/calibration.py reads it."""

    device: str
    torch: str
    values: dict[str, Any]
    time: float = 0.0


@dataclass(frozen=True)
class Measurements:
    """Everything read from the cache, oldest first; `skipped` counts lines that could not be used."""

    speeds: tuple[MeasuredSpeed, ...] = ()
    losses: tuple[MeasuredLoss, ...] = ()
    skipped: int = 0
    devices: tuple[MeasuredDevice, ...] = ()

    def speed(self, key: SpeedKey, left_open: Collection[str] = ()) -> MeasuredSpeed | None:
        """The newest timing of this setting; fields named in `left_open` may differ, as the machine decided them."""
        fixed = [field.name for field in fields(SpeedKey) if field.name not in left_open]
        matching = [s for s in self.speeds if all(getattr(s.key, name) == getattr(key, name) for name in fixed)]
        return max(matching, key=lambda speed: speed.time) if matching else None


def cache_file() -> Path:
    return cache_folder() / FILE_NAME


Record = MeasuredSpeed | MeasuredLoss | MeasuredDevice
KINDS: dict[type, str] = {MeasuredSpeed: "speed", MeasuredLoss: "loss", MeasuredDevice: "device"}


def append(records: Iterable[Record], path: Path | None = None) -> Path:
    """Add lines to the cache; one write per call, so that two processes never interleave inside a line."""
    path = path or cache_file()
    text = "".join(json.dumps(_to_json(record), allow_nan=False) + "\n" for record in records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_text(path, text)
    except OSError as error:
        raise RunError(
            f"{path}: cannot keep what was measured ({reason_of(error)})", fix="set GPTFIT_CACHE to a folder you own"
        ) from None
    return path


def read(path: Path | None = None) -> Measurements:
    """Everything in the cache; no file is an empty answer, a line that makes no sense is counted and skipped."""
    path = path or cache_file()
    speeds: list[MeasuredSpeed] = []
    losses: list[MeasuredLoss] = []
    devices: list[MeasuredDevice] = []
    skipped = 0
    try:
        lines = read_tail(path, MOST_BYTES).splitlines()
    except OSError:
        return Measurements()
    for line in lines:
        record = _from_line(line)
        if isinstance(record, MeasuredSpeed):
            speeds.append(record)
        elif isinstance(record, MeasuredLoss):
            losses.append(record)
        elif isinstance(record, MeasuredDevice):
            devices.append(record)
        elif line.strip():
            skipped += 1
    return Measurements(tuple(speeds), tuple(losses), skipped, tuple(devices))


def _to_json(record: Record) -> dict[str, Any]:
    return {"measured": KINDS[type(record)], "version": VERSION, **asdict(record)}


def _from_line(line: bytes) -> Record | None:
    try:
        values = json.loads(line)
        if not isinstance(values, dict) or values.get("version") != VERSION:
            return None
        if values["measured"] == "speed":
            key = _build(SpeedKey, values["key"])
            speed = _build(MeasuredSpeed, {**values, "key": key})
            return speed if _positive(speed.tokens_per_s) and _positive(speed.ms_per_micro_step) else None
        if values["measured"] == "loss":
            loss = _build(MeasuredLoss, values)
            return loss if _positive(loss.val_loss) and _positive(loss.tokens) and _positive(loss.parameters) else None
        if values["measured"] == "device":
            return _build(MeasuredDevice, values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    return None


_T = TypeVar("_T")


def _build(kind: type[_T], values: dict[str, Any]) -> _T:
    """The record, once each value is of its field's type."""
    found = {field.name: values[field.name] for field in fields(kind) if field.name in values}  # type: ignore[arg-type]
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in found:
            _check_type(found[field.name], str(field.type), field.name)
    return kind(**found)


def _check_type(value: Any, said: str, name: str) -> None:
    """`said` is the annotation as it is written: str, float | None and so on."""
    wanted = said.removesuffix(" | None")
    if value is None and wanted != said:
        return
    if wanted == "str":
        sane.text(value, name)
    elif wanted == "bool":
        sane.flag(value, name)
    elif wanted == "int":
        sane.integer(value, name, 0, 2**53)
    elif wanted == "float":
        sane.number(value, name, 0, MOST)
    elif wanted.startswith("dict"):
        sane.mapping(value, name)


def _positive(value: float) -> bool:
    return value > LEAST
