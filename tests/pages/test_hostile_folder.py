"""One odd entry in a watched folder is left out; the others are listed, and the server goes on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from gptfit.pages import follow
from gptfit.pages.live import watch_app
from tests.made_logs import MakeRun

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="files as Linux has them")


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return TestClient(watch_app(tmp_path, ("testserver",)))


def step(**values: object) -> str:
    return json.dumps({"event": "step", "step": 1, "loss": 2.0, "ms": 5.0, **values})


ODD_LOGS = {
    "nan": '{"event": "step", "step": 1, "loss": NaN, "ms": Infinity}',
    "surrogate": '{"event": "header", "name": "\\ud800"}\n' + step(),
    "name is a list": '{"event": "header", "name": [1], "config": [2]}\n' + step(),
    "config is a number": '{"event": "header", "config": 7}\n' + step(),
    "max_iters is text": '{"event": "header", "config": {"max_iters": "many"}}\n' + step(),
    "huge numbers": step(loss=1e308, ms=10**400, time=10**300),
    "ms is a list": step(ms=[1, 2]),
    "end is odd": step() + '\n{"event": "end", "reason": {"a": 1}, "time": "late"}',
    "deep": '{"event": "header", "config": ' + "[" * 50_000 + "]" * 50_000 + "}\n" + step(),
    "bytes": "\x00\x01\x02",
}


@pytest.mark.parametrize("case", ODD_LOGS)
def test_an_odd_log_does_not_blank_the_list(case: str, make_run: MakeRun, client: TestClient, tmp_path: Path) -> None:
    make_run("good")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "run.jsonl").write_text(ODD_LOGS[case] + "\n", encoding="utf-8")
    names = [row["id"] for row in client.get("/api/runs").json()]
    assert "good/run.jsonl" in names
    for path in (
        "/run?id=odd/run.jsonl",
        "/compare?id=odd/run.jsonl&id=good/run.jsonl",
        "/api/news?id=odd/run.jsonl&from=0",
    ):
        assert client.get(path).status_code in (200, 404), path


@linux_only
def test_pipes_and_loops_are_passed_over(make_run: MakeRun, client: TestClient, tmp_path: Path) -> None:
    make_run("good")
    os.mkfifo(tmp_path / "x.log")
    os.mkfifo(tmp_path / "y.txt")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "loop.log").symlink_to(tmp_path / "loop.log")
    assert [row["id"] for row in client.get("/api/runs").json()] == ["good/run.jsonl"]
    assert client.get("/run?id=x.log").status_code == 404


@pytest.mark.parametrize(
    "run_id", ["a" * 5000 + "/run.jsonl", "a/" * 3000 + "run.jsonl", "%ff/run.jsonl", "%00run.jsonl"]
)
def test_an_id_that_can_be_no_file_is_not_found(client: TestClient, run_id: str) -> None:
    assert client.get(f"/run?id={run_id}").status_code == 404
    assert client.get(f"/api/news?id={run_id}").status_code == 404


def test_a_line_without_end_is_passed_over_and_the_rest_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "MOST_BYTES", 1000)
    path = tmp_path / "run.jsonl"
    path.write_text(step() + "\n" + "x" * 5000 + "\n" + step(step=2) + "\n")
    offset, steps, asked = 0, [], 0
    while asked < 20:
        answer = follow.news(path, offset)
        asked += 1
        steps += answer["steps"]["step"]
        assert answer["offset"] > offset or not answer["more"], "asked again for the same without a pause"
        offset = answer["offset"]
        if not answer["more"]:
            break
    assert steps == [1, 2]
    assert asked < 10


@linux_only
def test_a_thousand_silent_connections_do_not_keep_a_reader_out(make_run: MakeRun, tmp_path: Path) -> None:
    """More than the usual limit of descriptors; each is closed after a while, and meanwhile others are served."""
    make_run("good")
    program = (
        "import gptfit.pages.idle_connections as p, sys\np.FIRST_REQUEST_SECONDS = 1.0\n"
        f"from gptfit.cli import main\nmain(['watch', {str(tmp_path)!r}, '--port=0'])"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    silent: list[socket.socket] = []
    try:
        assert process.stdout is not None
        address = next(line for line in process.stdout if line.startswith("open ")).split()[1]
        port = int(address.rstrip("/").rpartition(":")[2])
        for _ in range(700):  # this process has a limit too
            silent.append(socket.create_connection(("127.0.0.1", port), timeout=20))
        rows = json.loads(urllib.request.urlopen(f"{address}api/runs", timeout=60).read())
        assert [row["id"] for row in rows] == ["good/run.jsonl"]
        time.sleep(1.5)
        silent[0].settimeout(60)
        assert silent[0].recv(1) == b"", "a connection that asks for nothing is closed"
    finally:
        for connection in silent:
            connection.close()
        process.terminate()
        process.communicate()
