"""Writes a TrainConfig as a nanoGPT-style file that reads as a lab note and reads back equal."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from typing import Any

from gptfit.config.keys import GROUPS, KEYS, TrainConfig
from gptfit.units import duration, plural, si

GPTFIT_ONLY = "gptfit only; stock nanoGPT ignores it"


def render(config: TrainConfig, title: str = "", notes: Sequence[str] = (), vocab_size: int | None = None) -> str:
    """The file's text. `title` and `notes` become comment lines at the top, each on one line; `vocab_size` is the data's."""
    lines = [f"# {' '.join(line.split())}" for line in (title, *notes) if line.strip()]
    lines += [f"# {line}" for line in _arithmetic(config, vocab_size)]
    for heading, keys in GROUPS.items():
        # A key appears when it differs from the default or belongs to what defines the run.
        shown = [key.name for key in keys if key.always_written or getattr(config, key.name) != key.default]
        if shown:
            lines += ["", f"# {heading}", *(_assignment(config, key) for key in shown)]
    return "\n".join(lines).lstrip("\n") + "\n"


def _arithmetic(config: TrainConfig, vocab_size: int | None) -> list[str]:
    """The sums a reader would otherwise do by hand."""
    shape = config.shape(vocab_size)
    tokens = config.tokens_per_iter()
    vocabulary = f"vocabulary {shape.vocab_size:,}" + (
        "" if config.vocab_size or vocab_size else " unless the data says otherwise"
    )
    return [
        f"{si(shape.parameters)} parameters as nanoGPT counts them ({vocabulary}), {si(shape.flops_per_token)} FLOPs per token",
        f"{config.batch_size} rows x {config.block_size} tokens x {plural(config.accumulation(), 'micro-step')} = {tokens:,} tokens per step",
        (
            f"{config.max_iters:,} steps x {tokens:,} = {si(config.max_iters * tokens)} tokens, "
            f"{config.max_iters * tokens / shape.parameters:.1f} per parameter"
        ),
    ]


def _assignment(config: TrainConfig, key: str) -> str:
    value = getattr(config, key)
    return f"{key} = {_literal(value)}{_remark(config, key)}"


def _literal(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value) and value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        short = f"{value:e}"
        mantissa, exponent = short.split("e")
        short = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
        return short if float(short) == value else repr(value)
    return repr(value)


def _remark(config: TrainConfig, key: str) -> str:
    if key == "n_embd" and config.n_embd % config.n_head == 0:
        return f"  # head size {config.n_embd // config.n_head}"
    if key == "gradient_accumulation_steps" and config.tokens_per_step:
        return f"  # not used: tokens_per_step makes it {config.accumulation()}"
    if key == "warmup_iters" and config.max_iters:
        return f"  # {100 * config.warmup_iters / config.max_iters:.1f} % of the run"
    if key == "max_hours" and config.max_hours:
        return f"  # stop after {duration(3600 * config.max_hours)}; {GPTFIT_ONLY}"
    return "" if KEYS[key].nanogpt else f"  # {GPTFIT_ONLY}"


def set_keys(text: str, values: Mapping[str, object], remark: str = "") -> str:
    """The text with these keys set, in place where they stand, else at the end below a comment line.

    A key that another line computes with is set at the end too, so that the other line keeps its value.

    >>> set_keys("batch_size = 12  # as it fits\\n", {"batch_size": 8})
    'batch_size = 8  # as it fits\\n'
    """
    module = ast.parse(text)
    in_place = {key: node for key in values if (node := _last_value(module, key)) and not _is_used(module, key, values)}
    edited = _replace(text, {node: values[key] for key, node in in_place.items()})
    at_end = [f"{key} = {value!r}" for key, value in values.items() if key not in in_place]
    if not at_end:
        return edited
    heading = [f"# {remark}"] if remark else []
    return edited.rstrip("\n") + "\n\n" + "\n".join([*heading, *at_end]) + "\n"


def _last_value(module: ast.Module, key: str) -> ast.expr | None:
    """The expression of the assignment that counts: the last one."""
    found: ast.expr | None = None
    for node in module.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == key for t in node.targets):
            found = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == key:
            found = node.value or found
    return found


def _is_used(module: ast.Module, key: str, changing: Mapping[str, object]) -> bool:
    """Whether a line computes with this key; lines of keys that change as well do not count."""
    for node in module.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if all(isinstance(target, ast.Name) and target.id in changing for target in targets):
            continue
        if any(isinstance(part, ast.Name) and part.id == key for part in ast.walk(node.value)):
            return True
    return False


def _replace(text: str, changes: Mapping[ast.expr, object]) -> str:
    """Each expression by its new value, last first so that earlier places stay valid. ast counts bytes."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw = text.encode()
    for node in sorted(changes, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        raw = raw[:begin] + repr(changes[node]).encode() + raw[end:]
    return raw.decode()
