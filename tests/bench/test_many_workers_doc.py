"""docs/prepare.md says what `bench/prepare.py` measured of many workers; processes are used where threads would wait."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from gptfit.data.worker_processes import MOST_THREADS


@pytest.fixture
def many(repo: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repo / "bench"))
    return importlib.import_module("_many_workers")


def test_the_page_has_what_was_measured(many: ModuleType) -> None:
    page = many.PAGE.read_text(encoding="utf-8")
    assert many.BEGIN + many.section(many.read_kept()) + many.END in page, "run: python bench/prepare.py ray --keep"
    assert "interpreter lock" in page


def test_threads_are_used_only_as_long_as_four_fifths_of_their_time_is_work(many: ModuleType) -> None:
    share = many.read_kept()["lock"]["share"]
    assert many.efficiency(share, 16) < 0.8 <= many.efficiency(share, MOST_THREADS)
