"""What each rung of the memory ladder saves by the plan, and by torch's own count of the engine's tensors."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gptfit.plan import memory
from gptfit.plan.ladder import RUNGS

SIZES: dict[str, Any] = {
    "n_layer": 2, "n_head": 8, "n_embd": 512, "block_size": 512, "batch_size": 8, "gradient_accumulation_steps": 2,
    "vocab_size": 32768,
}  # fmt: skip
MODERN = {"arch": "modern", "optimizer": "muon", "n_layer": 8, "batch_size": 2}


@pytest.fixture
def bench(repo: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repo / "bench"))
    return importlib.import_module("memory")


@pytest.mark.parametrize("model", [{}, pytest.param(MODERN, marks=pytest.mark.slow)], ids=["gpt2", "modern"])
def test_a_rung_saves_what_the_plan_says_within_a_tenth(bench: ModuleType, model: dict[str, Any]) -> None:
    device_peak = importlib.import_module("_tracked").device_peak
    model = {**SIZES, **model}
    plain, says = device_peak(bench.config(model)), memory.predict(bench.setting(model)).allocated.value
    found = {}
    for rung in RUNGS:
        keys = {**model, rung.key: rung.value}
        predicted = says - memory.predict(bench.setting(keys)).allocated.value
        found[rung.words] = (plain - device_peak(bench.config(keys))) / predicted
    assert {words: ratio for words, ratio in found.items() if not 0.9 <= ratio <= 1.1} == {}
