"""A run's page in a browser: its figures and controls, samples by step, and a tool bar that covers nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.made_logs import MakeRun, append_events

OpenPage = Callable[..., Any]
Serve = Callable[[Path], str]
PAGE = "run?id=live/run.jsonl"


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_it_opens_with_four_figures_and_its_curve(
    make_run: MakeRun, tmp_path: Path, watch_server: Serve, open_page: OpenPage, width: int, scheme: str
) -> None:
    make_run("live", steps=60, config={"max_iters": 100})
    shown = open_page(watch_server(tmp_path) + PAGE, width=width, scheme=scheme)
    shown.page.wait_for_selector("#loss .main-svg")
    assert shown.page.locator("#figures strong").count() == 4
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
    places = [shown.page.locator(f"#{name}").bounding_box()["y"] for name in ("figures", "loss", "facts")]
    assert places == sorted(places)
    assert shown.errors == []


def test_smoothing_and_log_scale_are_controls(
    make_run: MakeRun, tmp_path: Path, watch_server: Serve, open_page: OpenPage
) -> None:
    make_run("live", steps=60)
    shown = open_page(watch_server(tmp_path) + PAGE)
    shown.page.wait_for_selector("#loss .main-svg")
    names = "document.getElementById('loss').data.map((trace) => trace.name)"
    assert "train, smoothed" not in shown.page.evaluate(names)
    shown.page.focus("#smoothing")
    for _ in range(9):
        shown.page.keyboard.press("ArrowRight")
    assert "train, smoothed" in shown.page.evaluate(names)
    first = "document.getElementById('loss').data.find((t) => t.name === 'train, smoothed').y"
    ys = shown.page.evaluate(first)
    losses = [2 + 3 / (step + 1) ** 0.5 for step in range(2)]
    weight = 0.09
    assert ys[0] == pytest.approx(losses[0], rel=1e-4)
    assert ys[1] == pytest.approx((weight * losses[0] + losses[1]) / (weight + 1), rel=1e-4)
    for axis in ("x", "y"):
        kind = f"document.getElementById('loss')._fullLayout.{axis}axis.type"
        assert shown.page.evaluate(kind) == "linear"
        shown.page.click(f'[data-log="{axis}"]')
        assert shown.page.evaluate(kind) == "log"
        assert shown.page.get_attribute(f'[data-log="{axis}"]', "aria-pressed") == "true"
    assert shown.errors == []


def test_the_tool_bar_covers_no_curve(
    make_run: MakeRun, tmp_path: Path, watch_server: Serve, open_page: OpenPage
) -> None:
    make_run("live", steps=60)
    shown = open_page(watch_server(tmp_path) + PAGE)
    shown.page.wait_for_selector("#loss .main-svg")
    shown.page.hover("#loss .nsewdrag")
    bar = shown.page.locator("#loss .modebar").bounding_box()
    plot = shown.page.locator("#loss .nsewdrag").bounding_box()
    assert bar["y"] + bar["height"] <= plot["y"] + 1
    for chart in ("speed", "lr"):
        shown.page.hover(f"#{chart} .nsewdrag")
        assert shown.page.locator(f"#{chart} .modebar").count() == 0
    assert shown.errors == []


def test_samples_of_one_step_come_under_one_heading_as_they_are_made(
    make_run: MakeRun, tmp_path: Path, watch_server: Serve, open_page: OpenPage
) -> None:
    run = make_run("live", steps=30)
    append_events(run, [{"event": "sample", "step": 10, "prompt": "Once", "text": " upon"}])
    shown = open_page(watch_server(tmp_path) + PAGE)
    shown.page.wait_for_selector("text=step 10")
    for prompt in ("first", "<i>second</i>"):
        with open(run / "run.jsonl", "a") as file:
            file.write(json.dumps({"event": "sample", "step": 30, "prompt": prompt, "text": " goes on"}) + "\n")
        shown.page.wait_for_selector(f'#samples strong:has-text("{prompt}")', timeout=10_000)
    assert shown.page.locator(".sample-step").all_inner_texts() == ["step 30", "step 10"]
    texts = shown.page.locator("pre.sample").all_inner_texts()
    assert texts == ["first goes on", "<i>second</i> goes on", "Once upon"]
    assert shown.errors == []
