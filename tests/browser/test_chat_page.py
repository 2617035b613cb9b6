"""The chat page in a browser: an answer that streams, by keyboard, on a phone, light and dark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.generate.test_evaluate import make_byte_run
from tests.made_logs import MakeRun

OpenPage = Callable[..., Any]
Serve = Callable[[Path], str]
PATIENCE_MS = 120_000  # a model's process imports torch first


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_a_question_is_answered(
    make_run: MakeRun, tmp_path: Path, watch_server: Serve, open_page: OpenPage, width: int, scheme: str
) -> None:
    make_run("talk", steps=20)
    make_byte_run(tmp_path / "talk", 40)
    address = watch_server(tmp_path)
    shown = open_page(address + "run?id=talk/run.jsonl", width=width, scheme=scheme)
    shown.page.click("text=chat with this run")
    shown.page.wait_for_selector("#question:focus")  # set when the page has loaded; keys typed before it go nowhere
    shown.page.keyboard.type("Who are you?")
    shown.page.keyboard.press("Enter")
    shown.page.wait_for_selector("#talk .assistant:not(:empty)", timeout=PATIENCE_MS)
    shown.page.wait_for_selector("#send:enabled", timeout=PATIENCE_MS)
    assert shown.page.locator("#talk .user").inner_text() == "Who are you?"
    assert "not trained on conversations" in shown.page.inner_text("#state"), "nobody can know that from the answer"
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
    shown.page.click("#again")
    assert shown.page.locator("#talk p").count() == 0
    assert shown.errors == []


def test_a_run_that_cannot_be_loaded_is_one_line_and_the_question_stays(
    make_run: MakeRun, tmp_path: Path, watch_server: Serve, open_page: OpenPage
) -> None:
    (make_run("broken", steps=20) / "ckpt.pt").write_bytes(b"no checkpoint")
    shown = open_page(watch_server(tmp_path) + "chat?id=broken/run.jsonl")
    shown.page.fill("#question", "Hello?")
    shown.page.click("#send")
    shown.page.wait_for_selector("#state:has-text('ckpt.pt')", timeout=PATIENCE_MS)
    assert shown.page.input_value("#question") == "Hello?"
    assert shown.page.locator("#talk p").count() == 0
    assert shown.errors == []
