"""Writes a TrainConfig as a nanoGPT-style file that reads as a lab note and reads back equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gptfit.config import DEFAULTS, GPTFIT_KEYS, TrainConfig
from gptfit.shape import INGREDIENTS
from gptfit.units import duration, si

# Groups in reading order; a key appears when it differs from the default or belongs to what defines the run.
_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("model", ("arch", "n_layer", "n_head", "n_embd", "block_size", "vocab_size", "dropout", "bias", *INGREDIENTS)),
    ("step", ("batch_size", "gradient_accumulation_steps", "tokens_per_step")),
    ("horizon", ("max_iters", "max_hours", "early_stop_evals")),
    (
        "learning rate",
        ("learning_rate", "decay_lr", "schedule", "warmup_iters", "lr_decay_iters", "decay_fraction", "min_lr"),
    ),
    (
        "optimizer",
        ("optimizer", "weight_decay", "beta1", "beta2", "grad_clip", "momentum", "embedding_lr", "head_lr"),
    ),
    ("data", ("dataset", "data_root", "sampling", "seed")),
    (
        "evaluation and files",
        ("out_dir", "eval_interval", "eval_iters", "log_interval", "eval_only", "always_save_checkpoint",
         "keep_checkpoints", "init_from"),
    ),
    ("tracking", ("track", "wandb_log", "wandb_project", "wandb_run_name")),
    ("machine", ("device", "dtype", "compile", "chunked_loss", "checkpoint_activations", "gpu", "backend")),
)  # fmt: skip
_ALWAYS = frozenset(
    [
        "n_layer",
        "n_head",
        "n_embd",
        "block_size",
        "dropout",
        "bias",
        "batch_size",
        "gradient_accumulation_steps",
        "max_iters",
        "learning_rate",
        "warmup_iters",
        "lr_decay_iters",
        "min_lr",
        "weight_decay",
        "beta2",
        "dataset",
        "out_dir",
        "eval_interval",
        "eval_iters",
    ]
)


def render(config: TrainConfig, title: str = "", notes: Sequence[str] = ()) -> str:
    """The file's text. `title` and `notes` become comment lines at the top, each on one line."""
    lines = [f"# {' '.join(line.split())}" for line in (title, *notes) if line.strip()]
    lines += [f"# {line}" for line in _arithmetic(config)]
    for heading, keys in _GROUPS + _ungrouped():
        shown = [key for key in keys if key in _ALWAYS or getattr(config, key) != DEFAULTS[key]]
        if shown:
            lines += ["", f"# {heading}", *(_assignment(config, key) for key in shown)]
    return "\n".join(lines).lstrip("\n") + "\n"


def _arithmetic(config: TrainConfig) -> list[str]:
    """The sums a reader would otherwise do by hand."""
    shape = config.shape()
    tokens = config.tokens_per_iter()
    vocabulary = f"vocabulary {shape.vocab_size:,}" + ("" if config.vocab_size else " unless the data says otherwise")
    return [
        f"{si(shape.parameters)} parameters as nanoGPT counts them ({vocabulary}), {si(shape.flops_per_token)} FLOPs per token",
        f"{config.batch_size} rows x {config.block_size} tokens x {config.accumulation()} micro-steps = {tokens:,} tokens per step",
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
        return f"  # stop after {duration(3600 * config.max_hours)}"
    if key in GPTFIT_KEYS:
        return "  # gptfit only; stock nanoGPT ignores it" if key not in ("vocab_size",) else ""
    return ""


def _ungrouped() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Keys no group names, so that a new key is never lost in writing."""
    grouped = {key for _, keys in _GROUPS for key in keys}
    rest = tuple(key for key in DEFAULTS if key not in grouped)
    return (("more", rest),) if rest else ()
