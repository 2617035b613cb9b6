"""`train --gpus` and torchrun: one line for bad input, a killed process is started again and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from gptfit.checkpoint.format import load_checkpoint
from gptfit.cli import main
from gptfit.config.keys import TrainConfig
from gptfit.train.launch import is_said
from tests.several import losses, train_together
from tests.small_runs import REPO

MakeConfig = Callable[..., TrainConfig]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
STARTS = {
    "torchrun": [*TORCHRUN, "-m", "gptfit", "train"],
    "--gpus": [sys.executable, "-m", "gptfit", "train", "--gpus=2"],
}


def words(config: TrainConfig) -> list[str]:
    defaults = TrainConfig().as_dict()
    return [f"--{key}={value}" for key, value in config.as_dict().items() if value != defaults[key]]


def start(how: str, config: TrainConfig) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    command = [*STARTS[how], *words(config)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def worker(parent: int, rank: str) -> psutil.Process:
    for child in psutil.Process(parent).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # one that has ended meanwhile
            if child.environ().get("RANK") == rank:
                return child
    raise AssertionError(f"no process of rank {rank}")


# Long enough that a busy machine finds the process before the run is over.
LONG = {"max_iters": 300, "lr_decay_iters": 300, "eval_interval": 50, "log_interval": 10, "seed": 7}


def wait_for_a_checkpoint(folder: Path, started: subprocess.Popen[str]) -> None:
    while not (folder / "ckpt.pt").exists() and started.poll() is None:
        time.sleep(0.02)


def assert_bit_equal(folder: Path, other: Path) -> None:
    whole, killed = load_checkpoint(folder), load_checkpoint(other)
    assert killed.iter_num == whole.iter_num == LONG["max_iters"]
    torch.testing.assert_close(killed.model, whole.model, rtol=0, atol=0)
    assert whole.optimizer is not None
    assert killed.optimizer is not None
    torch.testing.assert_close(killed.optimizer["state"], whole.optimizer["state"], rtol=0, atol=0)
    assert losses(other) == losses(folder)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("how", "parallel"), [("torchrun", "ddp"), ("--gpus", "ddp"), ("--gpus", "fsdp")])
def test_a_killed_process_is_started_again_and_the_end_is_bit_equal(
    small_config: MakeConfig, tmp_path: Path, how: str, parallel: str
) -> None:
    whole, killed = (
        small_config(out_dir=str(tmp_path / one), parallel=parallel, **LONG) for one in ("whole", "killed")
    )
    train_together(2, whole)
    started = start(how, killed)
    wait_for_a_checkpoint(tmp_path / "killed", started)
    worker(started.pid, "1").send_signal(signal.SIGKILL)
    output = started.communicate(timeout=900)
    assert started.returncode == 0, output
    assert f"resuming {tmp_path / 'killed' / 'ckpt.pt'} at step" in output[0]
    assert_bit_equal(tmp_path / "whole", tmp_path / "killed")


def test_bad_input_of_several_processes_is_said_once(small_config: MakeConfig, tmp_path: Path) -> None:
    started = start("--gpus", small_config(dataset=str(tmp_path / "nowhere")))
    _, errors = started.communicate(timeout=300)
    assert started.returncode == 1
    assert errors.count("\n") == 1
    assert errors.startswith(f"gptfit: {tmp_path / 'nowhere'}: no such data folder")


def test_what_one_process_said_the_others_need_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_process(attempt: int, rank: int) -> None:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"attempt_{attempt}" / str(rank) / "error.json"))

    as_process(0, 1)
    assert not is_said("no such folder")
    as_process(0, 0)
    assert is_said("no such folder")
    assert not is_said("something else")
    as_process(1, 1)
    assert is_said("no such folder")
    for elsewhere in (tmp_path / "jobs" / "7" / "error.json", Path("/error.json")):  # a scheduler's
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(elsewhere))
        assert not is_said("no such queue")
        assert not is_said("no such queue")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert not is_said("no such folder")


@pytest.mark.slow
def test_bad_input_under_torchrun_is_said_once_however_often_it_starts_the_processes(
    small_config: MakeConfig, tmp_path: Path
) -> None:
    """What torchrun itself says about a process that failed comes after it."""
    started = start("torchrun", small_config(dataset=str(tmp_path / "nowhere")))
    _, errors = started.communicate(timeout=300)
    assert started.returncode == 1
    said = [line for line in errors.splitlines() if line.startswith("gptfit:")]
    assert len(said) == 1, errors
    assert said[0].startswith(f"gptfit: {tmp_path / 'nowhere'}: no such data folder")


def test_a_step_that_does_not_divide_is_refused_before_anything_starts(
    small_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--gpus", "3", *words(small_config())]) == 1
    assert "gradient_accumulation_steps 2 is not divisible by the 3 processes" in capsys.readouterr().err
    assert main(["train", "--gpus", "-1"]) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shares": "1:2:3"}, "shares = '1:2:3' names 3 processes, there are 2; give one speed for each"),
        ({"shares": "2:1", "parallel": "fsdp"}, "parallel = 'fsdp' needs every process for every micro-step"),
        ({"gradient_dtype": "bfloat16", "parallel": "fsdp"}, "gradient_dtype = 'bfloat16'"),
        ({"embedding_device": "cpu", "parallel": "fsdp"}, "embedding_device = 'cpu' with 2 processes"),
        ({"matmul": "fp8", "dtype": "bfloat16", "parallel": "fsdp"}, "matmul = 'fp8' with parallel = 'fsdp'"),
    ],
)
def test_what_several_processes_cannot_do_is_said_before_they_start(
    small_config: MakeConfig, capsys: pytest.CaptureFixture[str], changes: dict[str, str], said: str
) -> None:
    assert main(["train", "--gpus", "2", *words(small_config(**changes))]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_runs_in_a_row_end_cleanly(small_config: MakeConfig, tmp_path: Path) -> None:
    for number in range(20):
        started = start("--gpus", small_config(out_dir=str(tmp_path / str(number)), max_iters=3, lr_decay_iters=3))
        output, errors = started.communicate(timeout=600)
        assert (started.returncode, errors) == (0, ""), (number, output)
