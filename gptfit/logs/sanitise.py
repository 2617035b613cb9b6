"""The only way from a log's JSON to events: values of the wrong type or size are as if they had not been said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from gptfit import sane
from gptfit.config.keys import KEYS
from gptfit.config.read import coerce
from gptfit.errors import ConfigError
from gptfit.logs.events import EVENT_WORDS, DataSaid, DeviceSaid, End, Eval, Event, Header, Message, Sample, Step
from gptfit.shape import ModelShape

LARGEST = 1e18  # parameters, tokens, FLOPs: nothing real is larger
LARGEST_STEP_FLOPS = 1e30
LONGEST_MS = 1e12
LARGEST_CONFIG_NUMBER = 10**12
LONGEST_NAME = 400
LONGEST_TEXT = 100_000  # of a sample or a message


def event_from_json(values: Any) -> Event | None:
    """None for what is no event, and for a step or eval that does not say which."""
    if not isinstance(values, dict):
        return None
    word = values.get("event")
    read = _READERS.get(word) if isinstance(word, str) else None
    return read(values) if read else None


def header_from_json(values: Mapping[str, Any]) -> Header:
    return Header(
        name=name(values.get("name")),
        kind=name(values.get("kind")) or "gptfit",
        config=_config(_mapping(values.get("config"))),
        config_file=name(values.get("config_file")),
        shape=_shape(_mapping(values.get("shape"))),
        parameters=whole(values.get("parameters")),
        flops_per_token=positive(values.get("flops_per_token")),
        flops_per_step=positive(values.get("flops_per_step"), LARGEST_STEP_FLOPS),
        tokens_per_step=whole(values.get("tokens_per_step")),
        processes=min(whole(values.get("processes")) or 1, sane.MOST_SIDE),
        memory_gib=positive(values.get("memory_gib")),
        device=_device(_mapping(values.get("device"))),
        dataset=_data(_mapping(values.get("dataset"))),
        versions={str(key): said for key, value in _mapping(values.get("versions")).items() if (said := name(value))},
        git=_mapping(values.get("git")),
        time=finite(values.get("time")),
    )


def finite(value: Any) -> float | None:
    """A number that can be drawn and compared, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e300:
        return None
    return float(value)


def positive(value: Any, most: float = LARGEST) -> float | None:
    number = finite(value)
    return number if number is not None and 0 < number <= most else None


def whole(value: Any) -> int | None:
    number = positive(value)
    return int(value) if number is not None and number == int(value) else None


def name(value: Any) -> str | None:
    return text(value, LONGEST_NAME)


def text(value: Any, longest: int = LONGEST_TEXT) -> str | None:
    """Text that can be written as UTF-8: half of a surrogate pair, which JSON can spell, becomes a question mark."""
    if not isinstance(value, str) or not value:
        return None
    return value[:longest].encode("utf-8", errors="replace").decode()


def _step_number(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def _mapping(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _milliseconds(value: Any) -> float | None:
    return positive(value, LONGEST_MS)


_STEP_FIELDS: dict[str, Callable[[Any], Any]] = dict.fromkeys(
    [item.name for item in fields(Step) if item.name != "step"], finite
) | {"ms": _milliseconds, "tokens_per_s": positive, "memory_gib": positive}


def _step(values: dict[str, Any]) -> Step | None:
    step = _step_number(values.get("step"))
    if step is None:
        return None
    # There may be a million of these: what is plainly a good number is not looked at twice.
    said = map(values.get, _STEP_FIELDS)
    rest = [
        value if value is None or (type(value) is float and 0 < value <= LONGEST_MS) else read(value)
        for value, read in zip(said, _STEP_FIELDS.values(), strict=True)
    ]
    return Step(step, *rest)


def _eval(values: dict[str, Any]) -> Eval | None:
    step = _step_number(values.get("step"))
    if step is None:
        return None
    return Eval(
        step=step,
        train_loss=finite(values.get("train_loss")),
        val_loss=finite(values.get("val_loss")),
        val_bpb=finite(values.get("val_bpb")),
        tokens=finite(values.get("tokens")),
        eval_tokens=whole(values.get("eval_tokens")),
        ms=_milliseconds(values.get("ms")),
        seconds=finite(values.get("seconds")),
        time=finite(values.get("time")),
    )


def _sample(values: dict[str, Any]) -> Sample | None:
    step = _step_number(values.get("step"))
    if step is None:
        return None
    prompt, said = text(values.get("prompt")), text(values.get("text"))
    return Sample(step, prompt or "", said or "", time=finite(values.get("time")))


def _message(values: dict[str, Any]) -> Message:
    return Message(
        kind=name(values.get("kind")) or "note",
        message=text(values.get("message")) or "",
        step=_step_number(values.get("step")),
        seconds=finite(values.get("seconds")),
        batch_size=whole(values.get("batch_size")),
        chunked_loss=True if values.get("chunked_loss") is True else None,
        value=finite(values.get("value")),
        time=finite(values.get("time")),
    )


def _end(values: dict[str, Any]) -> End:
    return End(
        reason=name(values.get("reason")),
        step=_step_number(values.get("step")),
        seconds=finite(values.get("seconds")),
        best_val_loss=finite(values.get("best_val_loss")),
        time=finite(values.get("time")),
    )


_READERS: dict[str, Callable[[dict[str, Any]], Event | None]] = {
    EVENT_WORDS[Header]: header_from_json,
    EVENT_WORDS[Step]: _step,
    EVENT_WORDS[Eval]: _eval,
    EVENT_WORDS[Sample]: _sample,
    EVENT_WORDS[Message]: _message,
    EVENT_WORDS[End]: _end,
}


def _device(values: dict[Any, Any]) -> DeviceSaid:
    words = ("name", "kind", "dtype", "gpu", "gpu_basis", "peak_basis")
    chunked = values.get("chunked_loss")
    return DeviceSaid(
        **{word: name(values.get(word)) for word in words},
        peak_tflops=positive(values.get("peak_tflops")),
        chunked_loss=chunked if isinstance(chunked, bool) else None,
    )


def _data(values: dict[Any, Any]) -> DataSaid:
    return DataSaid(
        folder=name(values.get("folder")),
        tokenizer=name(values.get("tokenizer")),
        tokenizer_sha256=name(values.get("tokenizer_sha256")),
        vocab_size=whole(values.get("vocab_size")),
        train_tokens=whole(values.get("train_tokens")),
        val_tokens=whole(values.get("val_tokens")),
        bytes_per_token=positive(values.get("bytes_per_token")),
        chat=name(values.get("chat")),
    )


def _config(values: dict[Any, Any]) -> dict[str, Any]:
    """Known keys in their types; numbers that no config has are dropped."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key not in KEYS or (is_number and not abs(value) <= LARGEST_CONFIG_NUMBER):
            continue
        try:
            known = coerce(key, value, "log")
        except ConfigError:
            continue
        kept[key] = name(known) or "" if isinstance(known, str) else known
    return kept


def _shape(values: dict[Any, Any]) -> ModelShape | None:
    """The inventory needs whole positive sides; a shape with anything else is no shape."""
    sides = [values.get(key) for key in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")]
    if not sane.are_sides(sides, values.get("n_layer")):
        return None
    known = {item.name: values[item.name] for item in fields(ModelShape) if item.name in values}
    kinds = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}
    fitting = all(type(known[item.name]) in kinds[str(item.type)] for item in fields(ModelShape) if item.name in known)
    return ModelShape(**known) if fitting else None
