"""The configs we ship: each is read, checked, and fits the card its name says."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptfit.config.read import load_config
from gptfit.config.recipe import training_keys
from gptfit.gpus import find
from gptfit.plan.memory import fits
from gptfit.plan.resolve import on_card, setting_of

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_ready_config_is_read_without_remarks(path: Path) -> None:
    assert load_config([path]).notes == ()


@pytest.mark.parametrize("path", [p for p in CONFIGS if "4070" in p.stem], ids=lambda path: path.stem)
def test_a_ready_config_fits_its_card(path: Path) -> None:
    config, gpu = load_config([path]).config, find("RTX 4070 12GB")
    assert fits(setting_of(config, config.shape(), on_card(gpu)), gpu)


@pytest.mark.parametrize("path", [p for p in CONFIGS if p.stem.startswith("modern")], ids=lambda path: path.stem)
def test_a_modern_config_has_the_recipes_keys(path: Path) -> None:
    config = load_config([path]).config
    expected = training_keys(config.max_iters)
    assert {key: getattr(config, key) for key in expected} == expected
