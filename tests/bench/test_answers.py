"""docs/answers.md says what `propose` says."""

from __future__ import annotations

import pytest

from bench import answers


@pytest.mark.parametrize(("card", "hours"), [("RTX 4070 12GB", 12), ("T4", 3)])
def test_the_page_has_what_propose_answers_today(
    card: str, hours: float, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("GPTFIT_CACHE", str(tmp_path))  # what somebody measured is not on the page
    assert answers.row(card, hours) in answers.PAGE.read_text(encoding="utf-8"), "run: python bench/answers.py"


def test_every_card_and_span_is_on_the_page() -> None:
    rows = [line for line in answers.PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(answers.CARDS) * len(answers.HOURS)
