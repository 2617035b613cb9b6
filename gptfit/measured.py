"""Measured facts of this machine: one JSON line per speed trial or finished run, kept in the user's cache."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from gptfit.errors import RunError
from gptfit.shape import ModelShape

FILE_NAME = "measured.jsonl"
VERSION = 1


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
    checkpoint_activations: bool
    optimizer: str
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
class Measurements:
    """Everything read from the cache, oldest first; `skipped` counts lines that could not be used."""

    speeds: tuple[MeasuredSpeed, ...] = ()
    losses: tuple[MeasuredLoss, ...] = ()
    skipped: int = 0

    def speed(self, key: SpeedKey, left_open: Collection[str] = ()) -> MeasuredSpeed | None:
        """The newest timing of this setting; fields named in `left_open` may differ, as the machine decided them."""
        fixed = [field.name for field in fields(SpeedKey) if field.name not in left_open]
        matching = [s for s in self.speeds if all(getattr(s.key, name) == getattr(key, name) for name in fixed)]
        return max(matching, key=lambda speed: speed.time) if matching else None


def speed_key(
    device: str,
    shape: ModelShape,
    micro_batch: int,
    *,
    dtype: str,
    compile: bool,
    chunked_loss: bool,
    checkpoint_activations: bool,
    optimizer: str,
) -> SpeedKey:
    return SpeedKey(
        device=device,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_embd=shape.n_embd,
        block_size=shape.block_size,
        vocab_size=shape.vocab_size,
        bias=shape.bias,
        arch=shape.arch,
        micro_batch=micro_batch,
        dtype=dtype,
        compile=compile,
        chunked_loss=chunked_loss,
        checkpoint_activations=checkpoint_activations,
        optimizer=optimizer,
        ingredients=_ingredients(shape),
    )


def _ingredients(shape: ModelShape) -> str:
    """The switches of the modern block that are not at their default."""
    if shape.arch != "modern":
        return ""
    named = {field.name for field in fields(SpeedKey)}
    own = [field for field in fields(ModelShape) if field.name not in named]
    changed = [field.name for field in own if getattr(shape, field.name) != field.default]
    return " ".join(f"{name}={getattr(shape, name)}" for name in changed)


def cache_folder() -> Path:
    """$GPTFIT_CACHE, else ~/.cache/gptfit (or under $XDG_CACHE_HOME)."""
    named = os.environ.get("GPTFIT_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gptfit"


def cache_file() -> Path:
    return cache_folder() / FILE_NAME


def append(records: Iterable[MeasuredSpeed | MeasuredLoss], path: Path | None = None) -> Path:
    """Add lines to the cache; one write per call, so that two processes never interleave inside a line."""
    path = path or cache_file()
    text = "".join(json.dumps(_to_json(record), allow_nan=False) + "\n" for record in records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            if file.tell() and not _ends_with_newline(path):
                text = "\n" + text  # the last writer was killed mid-line
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunError(
            f"{path}: cannot keep what was measured ({error.strerror}); set GPTFIT_CACHE to a folder you own"
        ) from None
    return path


def read(path: Path | None = None) -> Measurements:
    """Everything in the cache; no file is an empty answer, a line that makes no sense is counted and skipped."""
    path = path or cache_file()
    speeds: list[MeasuredSpeed] = []
    losses: list[MeasuredLoss] = []
    skipped = 0
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return Measurements()
    for line in lines:
        record = _from_line(line)
        if isinstance(record, MeasuredSpeed):
            speeds.append(record)
        elif isinstance(record, MeasuredLoss):
            losses.append(record)
        elif line.strip():
            skipped += 1
    return Measurements(tuple(speeds), tuple(losses), skipped)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _to_json(record: MeasuredSpeed | MeasuredLoss) -> dict[str, Any]:
    kind = "speed" if isinstance(record, MeasuredSpeed) else "loss"
    return {"measured": kind, "version": VERSION, **asdict(record)}


def _from_line(line: bytes) -> MeasuredSpeed | MeasuredLoss | None:
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
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return None


_T = TypeVar("_T")


def _build(kind: type[_T], values: dict[str, Any]) -> _T:
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in names})


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0
