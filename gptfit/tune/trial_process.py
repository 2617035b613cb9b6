"""The parent's side of a trial: starts the process, reads its lines, ends it in time, says how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import psutil

from gptfit.tune.trials import Outcome

COMMAND = (sys.executable, "-m", "gptfit.tune.trial")
# How native code says that memory ran out before it gives up.
OUT_OF_MEMORY_WORDS = ("std::bad_alloc", "Cannot allocate memory", "out of memory", "MemoryError")
KEPT_STDERR_BYTES = 20_000
END_WAIT_S = 10.0  # a killed process is gone once the system has had time for it
KILLED = -9  # SIGKILL, a name that Windows does not have


@dataclass(frozen=True)
class Ended:
    """How a process ended and its last word."""

    outcome: Outcome
    duration_s: float
    message: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def run_process(
    request: dict[str, Any],
    limit_s: float,
    on_stage: Callable[[str], None] = lambda stage: None,
    command: Sequence[str] = COMMAND,
) -> Ended:
    """Send one request, wait for its answer, and leave no process behind, however this call ends."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        process = _start(command, request, errors)
        try:
            last = _read_answers(process, began + limit_s, on_stage)
            duration_s = time.monotonic() - began
            if last is None:
                return Ended("timeout", duration_s, f"ended at its time limit of {limit_s:.0f} s")
            return _ended(last, process.wait(), duration_s, _tail(errors))
        finally:
            _end_group(process)


def _start(command: Sequence[str], request: dict[str, Any], errors: IO[bytes]) -> subprocess.Popen[str]:
    environment = dict(os.environ)
    if request.get("threads"):
        environment["OMP_NUM_THREADS"] = str(request["threads"])
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        encoding="utf-8",
        env=environment,
        # A group of its own: Ctrl-C reaches the parent alone, and compiler workers end with their trial.
        start_new_session=True,
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same on Windows
    )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it ended already; its exit code will say why
    return process


def _read_answers(
    process: subprocess.Popen[str], deadline: float, on_stage: Callable[[str], None]
) -> dict[str, Any] | None:
    """The last event, empty when it ended without one; None when the time was up."""
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
    last: dict[str, Any] = {}
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None
        if line is None:
            return last
        event = json.loads(line)
        if event["event"] == "stage":
            on_stage(event["name"])
        else:
            last = event


def _pump(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _ended(last: dict[str, Any], code: int, duration_s: float, errors: str) -> Ended:
    event = last.get("event")
    if event in ("done", "machine"):
        return Ended("ok", duration_s, values=last)
    if event == "oom":
        return Ended("oom", duration_s, "out of memory")
    if event == "error":
        return Ended("crash", duration_s, str(last["message"]))
    if code == KILLED:
        return Ended("oom", duration_s, "killed by the system, as it does when memory runs out")
    if any(words in errors for words in OUT_OF_MEMORY_WORDS):
        return Ended("oom", duration_s, "out of memory in native code")
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    final = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
    return Ended("crash", duration_s, f"{how}: {final[:200]}" if final else how)


def _tail(errors: IO[bytes]) -> str:
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - KEPT_STDERR_BYTES))
    return errors.read().decode(errors="replace")


def _end_group(process: subprocess.Popen[str]) -> None:
    """Also when it ended by itself: its compiler workers may not have."""
    try:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, -KILLED)
        else:
            _end_tree(psutil.Process(process.pid))
    except (ProcessLookupError, PermissionError, psutil.Error):
        pass
    assert process.stdin is not None
    try:
        process.stdin.close()
    except BrokenPipeError:
        pass
    process.wait()


def _end_tree(process: psutil.Process) -> None:
    """Where there are no process groups: the process first, so that it starts no more tools, then the tools it had."""
    tools = process.children(recursive=True)
    for each in (process, *tools):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(tools, timeout=END_WAIT_S)
