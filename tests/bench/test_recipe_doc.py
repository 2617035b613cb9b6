"""docs/recipe.md says what the ablation found, and the default is what it says."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from gptfit.config.keys import DEFAULTS, INGREDIENTS


@pytest.fixture
def doc(repo: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repo / "bench"))
    return importlib.import_module("_recipe_doc")


def test_the_page_is_rendered_from_the_results(doc: ModuleType) -> None:
    results = json.loads(doc.RESULTS.read_text(encoding="utf-8"))
    assert doc.DOC.read_text(encoding="utf-8") == doc.render(results, doc.read_found())


def test_the_results_hold_every_variant(doc: ModuleType) -> None:
    rows = json.loads(doc.RESULTS.read_text(encoding="utf-8"))["rows"]
    assert [row["name"] for row in rows] == [variant.name for variant in doc.VARIANTS]


def test_every_ingredient_has_its_row_away_from_the_default(doc: ModuleType) -> None:
    groups = importlib.import_module("_recipe_groups")
    rows = [*doc.VARIANTS, *groups.GROUPS]
    changed = {key: value for row in rows for key, value in row.keys.items() if key in INGREDIENTS}
    assert set(changed) == set(INGREDIENTS)
    assert all(value != DEFAULTS[key] for key, value in changed.items())


def test_every_ingredient_and_its_default_are_explained(doc: ModuleType) -> None:
    page = doc.DOC.read_text(encoding="utf-8")
    for key in INGREDIENTS:
        shown = DEFAULTS[key] if isinstance(DEFAULTS[key], str | bool) else f"{DEFAULTS[key]:g}"
        assert f"| `{key}` | `{shown}` |" in page
