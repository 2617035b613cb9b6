"""The plan page in a real browser: by keyboard and button, wide and narrow, with nothing on its console."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OpenPage = Callable[..., Any]


def test_a_model_too_large_is_made_to_fit_with_one_button(
    tmp_path: Path, watch_server: Callable[[Path], str], open_page: OpenPage
) -> None:
    shown = open_page(watch_server(tmp_path) + "plan")
    page = shown.page
    page.wait_for_selector("#headline:has-text('fits')")
    page.focus("#f-size")
    page.keyboard.type("774M")
    page.wait_for_selector("#headline:has-text('does not fit')")
    assert page.input_value("#f-n_embd") == "1280"
    remedy = page.inner_text(".problem.error button").removeprefix("Apply ").split(", ")
    page.click(".problem.error button")
    page.wait_for_selector("body[data-fits=yes]")
    assert remedy
    for key, _, _ in (change.partition("=") for change in remedy):
        assert f"\n{key} = " in page.inner_text("#config")
    page.reload()
    page.wait_for_selector("body[data-fits=yes]")
    assert page.input_value("#f-n_layer") == "36", "the address holds what was chosen"
    assert shown.points("curve") > 30
    assert shown.errors == []


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_a_phone_shows_all_of_it_without_scrolling_sideways(
    tmp_path: Path, watch_server: Callable[[Path], str], open_page: OpenPage, scheme: str
) -> None:
    shown = open_page(watch_server(tmp_path) + "plan", width=390, scheme=scheme)
    shown.page.wait_for_selector("#numbers strong")
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert shown.page.evaluate("document.querySelector('.memory .limit').getBoundingClientRect().right") <= 390
    assert shown.errors == []
