"""A program forked from a process that has imported it behaves as one started afresh."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from gptfit.doctor.calibration import MODULE
from gptfit.tune import nursery as nursery_module
from gptfit.tune.nursery import nursery
from gptfit.tune.trial_process import run_process

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are forked on Linux only")

PROGRAM = """
import os, time

seen = []

def main():
    order = os.read(0, 100).decode().strip()
    seen.append(order)
    os.write(1, f"{order} {len(seen)} {os.getsid(0) == os.getpid()}".encode())
    if order == "hang":
        time.sleep(100)
    if order == "die":
        os.kill(os.getpid(), 9)
    if order == "raise":
        raise ValueError("so it is said")
    return int(order) if order.isdigit() else 0
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Sequence[str]]:
    (tmp_path / "orders.py").write_text(PROGRAM, encoding="utf-8")
    with nursery("orders", {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}) as command:
        yield command


def ordered(command: Sequence[str], order: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=order, capture_output=True, text=True, timeout=60)


def test_every_run_has_its_own_streams_memory_session_and_exit_code(command: Sequence[str]) -> None:
    for order in ("3", "0", "hello"):
        done = ordered(command, order)
        assert done.stdout == f"{order} 1 True", "nothing of the run before is left"
        assert done.returncode == (int(order) if order.isdigit() else 0)


def test_a_run_that_is_killed_or_raises_ends_as_it_would_by_itself(command: Sequence[str]) -> None:
    assert ordered(command, "die").returncode == -9
    failed = ordered(command, "raise")
    assert failed.returncode == 1
    assert failed.stderr.rstrip().endswith("ValueError: so it is said")


def test_whoever_asked_and_is_gone_leaves_no_process(command: Sequence[str]) -> None:
    asking = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert asking.stdin is not None
    assert asking.stdout is not None
    asking.stdin.write("hang")
    asking.stdin.flush()
    assert asking.stdout.read(4) == "hang"
    # Of this process alone: other tests of this file may run beside it.
    of_nursery = [each for each in psutil.Process().children(recursive=True) if "orders" in each.cmdline()]
    assert len(of_nursery) == 3, "the nursery, the run and who watches it"
    asking.kill()
    asking.communicate()
    deadline = time.monotonic() + 20
    while sum(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in of_nursery) > 1:
        assert time.monotonic() < deadline, "it goes on though nobody waits for it"
        time.sleep(0.05)


def test_a_nursery_that_cannot_start_ends_those_who_ask() -> None:
    with nursery("no_such_module", {}) as command:
        assert ordered(command, "1").returncode == 1


def test_where_no_socket_can_be_had_a_fresh_python_runs_the_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("a" * 120)
    deep.mkdir()
    monkeypatch.setattr(nursery_module.tempfile, "tempdir", str(deep))
    with nursery("json.tool", {}) as command:
        assert ordered(command, "[1]").stdout.split() == ["[", "1", "]"]


def test_the_card_s_checks_can_be_forked() -> None:
    """What they import starts no thread and no card, after which a fork of it would hang or fail."""
    program = (
        f"import threading, torch, {MODULE}; print(threading.active_count(), torch.cuda.is_initialized(), "
        "len(__import__('os').listdir('/proc/self/task')))"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["1", "False", "1"]
    with nursery(MODULE, {}) as command:
        for check in ("muon", "attention"):
            ended = run_process({"check": check, "config": {"device": "cpu"}, "threads": 1}, 60, command=command)
            assert ended.outcome == "ok", ended.message
            assert ended.values["level"] == "ok"
