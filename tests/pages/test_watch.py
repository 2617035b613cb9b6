"""The live pages without a browser: what is listed, what is sent, and what is refused."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from gptfit.cli import main
from gptfit.errors import RunError
from gptfit.logs import large_log
from gptfit.pages.follow import end_of_whole_lines, news
from gptfit.pages.live import watch_app
from gptfit.pages.run_list import Listing, status
from tests.made_logs import MakeRun, append_events

NANOGPT = "iter 0: loss 4.2, time 10.00ms, mfu -100.00%\niter 1: loss 4.1, time 10.00ms, mfu 1.00%\n"


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return TestClient(watch_app(tmp_path, ("testserver",)))


def test_runs_are_listed_with_status_eta_and_sparkline(make_run: MakeRun, client: TestClient) -> None:
    make_run("going", steps=50, config={"max_iters": 100})
    (row,) = client.get("/api/runs").json()
    assert (row["name"], row["status"], row["step"]) == ("going", "running", 50)
    assert row["seconds_left"] == pytest.approx(50 * 0.05)
    assert len(row["spark"]) == 5


def test_a_status_says_what_became_of_a_run_in_words() -> None:
    row = {"ended": None, "written": 1000.0, "said": None, "ms": 100.0, "ours": True, "step": 99, "max_iters": 100}
    assert status(row, 1010.0) == "running"
    assert status({**row, "ms": 60_000.0}, 2000.0) == "running"  # a step takes a minute
    assert status(row, 2000.0) == "crashed"
    assert status(row, 1010.0, owner_lives=False) == "running", "it may be a process of another machine"
    assert status(row, 1020.0, owner_lives=False) == "crashed"
    assert status(row, 2000.0, owner_lives=True) == "silent"
    assert status(row, -9000.0) == "crashed", "a clock that was set back makes no old run live"
    assert status({**row, "ended": "max_iters"}, 1010.0) == "finished"
    assert status({**row, "ended": "SIGINT"}, 1010.0) == "stopped by Ctrl-C"
    assert status({**row, "ended": "the sky fell"}, 1010.0) == "ended: the sky fell"
    other = {**row, "ours": False}
    assert (status(other, 1010.0), status(other, 2000.0)) == ("finished", "finished")
    other["step"] = 50
    assert (status(other, 1010.0), status(other, 2000.0)) == ("running", "no longer written")


def test_a_log_copied_now_is_as_old_as_what_it_says(make_run: MakeRun, client: TestClient) -> None:
    """Its file is new: twenty lines of last week's run were "running, 4 min left"."""
    run = make_run("copied", steps=50, config={"max_iters": 100})
    assert client.get("/api/runs").json()[0]["status"] == "running"
    lines = [json.loads(line) for line in (run / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    (run / "run.jsonl").write_text("")
    append_events(run, [line | {"time": time.time() - 7 * 86_400} for line in lines])
    assert client.get("/api/runs").json()[0]["status"] == "crashed"


def test_a_run_whose_process_died_has_crashed_and_its_page_says_so(make_run: MakeRun, client: TestClient) -> None:
    run = make_run("gone")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (run / ".lock").write_text(f"{dead.pid}\n")
    os.utime(run / "run.jsonl", (time.time() - 30,) * 2)
    assert client.get("/api/runs").json()[0]["status"] == "crashed"
    assert '"status":"crashed"' in client.get("/run?id=gone/run.jsonl").text
    (run / ".lock").write_text(f"{os.getpid()}\n")
    assert client.get("/api/news?id=gone/run.jsonl").json()["status"] == "running"


def test_a_run_that_is_over_says_so_on_its_page(make_run: MakeRun, client: TestClient) -> None:
    with open(make_run("done") / "run.jsonl", "a") as file:
        file.write('{"event": "end", "reason": "max_iters", "step": 100}\n')
    assert '"status":"finished"' in client.get("/run?id=done/run.jsonl").text
    assert client.get("/api/news?id=done/run.jsonl").json()["status"] == "finished"


def test_what_a_tracker_copies_is_no_run(make_run: MakeRun, client: TestClient, tmp_path: Path) -> None:
    copy = make_run("run") / "wandb" / "run-1" / "files"
    copy.mkdir(parents=True)
    (copy / "output.log").write_text(NANOGPT)
    assert [row["id"] for row in client.get("/api/runs").json()] == ["run/run.jsonl"]


def test_runs_of_one_name_are_told_apart(make_run: MakeRun, client: TestClient, tmp_path: Path) -> None:
    for folder in ("monday", "tuesday"):
        make_run("out", folder=tmp_path / folder)
    make_run("other")
    names = sorted(row["name"] for row in client.get("/api/runs").json())
    assert names == ["monday/out", "other", "tuesday/out"]


def test_a_resumed_run_with_fewer_steps_is_not_beyond_its_end(make_run: MakeRun, client: TestClient) -> None:
    make_run("far", steps=60, config={"max_iters": 40})
    (row,) = client.get("/api/runs").json()
    assert (row["step"], row["max_iters"]) == (60, 60)


def test_the_page_of_one_run_opens_with_the_curve(make_run: MakeRun, client: TestClient) -> None:
    make_run("a")
    make_run("b")
    one = client.get("/run?id=a/run.jsonl").text
    assert one.index('id="loss"') < one.index('id="facts"')
    two = client.get("/compare?id=a/run.jsonl&id=b/run.jsonl").text
    assert two.index('id="facts"') < two.index('id="loss"')


def test_nanogpt_logs_in_the_folder_are_listed_too(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text(NANOGPT)
    (tmp_path / "notes.txt").write_text("buy milk\n")
    assert [row["name"] for row in client.get("/api/runs").json()] == ["old"]


def test_hundreds_of_runs_are_listed(make_run: MakeRun, client: TestClient) -> None:
    for i in range(300):
        make_run(f"run{i}", steps=12)
    assert len(client.get("/api/runs").json()) == 300


def test_only_whole_new_lines_are_sent(make_run: MakeRun) -> None:
    path = make_run("live") / "run.jsonl"
    offset = end_of_whole_lines(path)
    with open(path, "a") as file:
        file.write('{"event": "step", "step": 100, "loss": 1.5, "seconds": 5.05}\n{"event": "step", "st')
    answer = news(path, offset)
    assert answer["steps"]["step"] == [100]
    with open(path, "a") as file:
        file.write('ep": 101, "loss": 1.4, "seconds": 5.1}\n')
    answer = news(path, answer["offset"])
    assert answer["steps"]["step"] == [101]
    assert news(path, answer["offset"])["steps"]["step"] == []


def test_a_log_that_was_replaced_starts_over(make_run: MakeRun) -> None:
    path = make_run("live") / "run.jsonl"
    assert news(path, path.stat().st_size + 1)["reset"] is True


def test_a_million_lines_answer_with_few(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    line = '{"event": "step", "step": %d, "loss": 2.0, "seconds": 1.0}\n'
    path.write_text("".join(line % i for i in range(50_000)))
    answer = news(path, 0)
    assert len(answer["steps"]["step"]) <= 2002


@pytest.mark.parametrize(
    "run_id", ["../secret.txt", "/etc/passwd", "a/../../secret.txt", "link.txt", "", "a\0.txt", "a"]
)
def test_nothing_outside_the_folder_is_opened(tmp_path: Path, run_id: str) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text("iter 0: loss 1.0, time 1.00ms, mfu 1.00%\n")
    (root / "link.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(RunError, match="no such run"):
        Listing(root).path_of(run_id)
    client = TestClient(watch_app(root, ("testserver",)))
    for page in ("run", "compare", "api/news"):
        assert client.get(f"/{page}", params={"id": run_id}).status_code == 404
    assert client.get("/api/runs").json() == []


def test_another_host_name_is_refused(tmp_path: Path) -> None:
    client = TestClient(watch_app(tmp_path, ("127.0.0.1", "localhost")))
    assert client.get("/", headers={"host": "evil.example:80"}).status_code == 421
    assert client.get("/", headers={"host": "localhost:8123"}).status_code == 200


def test_a_token_is_needed_when_others_can_reach_the_port(tmp_path: Path) -> None:
    client = TestClient(watch_app(tmp_path, (), token="secret"))
    assert client.get("/").status_code == 403
    assert client.get("/?token=wrong").status_code == 403
    assert client.get("/?token=secret").status_code == 200
    assert client.get("/api/runs").status_code == 200  # the cookie carries it on


def test_pages_allow_no_foreign_script(client: TestClient) -> None:
    policy = client.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy


def test_unknown_assets_are_not_found(client: TestClient) -> None:
    assert client.get("/page/style.css").status_code == 200
    assert client.get("/page/..%2Fwatch.py").status_code == 404


@pytest.mark.parametrize(("tokenizer", "bits"), [("tokenizer.json", 1.0), ("gpt2", None)])
def test_the_list_has_bits_per_byte_where_the_vocabulary_is_not_gpt2s(
    tokenizer: str, bits: float | None, tmp_path: Path
) -> None:
    header = {"event": "header", "dataset": {"tokenizer": tokenizer, "bytes_per_token": 4.0}}
    found = {"event": "eval", "step": 8, "val_loss": 4 * math.log(2)}
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (header, found)))
    (row,) = Listing(tmp_path).runs()
    assert row["bits_per_byte"] == pytest.approx(bits)


def test_a_trainer_that_prints_bits_per_byte_alone_has_its_last_in_the_list(make_run: MakeRun, tmp_path: Path) -> None:
    """nanochat's; the column was empty."""
    folder = make_run("chat", kind="nanochat")
    lines = [line for line in (folder / "run.jsonl").read_text().splitlines() if '"eval"' not in line]
    (folder / "run.jsonl").write_text("\n".join(lines) + "\n")
    append_events(folder, [{"event": "eval", "step": step, "val_bpb": 1 - step / 200} for step in (10, 20)])
    (row,) = Listing(tmp_path).runs()
    assert (row["val_loss"], row["bits_per_byte"]) == (None, 0.9)


def test_a_list_of_several_tokenizers_is_in_bits_per_byte_and_sorted_by_them(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loss per token is lower with shorter tokens, whatever the model is worth."""
    for name, tokenizer, length, level in (("usual", "gpt2", 4.0, 0.5), ("own", "tokenizer.json", 2.0, 0.1)):
        make_run(name, level=level, dataset={"folder": "data/x", "tokenizer": tokenizer, "bytes_per_token": length})
    assert main(["runs", str(tmp_path), "--sort", "val_loss", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["name"], first["val_loss"] > second["val_loss"]) == ("usual", True)
    assert first["bits_per_byte"] < second["bits_per_byte"]
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split()[:6] == ["run", "status", "step", "loss", "b/byte", "val"]


def test_a_large_log_is_seen_whole_by_a_few_of_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    with open(path, "w") as file:
        file.write('{"event": "header", "name": "big"}\n')
        for step in range(20_000):
            file.write(
                json.dumps({"event": "step", "step": step, "loss": 2 + 1 / math.sqrt(step + 1), "ms": 5.0}) + "\n"
            )
            if step % 1000 == 0:
                file.write(json.dumps({"event": "eval", "step": step, "val_loss": 3.0}) + "\n")
    monkeypatch.setattr(large_log, "WHOLE_BYTES", 1000)
    run = large_log.quick_run(path)
    assert len(run.evals) == 20
    assert 3000 < len(run.steps) < 8000
    assert (run.steps[0].step, run.steps[-1].step, run.name) == (0, 19_999, "big")
    assert large_log.glance(path).steps[-1].step == 19_999


def test_a_large_nanogpt_log_is_seen_whole_by_a_few_of_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.txt"
    with open(path, "w") as file:
        for step in range(20_000):
            if step % 1000 == 0:
                file.write(f"step {step}: train loss 3.0000, val loss 3.1000\n")
            file.write(f"iter {step}: loss 3.0500, time 10.00ms, mfu {15.37 if step > 4 else -100:.2f}%\n")
    monkeypatch.setattr(large_log, "WHOLE_BYTES", 1000)
    run = large_log.quick_run(path)
    assert len(run.evals) == 20
    assert len(run.steps) < 10_000
    assert run.steps[-1].step == 19_999
    assert run.evals[-1].seconds == pytest.approx(190.0, rel=0.01)
