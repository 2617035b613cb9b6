"""The page of a tuning session as a browser shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptfit.pages.tune_page import TunedCurve, tune_page

BOX = "selector => document.querySelector(selector).getBoundingClientRect().toJSON()"


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_a_phone_has_the_curves_free_of_their_legend(
    scheme: str, tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    """Three lines of legend lay on the curves, and a dark page had a white grid."""
    plain = TunedCurve("as configured", (2, 4, 8), (30e3, 41e3, 50e3), (3e2,) * 3, (4.1, 7.4, 10.9))
    chunked = TunedCurve("chunked_loss = True", (4, 8), (39e3, 49e3), (3e2,) * 2, (5.0, 9.4))
    head, rows = ["micro-batch", "tokens/s"], [["8", "50.0k"]]
    text = tune_page("tune", ["batch_size = 8"], [plain, chunked], (8, 50e3), 11.0, head, rows)
    (tmp_path / "tune.html").write_text(text, encoding="utf-8")
    shown = open_page((tmp_path / "tune.html").as_uri(), offline=True, width=390, scheme=scheme)
    for chart in ("speed", "memory"):
        shown.page.wait_for_selector(f"#{chart} .legend")
        legend, curves = (shown.page.evaluate(BOX, f"#{chart} {part}") for part in (".legend", ".gridlayer"))
        assert legend["bottom"] <= curves["top"] + 1
        assert legend["right"] <= 390
    grid = shown.page.evaluate("getComputedStyle(document.querySelector('#speed .gridlayer path')).stroke")
    assert grid == {"light": "rgb(236, 238, 240)", "dark": "rgb(37, 41, 46)"}[scheme]
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert shown.errors == []
