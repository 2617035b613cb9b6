"""A log's header as it may be trusted: values of the wrong type or size are dropped at the door."""

from __future__ import annotations

import math
from typing import Any

from gptfit.config import FIELD_TYPES
from gptfit.configfile import coerce
from gptfit.errors import ConfigError
from gptfit.runlog import Event
from gptfit.shape import ModelShape

LARGEST = 1e18  # parameters, tokens, FLOPs: nothing real is larger
LONGEST_TEXT = 400
SANE_SIZE = 10**7  # a side of a model: layers, heads, width, context, vocabulary


def trusted_header(header: Event) -> Event:
    """The same header; what does not have the type its name promises is as if it had not been said."""
    device, dataset = _mapping(header.get("device")), _mapping(header.get("dataset"))
    return {
        "name": text(header.get("name")),
        "kind": text(header.get("kind")) or "gptfit",
        "config": _config(_mapping(header.get("config"))),
        "config_file": text(header.get("config_file")),
        "shape": _shape(_mapping(header.get("shape"))),
        "parameters": whole(header.get("parameters")),
        "tokens_per_step": whole(header.get("tokens_per_step")),
        "processes": min(whole(header.get("processes")) or 1, SANE_SIZE),
        "flops_per_token": positive(header.get("flops_per_token")),
        "flops_per_step": positive(header.get("flops_per_step"), 1e30),
        "memory_gib": positive(header.get("memory_gib")),
        "device": {key: text(device.get(key)) for key in ("name", "gpu", "gpu_basis", "peak_basis")}
        | {"peak_tflops": positive(device.get("peak_tflops"))},
        "dataset": {key: text(dataset.get(key)) for key in ("folder", "tokenizer", "tokenizer_sha256")}
        | {
            "bytes_per_token": positive(dataset.get("bytes_per_token")),
            "train_tokens": whole(dataset.get("train_tokens")),
        },
        "versions": {str(name): text(value) for name, value in _mapping(header.get("versions")).items() if text(value)},
    }


def finite(value: Any) -> float | None:
    """A number that can be drawn and compared, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        return None
    return float(value) if math.isfinite(value) else None


def positive(value: Any, most: float = LARGEST) -> float | None:
    number = finite(value)
    return number if number is not None and 0 < number <= most else None


def whole(value: Any) -> int | None:
    number = positive(value)
    return int(value) if number is not None and number == int(value) else None


def text(value: Any) -> str | None:
    return value[:LONGEST_TEXT] if isinstance(value, str) and value else None


def _mapping(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _config(values: dict[Any, Any]) -> dict[str, Any]:
    """Known keys in their types; numbers that no config has are dropped."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        if key not in FIELD_TYPES or (
            isinstance(value, int | float) and finite(value) is None and not isinstance(value, bool)
        ):
            continue
        try:
            known = coerce(key, value, "log")
        except ConfigError:
            continue
        too_large = isinstance(known, int) and not isinstance(known, bool) and abs(known) > 10**12
        if not too_large:
            kept[key] = known[:LONGEST_TEXT] if isinstance(known, str) else known
    return kept


def _shape(values: dict[Any, Any]) -> ModelShape | None:
    """The inventory needs whole positive sides; a shape with anything else is no shape."""
    sides = {key: values.get(key) for key in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
    if not all(
        isinstance(side, int) and not isinstance(side, bool) and 1 <= side <= SANE_SIZE for side in sides.values()
    ):
        return None
    known = {key: value for key, value in values.items() if key in ModelShape.__dataclass_fields__}
    plain = all(isinstance(value, bool | int | float | str) for value in known.values())
    shape = ModelShape(**known) if plain else None
    return shape if shape is not None and shape.n_layer <= 10_000 else None
