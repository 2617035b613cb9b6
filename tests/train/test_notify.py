"""A person who is elsewhere is told once, and nothing that goes wrong on the way harms the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.error import HTTPError

import pytest

from gptfit.config.keys import TrainConfig
from gptfit.errors import ConfigError
from gptfit.logs.events import End, Message, Step
from gptfit.logs.runlog import read_run
from gptfit.notify import send
from gptfit.pages.watcher import Watcher
from gptfit.train.messenger import Messenger
from gptfit.train.train import train

MakeConfig = Callable[..., TrainConfig]


@pytest.fixture
def topic() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """An address as ntfy offers it, and what was posted there."""
    posted: list[tuple[str, str]] = []

    class Topic(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            posted.append((self.headers["Title"], text))
            self.send_response(500 if "refuse" in self.path else 200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Topic)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/topic", posted
    server.shutdown()
    server.server_close()


def test_the_end_of_a_run_is_told_once(
    topic: tuple[str, list[tuple[str, str]]], small_config: MakeConfig, tmp_path: Path
) -> None:
    address, posted = topic
    result = train(small_config(notify=address))
    assert posted == [("gptfit: out ended", f"max_iters at step 8, best validation loss {result.best_val_loss:.4f}")]


@pytest.mark.parametrize("place", ["http://127.0.0.1:9/nobody", "refuse"])
def test_a_failing_webhook_never_harms_the_run(
    place: str, topic: tuple[str, list[tuple[str, str]]], small_config: MakeConfig, tmp_path: Path
) -> None:
    result = train(small_config(notify=place if place != "refuse" else f"{topic[0]}/refuse"))
    assert result.reason == "max_iters"
    log = read_run(tmp_path / "out")
    assert log.end is not None


def test_a_refusal_leaves_no_connection_open(topic: tuple[str, list[tuple[str, str]]]) -> None:
    with pytest.raises(HTTPError) as refusal:
        send(f"{topic[0]}/refuse", "title", "text")
    assert refusal.value.fp is None or refusal.value.fp.closed


def test_an_alarm_is_told_the_first_time_only(topic: tuple[str, list[tuple[str, str]]]) -> None:
    address, posted = topic
    messenger = Messenger(address, "a")
    for step in range(3):
        messenger.append(Step(step, loss=1.0))
        messenger.append(Message("nonfinite", f"update {step} skipped", step))
    messenger.append(Message("checkpoint", "saved", 3))
    messenger.append(End("SIGTERM", 3))
    assert posted == [("gptfit: a", "update 0 skipped"), ("gptfit: a ended", "SIGTERM at step 3")]


@pytest.mark.parametrize("target", ["ntfy.sh/topic", "file:///etc/passwd", "mail"])
def test_what_is_no_address_is_refused_before_the_run(target: str, small_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no address"):
        train(small_config(notify=target))
    assert not (tmp_path / "out").exists()


def test_watch_tells_changes_and_not_what_was_so_before() -> None:
    watcher = Watcher()
    rows = [{"id": "a", "name": "a", "status": "running", "attention": []},
            {"id": "b", "name": "b", "status": "crashed", "attention": ["crashed: its process is gone"]}]  # fmt: skip
    assert watcher.news(rows) == []
    rows[0] = rows[0] | {"attention": ["diverging: loss 5.00 after 3.00"]}
    assert watcher.news(rows) == [("a", "diverging: loss 5.00 after 3.00")]
    rows[0] = rows[0] | {"attention": ["diverging: loss 6.00 after 3.00"]}
    assert watcher.news(rows) == []
    rows[0] = rows[0] | {"status": "finished"}
    assert watcher.news(rows) == [("a", "finished")]
