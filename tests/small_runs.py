"""A small token folder, a small config and a way to run it in this process or in another."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptfit.config.keys import TrainConfig
from gptfit.logs.events import Event, Message
from tests.forking import Started, fork, gptfit_program

REPO = Path(__file__).resolve().parents[1]
VOCAB_SIZE = 65

SMALL = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "block_size": 16,
    "batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_iters": 8,
    "lr_decay_iters": 8,
    "warmup_iters": 2,
    "learning_rate": 1e-2,
    "min_lr": 1e-3,
    "eval_interval": 4,
    "eval_iters": 2,
    "device": "cpu",
    "dtype": "float32",
    "compile": False,
}


def told(events: list[Event], kind: str) -> list[Message]:
    """What a run said of this kind."""
    return [event for event in events if isinstance(event, Message) and event.kind == kind]


def messages_in(events: list[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, Message)]


@pytest.fixture
def token_folder(tmp_path: Path) -> Path:
    """Text-like tokens: a noisy cycle through 65 ids, so that there is something to learn."""
    folder = tmp_path / "data" / "tiny"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    ids = (np.arange(6000) * 7 + random.integers(0, 3, 6000)) % VOCAB_SIZE
    ids[:5000].astype(np.uint16).tofile(folder / "train.bin")
    ids[5000:].astype(np.uint16).tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": VOCAB_SIZE}))
    return folder


@pytest.fixture
def small_config(token_folder: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """A config that trains in a second; keyword arguments change it."""

    def make(**changes: Any) -> TrainConfig:
        values = {**SMALL, "dataset": str(token_folder), "out_dir": str(tmp_path / "out"), **changes}
        return TrainConfig(**values)

    return make


def words_of(config: TrainConfig) -> list[str]:
    """The config as words of a command line."""
    defaults = TrainConfig().as_dict()
    return [f"--{key}={value}" for key, value in config.as_dict().items() if value != defaults[key]]


def fork_gptfit(config: TrainConfig, env: dict[str, str] | None = None, before: str = "") -> Started:
    """`gptfit train` with this config in a process of its own; `before` is run there first."""
    return fork(before + gptfit_program(["train", *words_of(config)]), env)


def start_gptfit(config: TrainConfig, *extra: str, **options: Any) -> subprocess.Popen[str]:
    """As fork_gptfit, by a Python of its own: a few seconds more, for tests of how a process starts or ends."""
    environment = {**os.environ, "PYTHONPATH": str(REPO), **options.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, "-m", "gptfit", "train", *words_of(config), *extra],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )
