"""Several processes on this machine, started once for a list of runs."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

from gptfit.config.keys import TrainConfig
from gptfit.logs.runlog import read_run
from tests.forking import Started, fork

PROGRAM = """
from gptfit.config.keys import TrainConfig
from gptfit.train.train import train
{before}
for port, values in {runs!r}:
    os.environ["MASTER_PORT"] = port
    train(TrainConfig(**values))
"""


def free_port() -> str:
    """Below those the system hands out by itself: a run that is not the first takes its port only minutes later, when
    connections of the ones before, or of other tests, could have got it."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)


def start_processes(count: int, configs: list[TrainConfig], before: str = "") -> list[Started]:
    """`before` is run in each process first; it may look at os.environ["RANK"]."""
    program = PROGRAM.format(before=before, runs=[(free_port(), config.as_dict()) for config in configs])
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    return [fork(program, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(count)]


def train_together(count: int, *configs: TrainConfig, before: str = "") -> None:
    """All runs, one after the other, each by `count` processes."""
    started = start_processes(count, list(configs), before)
    outputs = [process.communicate(timeout=1000) for process in started]
    assert [process.returncode for process in started] == [0] * count, outputs


def losses(folder: Path) -> list[float]:
    """The loss of every step of a run, as its log has them."""
    return [step.loss for step in read_run(folder).steps if step.loss is not None]
