"""The report as a browser shows it: offline, without a complaint, on every axis, whatever a log says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptfit.cli import main
from gptfit.pages.report import write_report
from tests.made_logs import LARGE_LOG, SMALL_LOG, MakeRun

OpenPage = Callable[..., Any]


@pytest.fixture
def report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    out = tmp_path / "report.html"
    assert main(["compare", str(SMALL_LOG), str(LARGE_LOG), "--html", str(out)]) == 0
    capsys.readouterr()
    return out


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_it_renders_offline_without_a_complaint_or_a_request(report: Path, open_page: OpenPage, scheme: str) -> None:
    shown = open_page(report.as_uri(), offline=True, scheme=scheme)
    assert shown.points("loss") > 100
    assert shown.errors == []
    assert shown.requests == [report.as_uri()]


def test_the_verdict_comes_first(report: Path, open_page: OpenPage) -> None:
    page = open_page(report.as_uri()).page
    assert "B is ahead at equal training time" in page.locator("h1").inner_text()
    assert page.locator("main > section").first.get_attribute("id") == "headline"


def test_the_axis_switch_changes_every_chart(report: Path, open_page: OpenPage) -> None:
    shown = open_page(report.as_uri())
    assert shown.axis_title("loss") == "step"
    for axis, title in (
        ("hours", "hours of training"),
        ("tokens", "tokens"),
        ("flops", "training FLOPs"),
        ("step", "step"),
    ):
        shown.page.click(f'[data-axis="{axis}"]')
        assert {shown.axis_title(chart) for chart in ("loss", "gap", "speed", "mfu")} == {title}
        assert shown.page.get_attribute(f'[data-axis="{axis}"]', "aria-pressed") == "true"
    assert shown.errors == []


def test_hours_are_hours(report: Path, open_page: OpenPage) -> None:
    shown = open_page(report.as_uri())
    shown.page.click('[data-axis="hours"]')
    last = shown.page.evaluate("Math.max(...document.getElementById('loss').data.flatMap(t => t.x))")
    assert last == pytest.approx(20000 * 3.91 / 3600, rel=0.01)


def test_every_chart_fills_its_card(make_run: MakeRun, tmp_path: Path, open_page: OpenPage) -> None:
    """Five small charts: the last stands alone in its row and takes the room of the one that is not there."""
    write_report([make_run("a"), make_run("b")], tmp_path / "two.html")
    page = open_page((tmp_path / "two.html").as_uri()).page
    page.wait_for_timeout(300)
    widths = page.evaluate(
        "[...document.querySelectorAll('.chart')].filter(c => c.data).map(c => [c.clientWidth, c.querySelector('svg').clientWidth])"
    )
    assert len(widths) == 7
    assert all(abs(box - drawn) <= 2 for box, drawn in widths)


def test_it_fits_a_phone(report: Path, open_page: OpenPage) -> None:
    page = open_page(report.as_uri(), width=375).page
    assert page.evaluate("document.documentElement.scrollWidth") <= 375


def test_the_theme_button_turns_the_page_dark(report: Path, open_page: OpenPage) -> None:
    page = open_page(report.as_uri()).page
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_a_hostile_run_is_shown_as_text(make_run: MakeRun, tmp_path: Path, open_page: OpenPage) -> None:
    evil = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">'
    run = make_run(evil, config={"dataset": evil}, versions={"torch": evil})
    with open(run / "run.jsonl", "a") as file:
        file.write('{"event": "sample", "step": 9, "text": "<script>window.hacked = 3</script>"}\n')
    write_report([run, make_run("b")], tmp_path / "evil.html")
    shown = open_page((tmp_path / "evil.html").as_uri())
    assert shown.page.evaluate("window.hacked") is None
    assert evil in shown.page.locator("#facts").inner_text()
    assert "<script>window.hacked = 3</script>" in shown.page.locator("#samples").inner_text()
    assert shown.errors == []


def test_a_folder_of_reports_shares_one_plotly(make_run: MakeRun, tmp_path: Path, open_page: OpenPage) -> None:
    out = tmp_path / "reports" / "a.html"
    write_report([make_run("a")], out, shared=True)
    assert out.stat().st_size < 200_000
    assert (out.parent / "plotly.min.js").is_file()
    shown = open_page(out.as_uri())
    assert shown.points("loss") > 50
    assert shown.errors == []
