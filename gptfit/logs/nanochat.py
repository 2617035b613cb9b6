"""Reads what nanochat and its relatives print: `step N | loss: ... | dt: ...ms | tok/sec: ...`, wrapped or not."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from gptfit.logs.parsed_log import LogFormat, ParsedEval, ParsedLog, ParsedStep
from gptfit.logs.terminal_text import MOST_PIECES

_NUMBER = r"(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?|-?nan|-?inf)"
_STEP_HEAD = re.compile(r"step:? +(\d{1,15})(?:/(\d{1,15}))?(?: *\(\d+(?:\.\d+)?%\))? *\| *loss: *", re.I)
_LOSS = re.compile(rf"loss: *{_NUMBER} *(?:\||$)", re.I)
_DT = re.compile(r"\bdt: *(\d+(?:\.\d+)?) *(ms|s)\b")
_SPEED = re.compile(r"tok/s(?:ec)?: *([\d,]+(?:\.\d+)?)")
_MFU = re.compile(r"mfu: *(\d+(?:\.\d+)?)")
_LR = re.compile(r"\blr:? *(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", re.I)
_NORM = re.compile(r"\bnorm: *(\d+(?:\.\d+)?)")
# How a whole line ends; `total time` may have lost its space where a terminal wrapped and trimmed it.
_WHOLE = re.compile(r"(?:total ?time: *\d+\.\d+m(?: *\| *eta: *\d+\.\d+m)?|remaining: *\d+s)\s*$")
_TAIL = re.compile(r" *\|? *eta: *\d+\.\d+m *$")
_BPB = re.compile(rf"step:? +(\d{{1,15}}) *\| *validation bpb: *{_NUMBER}", re.I)
_VAL_LOSS = re.compile(rf"step:? +(\d{{1,15}}) *\| *val(?:idation)? loss: *{_NUMBER}", re.I)
_VAL_AFTER = re.compile(rf"^(?:val_bpb|validation loss): *{_NUMBER}")
_CORE = re.compile(rf"step:? +(\d{{1,15}}) *\| *CORE metric: *{_NUMBER}", re.I)
_COUNT = r": *([\d,]+) *$"
_FACTS = (
    (re.compile(r"Vocab size" + _COUNT), "vocab_size"),
    (re.compile(r"^ *total *" + _COUNT), "parameters"),
    (re.compile(r"[Nn]umber of parameters" + _COUNT), "parameters"),
    (re.compile(r"number of iterations.*" + _COUNT), "max_iters"),
    (re.compile(r"Total batch size ([\d,]+)"), "tokens_per_step"),
    (re.compile(r"[Gg]radient accumulation steps" + _COUNT), "accumulation"),
    (re.compile(r"Distributed world size" + _COUNT), "processes"),
    (re.compile(r"Tokens / micro-batch / rank: (\d+) x"), "batch_size"),
)
_FLOPS = re.compile(rf"FLOPs per token: *{_NUMBER}")
_GPU = re.compile(r"(?:^|Detected )GPU: ([^|>]+?) *(?:\||->|$)")
_PEAK = re.compile(rf"(?:Peak FLOPS \(BF16\)|peak BF16 FLOPS): *{_NUMBER}")
_MEMORY = re.compile(r"Peak memory usage: ([\d.]+)MiB|peak_vram_mb: *([\d.]+)")
_MODEL_KEYS = {
    "sequence_len": "block_size",
    "vocab_size": "vocab_size",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
}


def looks_like_nanochat(line: str) -> bool:
    return bool(_STEP_HEAD.search(line) or _BPB.search(line))


def read_nanochat(lines: list[str]) -> ParsedLog:
    """Every step and validation line with what was printed around them."""
    parsed = ParsedLog("nanochat")
    skip = 0
    for i, line in enumerate(lines):
        if skip:
            skip -= 1
        elif "loss:" in line and _STEP_HEAD.search(line):
            skip = _parse_step(parsed, lines, i)
        elif line:
            skip = _parse_other(parsed, lines, i)
    parsed.config.update(_config(parsed.facts))
    return parsed


def _config(facts: dict[str, Any]) -> dict[str, Any]:
    """What is printed as a sentence and is one of our keys."""
    config: dict[str, Any] = {key: facts[key] for key in ("vocab_size", "max_iters", "batch_size") if key in facts}
    if "accumulation" in facts:
        # nanochat counts per process; the key counts all processes together.
        config["gradient_accumulation_steps"] = facts["accumulation"] * facts.get("processes", 1)
    return config


def _parse_step(parsed: ParsedLog, lines: list[str], i: int) -> int:
    text, extra = _whole_line(lines, i)
    head, loss = _STEP_HEAD.search(text), _LOSS.search(text)
    if head is None or loss is None:
        return 0
    if head[2]:
        parsed.learn(max_iters=int(head[2]))
    dt, speed, mfu, lr, norm = (pattern.search(text) for pattern in (_DT, _SPEED, _MFU, _LR, _NORM))
    parsed.add_step(
        ParsedStep(
            step=int(head[1]),
            loss=float(loss[1]),
            ms=float(dt[1]) * (1000 if dt[2] == "s" else 1) if dt else None,
            clean=True,  # nanochat stops the clock for evals; only the first step compiles
            mfu=float(mfu[1]) / 100 if mfu and float(mfu[1]) > 0 else None,  # 0.00 is "peak unknown"
            lr=float(lr[1]) if lr else None,
            grad_norm=float(norm[1]) if norm else None,
            tokens_per_s=float(speed[1].replace(",", "")) if speed else None,
        )
    )
    return extra


def _whole_line(lines: list[str], i: int) -> tuple[str, int]:
    """The line with the pieces a terminal cut off it, and how many those were."""
    text = lines[i]
    for extra in range(MOST_PIECES):
        if _WHOLE.search(text):
            following = lines[i + extra + 1] if i + extra + 1 < len(lines) else ""
            if "eta:" not in text and _TAIL.match(following):
                return text + following, extra + 1
            return text, extra
        if i + extra + 1 >= len(lines) or not lines[i + extra + 1] or looks_like_nanochat(lines[i + extra + 1]):
            break
        text += lines[i + extra + 1]
    return lines[i], 0  # a relative that prints neither total time nor remaining: one line is all there is


def _parse_other(parsed: ParsedLog, lines: list[str], i: int) -> int:
    line = lines[i]
    for pattern, field in ((_BPB, "val_bpb"), (_VAL_LOSS, "val_loss")):
        match = pattern.search(line)
        if match:
            _add_eval(parsed, int(match[1]), field, float(match[2]))
            return 0
    after = _VAL_AFTER.match(line)
    if after:
        # Both a summary after the last step and `validation loss:` before the next one speak of all updates so far.
        done = parsed.steps[-1].step + 1 if parsed.steps else 0
        _add_eval(parsed, done, "val_bpb" if line.startswith("val_bpb") else "val_loss", float(after[1]))
    elif "Model config" in line:
        return _parse_model(parsed, lines, i)
    elif "<|bos|>" in line:
        parsed.add_sample(line.split("<|bos|>", 1)[1].strip())
    else:
        _parse_facts(parsed, line)
    return 0


def _add_eval(parsed: ParsedLog, step: int, field: str, value: float) -> None:
    parsed.add_eval(
        ParsedEval(step, None, value if field == "val_loss" else None, value if field == "val_bpb" else None)
    )


def _parse_facts(parsed: ParsedLog, line: str) -> None:
    for pattern, name in _FACTS:
        match = pattern.search(line)
        if match:
            parsed.learn(**{name: int(match[1].replace(",", ""))})
    flops, gpu, peak, memory, core = (p.search(line) for p in (_FLOPS, _GPU, _PEAK, _MEMORY, _CORE))
    if flops:
        parsed.learn(flops_per_token=float(flops[1]))
    if gpu:
        parsed.learn(device_name=gpu[1].strip())
    if peak and float(peak[1]) not in (float("inf"), 0.0):
        parsed.learn(peak_tflops=float(peak[1]) / 1e12)
    if memory and parsed.steps:
        # Printed after the last step, about the steps before it.
        parsed.facts["memory_gib"] = float(memory[1] or memory[2]) / 1024
    if core:
        parsed.add_message("core", f"CORE metric {core[2]}", value=float(core[2]))
    if "Resuming optimization from step" in line:
        parsed.restarted()
    if "out of memory" in line.lower():
        parsed.add_message("oom", line.strip())


def _parse_model(parsed: ParsedLog, lines: list[str], i: int) -> int:
    """`Model config:` and JSON over the next lines, or one Python dict on the same line."""
    inline = lines[i].split("Model config", 1)[1]
    if "{" in inline:
        _learn_model(parsed, _literal_dict(inline[inline.index("{") :]))
        return 0
    body: list[str] = []
    for line in lines[i + 1 : i + 40]:
        body.append(line)
        if line.strip() == "}":
            break
    try:
        values = json.loads("\n".join(body))
    except json.JSONDecodeError:
        return 0
    _learn_model(parsed, values if isinstance(values, dict) else {})
    return len(body)


def _literal_dict(text: str) -> dict[str, Any]:
    try:
        values = ast.literal_eval(text.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return values if isinstance(values, dict) else {}


def _learn_model(parsed: ParsedLog, values: dict[str, Any]) -> None:
    known = {ours: values[theirs] for theirs, ours in _MODEL_KEYS.items() if isinstance(values.get(theirs), int)}
    parsed.learn_config(known)


FORMAT = LogFormat(
    "nanochat",
    "step 00010/21400 | loss: 3.44 | dt: 52.31ms | tok/sec: 1,234",
    looks_like_nanochat,
    read_nanochat,
    rare_words=(b"Validation bpb",),
)
