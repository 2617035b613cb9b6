"""The verbs where Python has not what Windows has not, and where stdout speaks an old code page."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from gptfit.config.keys import TrainConfig
from gptfit.device import host_memory
from gptfit.tune import trial_process
from tests.small_runs import REPO

# Read by every Python below the test: what the standard library of Windows lacks.
SITE = """
import os, signal, sys
import psutil  # on this system it needs what is taken away here; on Windows it has its own means
sys.modules["resource"] = None
for module, names in ((os, ("sysconf", "killpg", "sched_getaffinity")), (signal, ("SIGKILL", "SIGHUP"))):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
"""
JOURNEY = """
import sys
from gptfit.cli import main
for words in {words!r}:
    code = main(words)
    assert code == 0, (words, code)
    print("DONE", words[0])
"""


def test_the_verbs_run_without_posix_names_and_into_a_cp1252_pipe(
    small_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Ünïcode — “quotes”, 漢字 and emoji 🙂 in every line of it.\n" * 400, encoding="utf-8")
    data, out = str(tmp_path / "prepared"), str(tmp_path / "out")
    config = small_config(dataset=data, max_iters=2, lr_decay_iters=2, eval_interval=2, vocab_size=257)
    defaults = TrainConfig().as_dict()
    keys = [f"--{key}={value}" for key, value in config.as_dict().items() if value != defaults[key]]
    words = [
        ["prepare", str(text), "--tokenizer", "bytes", "--out", data],
        ["plan", *keys, "--gpu=RTX 4070"],
        ["train", *keys],
        ["sample", out, "--prompt", "漢字 🙂", "--tokens", "4", "--n", "1"],
        ["doctor", *keys],
        ["tune", *keys, "--sizes", "2", "--minutes", "0.01"],
    ]
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(tmp_path / "site"), str(REPO)])
    done = subprocess.run(
        [sys.executable, "-c", JOURNEY.format(words=words)],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "cp1252", "OMP_NUM_THREADS": "1"},
    )
    printed = done.stdout.decode("utf-8")
    assert done.returncode == 0, printed + done.stderr.decode("utf-8", "replace")
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("DONE")] == [w[0] for w in words]
    assert "漢字 🙂" in printed


def test_peak_memory_is_known_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_memory, "_STATUS", tmp_path / "none")
    monkeypatch.setattr(psutil.Process, "memory_info", lambda self: SimpleNamespace(rss=5, peak_wset=7))
    assert host_memory.peak_host_bytes() == 7
    assert host_memory.free_host_bytes() > 2**20


def test_a_trial_and_its_tools_end_where_there_are_no_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial has started a tool of its own, as the compiler does, when its time is up."""
    monkeypatch.delattr(os, "killpg")
    program = (
        "import json, subprocess, sys, time\n"
        "tool = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(json.dumps({'event': 'stage', 'name': str(tool.pid)}), flush=True)\n"
        "time.sleep(600)\n"
    )
    tools: list[str] = []
    ended = trial_process.run_process({}, 8.0, tools.append, (sys.executable, "-c", program))
    assert ended.outcome == "timeout"
    assert len(tools) == 1
    assert not _is_alive(int(tools[0]))


def _is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_trials_tools_do_not_hold_its_request(tmp_path: Path) -> None:
    """On Windows a tool waits for a pipe that a thread of its parent is reading; here it would read from it."""
    program = (
        "import subprocess, sys\n"
        "from gptfit.tune.trial import _own_stdin\n"
        "requests = _own_stdin()\n"
        "first = requests.readline()\n"
        "tool = subprocess.run([sys.executable, '-c', 'import sys; print(len(sys.stdin.read()))'], capture_output=True)\n"
        "print(first.strip(), tool.stdout.decode().strip(), requests.read().strip())\n"
    )
    done: Any = subprocess.run(
        [sys.executable, "-c", program],
        input="request\nthe rest\n",
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )
    assert done.stdout.split("\n")[0] == "request 0 the rest", done.stderr
