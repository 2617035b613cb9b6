"""Reads what nanoGPT's train.py prints: iter and step lines, the echoed config and the model's own figures."""

from __future__ import annotations

import ast
import itertools
import re
import statistics
from typing import Any

from gptfit.config.keys import DEFAULTS, KEYS
from gptfit.config.read import NotAllowed, coerce, evaluate
from gptfit.errors import ConfigError
from gptfit.gpus import NANOGPT_PEAK_TFLOPS
from gptfit.logs.parsed_log import LogFormat, ParsedEval, ParsedLog, ParsedStep
from gptfit.logs.terminal_text import unwrapped

_NUMBER = r"(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?|-?nan|-?inf)"
# Not anchored: dates, `[rank0]:`, pod names, quote marks and echoed keys all come before the words in real logs.
_ITER_HEAD = re.compile(r"iter (\d{1,15}): loss ")
_ITER_WHOLE = re.compile(rf"iter (\d{{1,15}}): loss {_NUMBER}, time {_NUMBER}ms, mfu {_NUMBER}%(.*)")
_ITER_SHORT = re.compile(rf"iter (\d{{1,15}}): loss {_NUMBER}(?:, time {_NUMBER}ms)?()()")
_EVAL_HEAD = re.compile(r"step (\d{1,15}): train loss ")
_EVAL_WHOLE = re.compile(r"step (\d{1,15}): train loss (\d+\.\d{4}|nan|inf), val loss (\d+\.\d{4}|nan|inf)", re.I)
_EVAL_SHORT = re.compile(rf"step (\d{{1,15}}): train loss {_NUMBER}, val loss {_NUMBER}", re.I)
_EXTRA = re.compile(rf"(lr|cuda memory|grad[_ ]norm|norm)[ :=]+{_NUMBER}", re.I)
_OVERRIDE = re.compile(r"Overriding: (\w+) = (.*)")
_FILE = re.compile(r"Overriding config with (.+):\s*$")
_FACTS = (
    (re.compile(r"tokens per iteration will be: ([\d,]+)"), "tokens_per_step"),
    (re.compile(r"found vocab_size = ([\d,]+)"), "vocab_size"),
    (re.compile(r"defaulting to vocab_size of GPT-2 to ([\d,]+)"), "vocab_size"),
    (re.compile(r"^data: .*, vocabulary ([\d,]+)$"), "vocab_size"),  # gptfit's own stdout
    (re.compile(r"num decayed parameter tensors: \d+, with ([\d,]+)"), "decayed"),
    (re.compile(r"num non-decayed parameter tensors: \d+, with ([\d,]+)"), "not_decayed"),
)
# What gptfit's own stdout says besides: its MFU is of the card it runs on.
_OWN_PEAK = re.compile(r"mfu is against (\d+(?:\.\d+)?(?:e[-+]?\d+)?) TFLOPS, the (.+)")
_OWN_DEVICE = re.compile(r"^device: (.+), (?:float32|bfloat16|float16)$")
_PARAMETERS = re.compile(r"number of parameters: (\d+(?:\.\d+)?)M")
# What train.py prints next, so where an echoed config file ends.
_AFTER_ECHO = re.compile(
    r"Overriding|tokens per iteration|found vocab_size|defaulting to vocab|Initializing |Resuming training|"
    r"number of parameters|num (?:non-)?decayed|using fused|compiling the model|iter \d+: loss|step \d+: train loss"
)
_EVENTS = (
    ("saving checkpoint to ", "checkpoint"),
    ("CUDA out of memory", "oom"),
    ("OutOfMemoryError", "oom"),
    ("Resuming training from ", "resume"),
)


def looks_like_nanogpt(line: str) -> bool:
    return bool(_ITER_HEAD.search(line) or _EVAL_HEAD.search(line))


def read_nanogpt(lines: list[str]) -> ParsedLog:
    """Every iter and step line with what was printed around them."""
    parsed = ParsedLog("nanogpt")
    skip = 0
    for i, line in enumerate(lines):
        if skip:
            skip -= 1
        elif "iter " in line and ((whole := _ITER_WHOLE.search(line)) or _ITER_HEAD.search(line)):
            skip = _parse_iter(parsed, lines, i, whole)
        elif "step " in line and _EVAL_HEAD.search(line):
            skip = _parse_eval(parsed, lines, i)
        elif line:
            skip = _parse_other(parsed, lines, i)
    return parsed


def _parse_iter(parsed: ParsedLog, lines: list[str], i: int, match: re.Match[str] | None) -> int:
    """One `iter` line, joined with the next ones when a terminal cut it; returns how many lines were joined."""
    extra = 0
    if match is None:
        match, extra = next(unwrapped(lines, i, _ITER_WHOLE.search), (_ITER_SHORT.search(lines[i]), 0))
    if match is None:
        return 0
    step, loss, ms, mfu, rest = match.groups()
    share = float(mfu) / 100 if mfu and mfu[0] != "-" else None  # -100.00% is "not measured yet"
    line = ParsedStep(int(step), float(loss), float(ms) if ms else None, True, share)
    parsed.add_step(_with_extras(line, rest) if rest else line)
    return extra


def _with_extras(line: ParsedStep, rest: str) -> ParsedStep:
    """What forks print after the MFU: `, cuda memory 0.499G, lr 6.00e-04, total time 1.30s`."""
    found = {name.lower(): float(value) for name, value in _EXTRA.findall(rest)}
    return line._replace(
        lr=found.get("lr"),
        memory_gib=found.get("cuda memory"),
        grad_norm=found.get("norm", found.get("grad_norm", found.get("grad norm"))),
    )


def _parse_eval(parsed: ParsedLog, lines: list[str], i: int) -> int:
    match, extra = _EVAL_WHOLE.search(lines[i]), 0
    if match is None:
        short = _EVAL_SHORT.search(lines[i])
        match, extra = next(unwrapped(lines, i, _EVAL_WHOLE.search), (short, 0))
    if match is None:
        return 0
    step, train_loss, val_loss = match.groups()
    parsed.add_eval(ParsedEval(int(step), float(train_loss), float(val_loss)))
    return extra


def _parse_other(parsed: ParsedLog, lines: list[str], i: int) -> int:
    """Facts, the echoed config and events; returns how many further lines were consumed."""
    line = lines[i]
    if "Overriding" in line:
        return _parse_override(parsed, lines, i)
    for pattern, name in _FACTS:
        match = pattern.search(line)
        if match:
            parsed.learn(**{name: int(match[1].replace(",", ""))})
            parsed.learn(saw_header=True)
    parameters, peak, device = (pattern.search(line) for pattern in (_PARAMETERS, _OWN_PEAK, _OWN_DEVICE))
    if parameters:
        parsed.learn(parameters_text=parameters[1], saw_header=True)
    if peak:
        parsed.learn(peak_tflops=float(peak[1]), peak_basis=peak[2].strip(), saw_header=True)
    if device:
        parsed.learn(device_name=device[1])
    for words, kind in _EVENTS:
        if words in line:
            parsed.add_message(kind, line.strip())
            if kind == "resume":
                parsed.restarted()
    if line.lstrip().startswith("{") and "'batch_size'" in line:
        parsed.learn_config(_printed_dict(line))
    return 0


def _parse_override(parsed: ParsedLog, lines: list[str], i: int) -> int:
    match = _OVERRIDE.search(lines[i])
    if match:
        parsed.learn_config(_statement(f"{match[1]} = {_quoted(match[2].strip())}"))
        parsed.learn(saw_header=True)
        return 0
    match = _FILE.search(lines[i])
    if not match:
        return 0
    parsed.learn(saw_header=True, config_file=match[1])
    names: dict[str, Any] = {}
    count = 0
    for line in lines[i + 1 :]:
        if _AFTER_ECHO.search(line):
            break
        names.update(_statement(line, names))
        count += 1
    parsed.learn_config({key: value for key, value in names.items() if key in KEYS})
    return count


def _statement(line: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """`key = expression` as {key: value}; anything else in an echoed file is prose, so {}."""
    try:
        node = ast.parse(line.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    if len(node) != 1 or not isinstance(node[0], ast.Assign) or not isinstance(node[0].targets[0], ast.Name):
        return {}
    name = node[0].targets[0].id
    try:
        value = evaluate(node[0].value, {**DEFAULTS, **(names or {})})
        return {name: coerce(name, value, "log") if name in KEYS else value}
    except (NotAllowed, ConfigError):
        return {}


def _quoted(text: str) -> str:
    """nanoGPT prints text values without quotes: `Overriding: out_dir = out-small`."""
    try:
        ast.literal_eval(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return repr(text)
    return text


def _printed_dict(line: str) -> dict[str, Any]:
    """Some forks print the whole config as one dict."""
    try:
        values = ast.literal_eval(line.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    known = {key: value for key, value in values.items() if key in KEYS} if isinstance(values, dict) else {}
    kept: dict[str, Any] = {}
    for key, value in known.items():
        try:
            kept[key] = coerce(key, value, "log")
        except ConfigError:
            continue
    return kept


def flops_per_step_from_mfu(steps: list[ParsedStep], peak_flops: float = NANOGPT_PEAK_TFLOPS * 1e12) -> float | None:
    """FLOPs of one step on one card, from the printed MFU and time: nanoGPT divides by an A100's 312 TFLOPS.

    The first MFU of a process is that step's own; later ones are 0.9 of the last plus 0.1 of the step's, so the step's
    is recovered by undoing the average. The median forgives lines that were not printed one after the other.
    """
    for before, line in itertools.pairwise(steps):
        if before.mfu is None and line.mfu is not None and line.clean and line.ms is not None:
            return line.mfu * peak_flops * line.ms / 1000
    work = [
        (line.mfu - 0.9 * before.mfu) / 0.1 * peak_flops * line.ms / 1000
        for before, line in itertools.pairwise(steps)
        if before.mfu is not None and line.mfu is not None and line.clean and line.ms is not None
    ]
    return statistics.median(work) if work else None


FORMAT = LogFormat(
    "nanoGPT",
    "iter 10: loss 3.4410, time 52.31ms, mfu 12.34%",
    looks_like_nanogpt,
    read_nanogpt,
    rare_words=(b": train loss ",),
)
