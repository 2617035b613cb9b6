"""Runs to look at: the two real logs with their configs, and small made ones."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptfit.logs.open_run import open_run
from gptfit.logs.runlog import RunLog

COMMON = """
n_layer = 12
n_head = 12
block_size = 1024
warmup_iters = 500
eval_interval = 500
eval_iters = 200
log_interval = 200
beta2 = 0.99
weight_decay = 1e-1
dataset = 'fineweb'
"""
SMALL = (
    COMMON + "n_embd = 384\nbatch_size = 16\ngradient_accumulation_steps = 32\nlearning_rate = 1e-3\nmin_lr = 1e-4\n"
)
SMALL += "dropout = 0.1\nmax_iters = 20000\nlr_decay_iters = 20000\n"
LARGE = COMMON + "n_embd = 768\nbatch_size = 8\ngradient_accumulation_steps = 64\nlearning_rate = 3e-4\nmin_lr = 3e-5\n"
LARGE += "dropout = 0.0\nmax_iters = 12000\nlr_decay_iters = 12000\n"
LOGS = Path(__file__).parent / "logs" / "small"
SMALL_LOG = LOGS / "nanogpt_4070_12x384_b16x32.txt"
LARGE_LOG = LOGS / "nanogpt_4070_12x768_b8x64.txt"


@pytest.fixture
def real_configs(tmp_path: Path) -> tuple[Path, Path]:
    small, large = tmp_path / "small.py", tmp_path / "large.py"
    small.write_text(SMALL)
    large.write_text(LARGE)
    return small, large


@pytest.fixture
def real_runs(real_configs: tuple[Path, Path]) -> list[RunLog]:
    """12x384 at 16x32, then 12x768 at 8x64, on one RTX 4070."""
    return [open_run(log, config) for log, config in zip((SMALL_LOG, LARGE_LOG), real_configs, strict=True)]


MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """make_run("a", level=0.2, steps=100, ms=50, config={...}) writes a run folder as `train` would."""

    def make(
        name: str,
        steps: int = 100,
        ms: float = 50.0,
        level: float = 0.0,
        every: int = 10,
        jitter: float = 0.0,
        config: dict[str, Any] | None = None,
        folder: Path | None = None,
        **header: Any,
    ) -> Path:
        run = (folder or tmp_path) / name.replace("/", "_")[:40]
        run.mkdir(parents=True, exist_ok=True)
        keys = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "batch_size": 4, "max_iters": steps}
        keys |= {"gradient_accumulation_steps": 1, "eval_iters": 20, "learning_rate": 1e-3, "vocab_size": 256}
        keys |= config or {}
        shape = {key: keys[key] for key in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
        per_step = keys["batch_size"] * keys["block_size"] * keys["gradient_accumulation_steps"]
        lines: list[dict[str, Any]] = [
            {"event": "header", "name": name, "time": time.time(), "config": keys, "shape": {**shape, "bias": False}}
            | {"tokens_per_step": per_step, "processes": 1, "device": {"name": "cpu", "peak_tflops": 0.1}}
            | {"dataset": {"folder": "data/x", "tokenizer": "bytes"}, "versions": {"torch": "2.13"}, **header}
        ]
        for step in range(steps):
            loss = 2 + level + 3 / math.sqrt(step + 1)
            lines.append(
                {"event": "step", "step": step, "loss": loss, "lr": 1e-3, "tokens": step * per_step}
                | {"ms": ms * (1 + jitter * (step % 5 - 2) / 2)}
                | {"tokens_per_s": per_step / ms * 1000, "mfu": 0.3, "grad_norm": 1.0, "memory_gib": 0.5}
                | {"seconds": (step + 1) * ms / 1000, "time": time.time()}
            )
            if (step + 1) % every == 0:
                at = {"event": "eval", "step": step + 1, "tokens": (step + 1) * per_step}
                lines.append(at | {"train_loss": loss, "val_loss": loss + 0.1, "seconds": (step + 1) * ms / 1000})
        (run / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run

    return make


def append_events(folder: Path, events: list[dict[str, Any]]) -> None:
    with open(folder / "run.jsonl", "a", encoding="utf-8") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
