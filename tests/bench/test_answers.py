"""docs/answers.md says what `propose` says."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def answers(repo: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repo / "bench"))
    return importlib.import_module("answers")


@pytest.mark.parametrize(("card", "hours"), [("RTX 4070 12GB", 12), ("T4", 3)])
def test_the_page_has_what_propose_answers_today(answers: ModuleType, card: str, hours: float) -> None:
    assert answers.row(card, hours) in answers.PAGE.read_text(encoding="utf-8"), "run: python bench/answers.py"


def test_every_card_and_span_is_on_the_page(answers: ModuleType) -> None:
    rows = [line for line in answers.PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(answers.CARDS) * len(answers.HOURS)
