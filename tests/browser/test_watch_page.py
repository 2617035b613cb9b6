"""The live pages as a browser shows them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.made_logs import MakeRun

OpenPage = Callable[..., Any]
Serve = Callable[[Path], str]


def test_a_new_point_is_shown_within_two_seconds(
    make_run: MakeRun,
    tmp_path: Path,
    watch_server: Serve,
    open_page: OpenPage,
) -> None:
    run = make_run("live", steps=30)
    shown = open_page(watch_server(tmp_path) + "run?id=live/run.jsonl")
    shown.page.wait_for_selector("#loss .main-svg")
    before, waits = shown.points("loss"), []
    for step in (30, 31, 32):  # the best of three: other work on the machine may delay one
        with open(run / "run.jsonl", "a") as file:
            file.write(json.dumps({"event": "step", "step": step, "loss": 1.5, "ms": 50, "seconds": step / 20}) + "\n")
        began = time.monotonic()
        shown.page.wait_for_selector(f'#live[data-step="{step}"]', timeout=20_000)
        waits.append(time.monotonic() - began)
    assert min(waits) < 2
    assert shown.points("loss") == before + 3
    assert shown.errors == []


def test_new_samples_and_evals_reach_the_page(
    make_run: MakeRun,
    tmp_path: Path,
    watch_server: Serve,
    open_page: OpenPage,
) -> None:
    run = make_run("live", steps=30)
    shown = open_page(watch_server(tmp_path) + "run?id=live/run.jsonl")
    with open(run / "run.jsonl", "a") as file:
        file.write(
            json.dumps({"event": "eval", "step": 40, "train_loss": 1.1, "val_loss": 1.25, "seconds": 2.0}) + "\n"
        )
        file.write(json.dumps({"event": "sample", "step": 40, "text": "Once <b>upon</b>"}) + "\n")
    shown.page.wait_for_selector("text=Once <b>upon</b>", timeout=10_000)
    shown.page.wait_for_selector('h1:has-text("1.2500")', timeout=10_000)
    assert shown.errors == []


def test_only_new_lines_are_sent(make_run: MakeRun, tmp_path: Path, watch_server: Serve, open_page: OpenPage) -> None:
    make_run("live", steps=2000)
    shown = open_page(watch_server(tmp_path) + "run?id=live/run.jsonl")
    with shown.page.expect_response(lambda response: "/api/news" in response.url) as caught:
        pass
    assert len(caught.value.body()) < 500


def test_two_runs_are_compared_by_clicking(
    make_run: MakeRun,
    tmp_path: Path,
    watch_server: Serve,
    open_page: OpenPage,
) -> None:
    make_run("first")
    make_run("second", level=-0.5)
    shown = open_page(watch_server(tmp_path))
    shown.page.wait_for_selector("text=first")
    assert shown.page.locator("#compare").is_disabled()
    shown.page.check('[aria-label="compare first"]')
    shown.page.check('[aria-label="compare second"]')
    shown.page.click("#compare")
    shown.page.wait_for_selector("#loss .main-svg")
    assert "is ahead" in shown.page.locator("h1").inner_text()
    shown.page.click('[data-axis="hours"]')
    assert shown.axis_title("gap") == "hours of training"
    assert shown.errors == []


def test_a_hostile_run_name_is_shown_as_text(
    make_run: MakeRun, tmp_path: Path, watch_server: Serve, open_page: OpenPage
) -> None:
    evil = "<img src=x onerror=alert(1)>"
    make_run("safe")
    path = tmp_path / "safe" / "run.jsonl"
    path.write_text(path.read_text().replace('"name": "safe"', f'"name": "{evil}"'))
    address = watch_server(tmp_path)
    shown = open_page(address)
    shown.page.wait_for_selector(f"text={evil}")
    assert shown.page.locator("img").count() == 0
    shown.page.click(f"text={evil}")
    shown.page.wait_for_selector("#loss .main-svg")
    assert evil in shown.page.locator("#facts").inner_text()
    assert shown.page.locator("img").count() == 0
    assert shown.errors == []


def test_who_walks_the_list_with_the_keyboard_stays_where_they_were(
    make_run: MakeRun, tmp_path: Path, watch_server: Serve, open_page: OpenPage
) -> None:
    """The rows are made anew every two seconds, and the focus went to the page's beginning with them."""
    make_run("first")
    make_run("second")
    shown = open_page(watch_server(tmp_path))
    shown.page.locator('[aria-label="compare first"]').focus()
    shown.page.keyboard.press("Space")
    shown.page.evaluate("document.getElementById('runs').firstChild.id = 'old'")
    shown.page.wait_for_selector("#old", state="detached", timeout=20_000)
    assert shown.page.evaluate("document.activeElement.getAttribute('aria-label')") == "compare first"
    assert shown.page.locator('[aria-label="compare first"]').is_checked()
    assert shown.errors == []


def test_what_is_held_against_each_other_has_one_unit(
    make_run: MakeRun, tmp_path: Path, watch_server: Serve, open_page: OpenPage
) -> None:
    """The plan's nats stood under bits per byte."""
    make_run("bytes")
    answer = {"val_loss": 1.5, "bits_per_byte": 2.25, "planned": {"value": 1.6}, "projected": {"value": 1.4}}

    def in_bits(route: Any) -> None:
        (row,) = route.fetch().json()
        route.fulfill(json=[row | answer | {"status": "running"}])

    shown = open_page(watch_server(tmp_path) + "chat")
    shown.page.route("**/api/runs", in_bits)
    shown.page.goto(shown.page.url.removesuffix("chat"))
    cell = shown.page.locator("#runs td:nth-child(6)")
    cell.wait_for()
    assert cell.inner_text().splitlines() == ["2.2500 bits/byte", "→ 2.10, plan 2.40", "1.5000 nats/token"]


def test_a_phone_shows_the_loss_of_every_run(
    make_run: MakeRun, tmp_path: Path, watch_server: Serve, open_page: OpenPage
) -> None:
    make_run("a_run_with_a_name_that_is_long_for_a_phone")
    shown = open_page(watch_server(tmp_path), width=375)
    shown.page.wait_for_selector("#runs tr")
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 375
    assert shown.page.locator("#runs td:nth-child(2)").bounding_box()["width"] > 250, "its name has the line to itself"
    for place in (5, 6):  # loss, validation
        box = shown.page.locator(f"#runs td:nth-child({place})").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 375
    assert shown.errors == []


def test_a_finished_run_is_not_live_and_opens_with_its_curve(
    make_run: MakeRun, tmp_path: Path, watch_server: Serve, open_page: OpenPage
) -> None:
    with open(make_run("done") / "run.jsonl", "a") as file:
        file.write(json.dumps({"event": "end", "reason": "max_iters", "step": 100}) + "\n")
    shown = open_page(watch_server(tmp_path) + "run?id=done/run.jsonl")
    shown.page.wait_for_selector("#loss .main-svg")
    state = shown.page.locator("#live")
    assert state.inner_text().startswith("finished: step 99")
    assert "live" not in (state.get_attribute("class") or "")
    assert shown.page.locator("#loss").bounding_box()["y"] < 400
    assert shown.errors == []
