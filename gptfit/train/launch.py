"""`gptfit train --gpus N`: torchrun's agent started from here, again after a process was killed, silent about bad input."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from gptfit.device.processes import LOST_PEER, RESTARTS_VARIABLE, START_VARIABLE
from gptfit.errors import DeviceError, RunError

MOST_RESTARTS = 3
SECONDS_TO_SAVE = 600  # after a signal, before the processes are killed; torch before 2.12 knows 30 only


def launch(words: Sequence[str], count: int, device: str, say: Callable[[str], None]) -> int:
    """`gptfit` with these words in `count` processes of this machine; returns when all have ended."""
    _check_cards(count, device)
    os.environ[START_VARIABLE] = uuid.uuid4().hex
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SECONDS_TO_SAVE))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    for restart in range(MOST_RESTARTS + 1):
        os.environ[RESTARTS_VARIABLE] = str(restart)
        ended = _run(words, count)
        if isinstance(ended, int):
            return ended
        if restart < MOST_RESTARTS:
            say(f"{ended}; going on from the last checkpoint")
    raise RunError(f"{ended} for the {MOST_RESTARTS + 1}th time", fix="look for what ends it: memory of the machine?")


def _run(words: Sequence[str], count: int) -> str | int:
    """The exit code; who was killed, if that was it; an error for everything else."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=os.environ[START_VARIABLE],
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,  # ours are for killed processes only: bad input stays bad
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "gptfit", *words)
    except SignalException as error:
        return 128 + int(error.sigval)  # the processes heard it too, saved and said so
    except ChildFailedError as error:
        return _reason(list(error.failures.values()))
    return 0


def _reason(failures: list[Any]) -> str:
    """Who was killed. A process that says itself what is wrong comes first: the agent then ends the others."""
    words = {failure.local_rank: _word(failure) for failure in failures}
    said = [word for word in words.values() if word and LOST_PEER not in word]
    if said:
        raise RunError(said[0])
    killed = [failure for failure in failures if failure.exitcode < 0]
    first = min(killed or failures, key=lambda failure: (failure.signal_name() == "SIGTERM", int(failure.timestamp)))
    if not killed and not words[first.local_rank]:
        raise RunError(f"process {first.local_rank} failed, as said above")
    return f"process {first.local_rank} was killed by {first.signal_name()}" if killed else LOST_PEER


def _word(failure: Any) -> str:
    """What a process left behind with `leave_word`, or nothing."""
    message = failure.error_file_data.get("message") if isinstance(failure.error_file_data, dict) else None
    return str(message["message"]) if isinstance(message, dict) else ""


def leave_word(line: str) -> None:
    """For the one who started us: what was wrong here, in the file torchrun's agent reads."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        word = {"message": {"message": line, "extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))}}}
        with suppress(OSError):  # what was wrong is on the screen too
            Path(file).write_text(json.dumps(word), encoding="utf-8")


def is_said(line: str) -> bool:
    """Whether another process of this machine's torchrun said the same, in this attempt or an earlier one."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    # torchrun has a folder for the run, in it one for each attempt, in that one for each process. A file that somebody else
    # names is in a folder of theirs, where a note of ours would silence the next run too.
    attempt = Path(file).absolute().parent.parent if file else None
    if attempt is None or not attempt.name.startswith("attempt_"):
        return False
    try:
        (attempt.parent / f"said-{hashlib.sha256(line.encode()).hexdigest()[:16]}").touch(exist_ok=False)
    except FileExistsError:
        return True
    except OSError:
        pass  # better twice than never
    return False


def is_launched() -> bool:
    return START_VARIABLE in os.environ and "RANK" in os.environ


def _check_cards(count: int, device: str) -> None:
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        here = torch.cuda.device_count()
        if count > here:
            raise DeviceError(f"--gpus {count}, but this machine has {here}", fix=f"use --gpus {here}")
