"""Several processes on this machine, started once for a list of runs: starting Python and torch is most of their time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from gptfit.config.keys import TrainConfig
from gptfit.logs.runlog import read_run
from tests.small_runs import REPO

PROGRAM = """
import json, os, sys
from gptfit.config.keys import TrainConfig
from gptfit.train.train import train
{before}
for port, values in json.loads(sys.argv[1]):
    os.environ["MASTER_PORT"] = port
    train(TrainConfig(**values))
"""


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start_processes(count: int, configs: list[TrainConfig], before: str = "") -> list[subprocess.Popen[str]]:
    """`before` is run in each process first; it may look at os.environ["RANK"]."""
    runs = json.dumps([(free_port(), config.as_dict()) for config in configs])
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(before=before), runs],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]


def train_together(count: int, *configs: TrainConfig, before: str = "") -> None:
    """All runs, one after the other, each by `count` processes."""
    started = start_processes(count, list(configs), before)
    outputs = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0] * count, outputs


def losses(folder: Path) -> list[float]:
    """The loss of every step of a run, as its log has them."""
    return [step.loss for step in read_run(folder).steps if step.loss is not None]
