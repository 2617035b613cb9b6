"""The configs we ship: each is read, checked, and fits the card its name says."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from gptfit.config.read import load_config
from gptfit.config.recipe import training_keys
from gptfit.gpus import find
from gptfit.plan.memory import fits, predict, usable_bytes
from gptfit.plan.resolve import on_card, setting_of

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_ready_config_is_read_without_remarks(path: Path) -> None:
    assert load_config([path]).notes == ()


@pytest.mark.parametrize("path", [p for p in CONFIGS if "4070" in p.stem], ids=lambda path: path.stem)
def test_a_ready_config_fits_its_card(path: Path) -> None:
    config, gpu = load_config([path]).config, find("RTX 4070 12GB")
    assert fits(setting_of(config, config.shape(), on_card(gpu)), gpu)


@pytest.fixture
def tool(repo: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repo / "tools"))
    return importlib.import_module("ready_configs")


def test_ready_configs_are_what_the_tool_makes(tool: ModuleType) -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in CONFIGS if path.stem.startswith("gpt2_")}
    assert written == tool.ready_texts(), "make them again: python tools/ready_configs.py"


def test_ready_configs_fit_their_cards_with_a_margin(tool: ModuleType) -> None:
    for memory_gb, (card, sizes) in tool.CARDS.items():
        gpu = find(card)
        assert gpu.vram_gib == memory_gb
        for size in sizes:
            config = tool.ready_config(gpu, size)
            setting = setting_of(config, config.shape(), on_card(gpu))
            assert predict(setting).device.value <= 0.95 * usable_bytes(gpu), (card, size)


@pytest.mark.parametrize("path", [p for p in CONFIGS if p.stem.startswith("modern")], ids=lambda path: path.stem)
def test_a_modern_config_has_the_recipes_keys(path: Path) -> None:
    config = load_config([path]).config
    expected = training_keys(config.max_iters, config.tokens_per_iter())
    assert {key: getattr(config, key) for key in expected} == expected
