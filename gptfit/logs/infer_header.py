"""The header of another program's log: its config from a file, the echo or the file name, checked against the log's own MFU."""

from __future__ import annotations

import re
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gptfit import sane
from gptfit.config.keys import DEFAULTS, GPTFIT_KEYS, NANOGPT_VOCAB_SIZE, TrainConfig
from gptfit.config.read import read_config_file
from gptfit.gpus import GPU, find_or_none
from gptfit.logs.events import Header
from gptfit.logs.nanogpt import flops_per_step_from_mfu
from gptfit.logs.parsed_log import ParsedLog
from gptfit.logs.sanitise import header_from_json
from gptfit.shape import ModelShape

SHAPE_KEYS = ("n_layer", "n_embd", "block_size")  # the number of heads changes no count
BATCH_KEYS = ("batch_size", "gradient_accumulation_steps", "block_size")
# The MFU is printed with two decimals and multiplied by a time: 12.87 % is known to 0.04 %. Forks count FLOPs alike.
MFU_AGREES = 0.01
# 12x384 (layers x width) and b16x32 (micro-batch x accumulation), as people name their logs.
_NAME_SHAPE = re.compile(r"(?<![\dx])(\d{1,3})x(\d{2,5})(?![\dx])")
_NAME_BATCH = re.compile(r"(?<![a-z])b(?:s|atch)?(\d{1,4})x(\d{1,4})(?![\dx])")
# 4070, rtx3090, 4070ti, a100, h100: words that can only be a card; the table decides.
_NAME_CARD = re.compile(r"(?:rtx|gtx)?\d{4}(?:ti|super|d)*|[abhv]\d00|gh200", re.I)
_DULL_NAMES = frozenset(
    ["log", "logs", "train", "training", "train_log", "out", "output", "stdout", "nohup", "slurm", "run"]
)


def build_header(path: Path, parsed: ParsedLog, config_path: Path | None) -> Header:
    """What is known about the run; None where the log does not say and nothing else was given."""
    # gptfit prints nanoGPT's lines and, unlike it, what its MFU is against.
    kind = "gptfit" if parsed.kind == "nanogpt" and "peak_tflops" in parsed.facts else parsed.kind
    config = _config(path, parsed, config_path)
    said: dict[str, Any] = {
        "name": _name(path),
        "kind": kind,
        "config": config,
        "config_file": str(config_path) if config_path else None,
        "tokens_per_step": _tokens_per_step(parsed, config),
        "device": _device(path, parsed),
        "memory_gib": parsed.facts.get("memory_gib"),
        "dataset": {"folder": config.get("dataset")},
    }
    said |= _nanogpt_facts(parsed, config, said) if parsed.kind == "nanogpt" else _printed_facts(parsed)
    return header_from_json(said)


def _printed_facts(parsed: ParsedLog) -> dict[str, Any]:
    """Other models are counted as their own programs count them."""
    return {key: parsed.facts.get(key) for key in ("parameters", "flops_per_token", "processes")}


def _nanogpt_facts(parsed: ParsedLog, config: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The model's figures from its shape, held against what the log itself prints."""
    found: dict[str, Any] = {}
    shape = _shape(config, parsed)
    counted = _check_parameters(shape.parameters if shape else None, parsed)
    if shape is not None and "parameters" not in counted:
        found = {"shape": asdict(shape), "parameters": shape.parameters, "flops_per_token": shape.flops_per_token}
    return found | counted | _check_against_mfu(found.get("flops_per_token"), said["tokens_per_step"], parsed)


def _name(path: Path) -> str:
    parent = path.resolve().parent.name
    return f"{parent}/{path.stem}" if path.stem.lower() in _DULL_NAMES and parent else path.stem


def _config(path: Path, parsed: ParsedLog, config_path: Path | None) -> dict[str, Any]:
    """A given file wins over the echo, the echo over the file name. Keys nothing speaks of stay unknown."""
    if parsed.kind != "nanogpt":
        return dict(parsed.config)
    if config_path is not None:
        file = read_config_file(config_path)
        parsed.notes.append(f"config taken from {config_path}, nanoGPT's defaults for the rest")
        return _with_defaults({**file.values, **_vocab(parsed)})
    if parsed.config or parsed.facts.get("saw_header"):
        ours = DEFAULTS if "peak_tflops" in parsed.facts else {}
        return {**ours, **_with_defaults({**parsed.config, **_vocab(parsed)})}
    return _config_from_name(path, parsed)


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """nanoGPT's own keys with their defaults; gptfit's only where they were said."""
    theirs = {key: value for key, value in DEFAULTS.items() if key not in GPTFIT_KEYS}
    return {**theirs, "vocab_size": NANOGPT_VOCAB_SIZE, **values}


def _vocab(parsed: ParsedLog) -> dict[str, int]:
    return {"vocab_size": parsed.facts["vocab_size"]} if "vocab_size" in parsed.facts else {}


def _config_from_name(path: Path, parsed: ParsedLog) -> dict[str, Any]:
    """Layers, width and batch from a name like `12x768_b8x64`, believed only if they explain the log's MFU."""
    shape, batch = _NAME_SHAPE.search(path.stem), _NAME_BATCH.search(path.stem)
    work = _logged_flops(parsed)
    if not shape or not batch or work is None or batch.start() == shape.start():
        return {}
    config = {
        "n_layer": int(shape[1]),
        "n_embd": int(shape[2]),
        "batch_size": int(batch[1]),
        "gradient_accumulation_steps": int(batch[2]),
        "block_size": DEFAULTS["block_size"],
        "bias": DEFAULTS["bias"],
    }
    guess = _shape(config, parsed)
    tokens = _tokens_per_step(parsed, config)
    if guess is None or tokens is None or abs(guess.flops_per_token * tokens / work - 1) > MFU_AGREES:
        return {}
    parsed.notes.append(
        f"no config in the log: {shape[1]} layers x {shape[2]} and batch {batch[1]} x {batch[2]} were read from the file name "
        "and explain the log's own MFU; other keys are unknown, --config supplies them"
    )
    return config


def _tokens_per_step(parsed: ParsedLog, config: dict[str, Any]) -> int | None:
    if "tokens_per_step" in parsed.facts:
        return int(parsed.facts["tokens_per_step"])
    if parsed.kind == "nanogpt" and all(key in config for key in BATCH_KEYS):
        return TrainConfig.unchecked(**config).tokens_per_iter()
    products = [
        line.tokens_per_s * line.ms / 1000 for line in parsed.steps if line.tokens_per_s and line.ms and line.clean
    ]
    if not products:
        return None
    tokens = statistics.median(products)
    rounded = round(tokens / 1024) * 1024  # batches are rows of a power of two; both factors were rounded when printed
    return rounded if rounded and abs(rounded / tokens - 1) < 0.002 else round(tokens)


def _device(path: Path, parsed: ParsedLog) -> dict[str, Any]:
    device: dict[str, Any] = {}
    if "device_name" in parsed.facts:
        device = {"name": parsed.facts["device_name"], "gpu": parsed.facts["device_name"]}
    else:
        card = _card_in_name(path)
        if card is not None:
            device = {"name": card.name, "gpu": card.name, "gpu_basis": "file name"}
    if "peak_tflops" in parsed.facts:
        basis = parsed.facts.get("peak_basis", "printed in the log")
        device |= {"peak_tflops": parsed.facts["peak_tflops"], "peak_basis": basis}
    return device


def _card_in_name(path: Path) -> GPU | None:
    words = re.split(r"[^0-9A-Za-z]+", path.stem)
    for i, word in enumerate(words):
        if _NAME_CARD.fullmatch(word):
            # The longest name first: 4070_ti_super is not a 4070.
            for length in (3, 2, 1):
                card = find_or_none(" ".join(words[i : i + length]))
                if card is not None:
                    return card
    return None


def _shape(config: dict[str, Any], parsed: ParsedLog) -> ModelShape | None:
    """None unless every side is known and sane."""
    sides = [config.get(key) for key in SHAPE_KEYS]
    if not sane.are_sides(sides, config.get("n_layer")):
        return None
    return TrainConfig.unchecked(**config).shape(parsed.facts.get("vocab_size"))


def _check_against_mfu(per_token: float | None, per_step: int | None, parsed: ParsedLog) -> dict[str, Any]:
    """The printed MFU and time say how many FLOPs one card did per step: this tells the cards apart from the config."""
    work = _logged_flops(parsed)
    if work is None or per_token is None or per_step is None:
        return {"flops_per_step": work}
    ratio = per_token * per_step / work
    cards = max(1, round(ratio))
    if abs(ratio / cards - 1) <= 2 * MFU_AGREES:
        if cards > 1:
            parsed.notes.append(f"the log's MFU is of one card; {cards} cards shared each step")
        return {"processes": cards, "flops_per_step": work * cards}
    parsed.notes.append(
        f"the config implies {per_token * per_step:.3g} FLOPs per step, the log's own MFU and time imply {work:.3g}: "
        "is it the config of this log?"
    )
    return {"flops_per_step": per_token * per_step}


def _logged_flops(parsed: ParsedLog) -> float | None:
    """Per step and card, by the MFU's own denominator: nanoGPT's constant, or the card's where gptfit printed it."""
    peak = parsed.facts.get("peak_tflops")
    return flops_per_step_from_mfu(parsed.steps, peak * 1e12) if peak else flops_per_step_from_mfu(parsed.steps)


def _check_parameters(parameters: int | None, parsed: ParsedLog) -> dict[str, Any]:
    """The log's own count wins over the config's; a shape that does not have it is not the run's."""
    printed = parsed.facts.get("parameters_text")
    if printed is None:
        return {}
    places = len(printed.partition(".")[2])
    counted = round(float(printed) * 1e6)
    if parameters is None:
        return {"parameters": counted}
    if f"{parameters / 1e6:.{places}f}" == printed:
        return {}
    parsed.notes.append(
        f"the log says {printed}M parameters, the config makes {parameters / 1e6:.2f}M: the log's figure is used"
    )
    return {"parameters": counted}
