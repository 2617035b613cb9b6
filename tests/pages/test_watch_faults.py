"""Folders and callers nobody should trust: the list shows what is sound, and the server goes on answering."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from gptfit.errors import RunError
from gptfit.logs import large_log
from gptfit.logs.runlog import RunLog
from gptfit.pages import run_list
from gptfit.pages.follow import end_of_whole_lines, news
from gptfit.pages.idle_connections import MOST_WAITING
from gptfit.pages.live import watch_app
from gptfit.verbs.serve import _address
from tests.made_logs import MakeRun

NANOGPT = "iter 0: loss 4.2, time 10.00ms, mfu -100.00%\niter 1: loss 4.1, time 10.00ms, mfu 1.00%\n"
HEADER: dict[str, Any] = {"event": "header", "name": "odd", "config": {"max_iters": 10}}
STEP: dict[str, Any] = {"event": "step", "step": 1, "loss": 2.0, "ms": 5.0}


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return TestClient(watch_app(tmp_path, ("testserver",)))


def listed(client: TestClient) -> set[str]:
    return {row["name"] for row in client.get("/api/runs").json()}


def test_odd_entries_of_the_folder_hide_no_run(make_run: MakeRun, client: TestClient, tmp_path: Path) -> None:
    make_run("sound")
    (tmp_path / "loop.log").symlink_to(tmp_path / "loop.log")
    (tmp_path / "nowhere.txt").symlink_to(tmp_path / "missing.txt")
    (tmp_path / "folder.log").mkdir()
    (tmp_path / "bytes.log").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "as_folder").mkdir()
    (tmp_path / "as_folder" / "run.jsonl").mkdir()
    locked = tmp_path / "locked.log"
    locked.write_text(NANOGPT)
    locked.chmod(0)
    assert listed(client) - {"locked"} == {"sound"}  # root reads everything


def test_a_log_that_cannot_be_read_a_second_time_hides_no_run(
    make_run: MakeRun, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk shows it once, for its row, and refuses the next reading."""
    make_run("good")
    make_run("other")
    refused: list[Path] = []

    def glance(path: Path) -> RunLog:
        if path.parent.name == "other" and sys._getframe(1).f_code.co_name == "_attention":
            refused.append(path)
            raise RunError(f"{path}: cannot be read: Input/output error")
        return large_log.glance(path)

    monkeypatch.setattr(run_list, "glance", glance)
    assert listed(client) == {"good", "other"}
    assert refused


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such names")
def test_a_name_that_is_no_utf8_is_listed_and_opens(client: TestClient, tmp_path: Path) -> None:
    folder = os.path.join(os.fsencode(tmp_path), b"caf\xe9")
    try:
        os.mkdir(folder)
    except OSError:
        pytest.skip("this file system takes only UTF-8 names")
    with open(os.path.join(folder, b"run.jsonl"), "w") as file:
        file.write(json.dumps(STEP) + "\n")
    (row,) = client.get("/api/runs").json()
    assert row["id"] == "caf\\xe9/run.jsonl" or row["id"] == "caf\\udce9/run.jsonl"
    for page in ("run", "api/news", "compare"):
        assert client.get(f"/{page}", params={"id": row["id"]}).status_code == 200


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.timeout(60)
def test_a_pipe_is_never_opened(make_run: MakeRun, client: TestClient, tmp_path: Path) -> None:
    make_run("sound")
    os.mkfifo(tmp_path / "x.log")
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "run.jsonl")
    assert listed(client) == {"sound"}
    for page in ("run", "api/news", "compare"):
        for run_id in ("x.log", "run/run.jsonl"):
            assert client.get(f"/{page}?id={run_id}").status_code == 404


def test_a_log_cut_short_while_it_is_read_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    """In a process of its own: a mapped file that shrinks ends it with SIGBUS."""
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps({**STEP, "step": i, "pad": "x" * 200}) + "\n" for i in range(20_000)))
    code = f"""
import os
from pathlib import Path
from gptfit.logs import large_log
path = Path({str(path)!r})
real = large_log.spread_lines
def cutting(*args):
    yield from real(*args)
    os.truncate(path, 4096)
large_log.spread_lines, large_log.WHOLE_BYTES = cutting, 1000
print(len(large_log.quick_run(path).steps))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-300:])
    assert 1 <= int(done.stdout) < 100


def test_another_programs_log_without_a_last_newline_is_not_loaded_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(NANOGPT + "iter 2: lo")
    assert news(path, end_of_whole_lines(path))["reset"] is False


def test_a_large_log_with_a_long_line_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_log, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(large_log, "LONGEST_LINE", 2000)
    path = tmp_path / "run.jsonl"
    lines = [json.dumps({**STEP, "step": i}) for i in range(300)]
    lines.insert(150, json.dumps({**HEADER, "pad": "x" * 100_000}))
    path.write_text("\n".join(lines) + "\n")
    run = large_log.quick_run(path)
    assert (run.steps[0].step, run.steps[-1].step) == (0, 299)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[int]:
    """`gptfit watch` with few files to open, as a process usually has; its port."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400)); "
        "from gptfit.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "watch", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    found = next(match for line in process.stdout if (match := re.search(r":(\d+)/", line)))
    yield int(found[1])
    process.send_signal(signal.SIGINT)
    process.wait(timeout=30)
    process.stdout.close()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on open files")
@pytest.mark.timeout(120)
def test_connections_that_ask_for_nothing_do_not_stop_the_server(server: int) -> None:
    idle: list[socket.socket] = []
    try:
        for i in range(MOST_WAITING + 300):
            idle.append(socket.create_connection(("127.0.0.1", server), timeout=10))
            if i % 2:
                idle[-1].sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")  # and never the end of it
        with urllib.request.urlopen(f"http://127.0.0.1:{server}/api/runs", timeout=60) as answer:
            assert answer.status == 200
    finally:
        for each in idle:
            each.close()


def test_the_address_of_every_interface_is_one_that_opens() -> None:
    address = _address("0.0.0.0", 8123, "", "secret")
    assert "0.0.0.0" not in address
    assert re.fullmatch(r"http://[\w.-]+:8123/\?token=secret", address)
    assert _address("127.0.0.1", 80, "plan", None) == "http://127.0.0.1:80/plan"


def test_many_threads_listing_one_folder_agree(make_run: MakeRun, client: TestClient) -> None:
    for i in range(5):
        make_run(f"run{i}", steps=12)
    answers: list[set[str]] = []
    threads = [threading.Thread(target=lambda: answers.append(listed(client))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [{f"run{i}" for i in range(5)}] * 8
