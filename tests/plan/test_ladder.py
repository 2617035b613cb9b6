"""The memory ladder: what is named fits by the plan itself, costs what is said, and rounds only where it must."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gptfit import gpus
from gptfit.cli import main
from gptfit.config.keys import TrainConfig
from gptfit.config.read import load_config
from gptfit.plan import ladder, memory
from gptfit.plan.resolve import on_card, setting_of
from gptfit.plan.setting import Setting
from gptfit.units import GIB

SIZES = {"350M": (24, 16, 1024), "774M": (36, 20, 1280), "1.5B": (48, 25, 1600)}
CARDS = ("RTX 3070", "RTX 4070", "RTX 4060 Ti 16GB", "RTX 4090")


def setting(size: str, card: str) -> Setting:
    layers, heads, width = SIZES[size]
    config = TrainConfig(
        n_layer=layers, n_head=heads, n_embd=width, batch_size=12, gradient_accumulation_steps=40, min_lr=6e-5
    )
    return setting_of(config, config.shape(), on_card(gpus.find(card)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("card", CARDS)
def test_a_way_fits_and_keeps_the_step_or_says_what_is_missing(size: str, card: str) -> None:
    asked, gpu = setting(size, card), gpus.find(card)
    usable = memory.usable_bytes(gpu)
    found = ladder.climb(asked, gpu, usable)
    if found.way is None:
        assert found.missing_bytes > 0
        return
    assert memory.predict(found.way.setting).device.value <= usable
    assert found.way.setting.tokens_per_step == asked.tokens_per_step
    for rung in found.way.rungs:
        assert getattr(found.way.setting, rung.key) == rung.value


def test_774m_on_a_12_gb_card_needs_no_rounding() -> None:
    gpu = gpus.find("RTX 4070")
    way = ladder.climb(setting("774M", "RTX 4070"), gpu, memory.usable_bytes(gpu)).way
    assert way is not None
    assert all(rung.is_exact for rung in way.rungs)
    assert ("optimizer_device", "cpu") in [(rung.key, rung.value) for rung in way.rungs]
    assert way.host_bytes == 8 * way.setting.shape.n_weights


def test_what_looks_ahead_keeps_its_state_as_it_is() -> None:
    gpu = gpus.find("RTX 4070")
    asked = replace(setting("350M", "RTX 4070"), optimizer="muon", lookahead=0.6)
    found = ladder.climb(asked, gpu, memory.usable_bytes(gpu))
    rungs = [*(step.rung for step in found.steps), *(found.way.rungs if found.way else ())]
    assert rungs
    assert not [rung.key for rung in rungs if rung.key.startswith("optimizer")]


def test_main_memory_that_is_too_small_closes_the_rungs_that_need_it(capsys: pytest.CaptureFixture[str]) -> None:
    gpu, asked = gpus.find("RTX 4070"), setting("774M", "RTX 4070")
    way = ladder.climb(asked, gpu, memory.usable_bytes(gpu), host_free_bytes=4 * GIB).way
    assert way is not None
    assert way.host_bytes < 4 * GIB
    words = ["plan", "--n_layer=36", "--n_embd=1280", "--n_head=20", "--gpu=4090", "--optimizer_device=cpu"]
    assert main([*words, "--batch_size=2", "--host-memory=4"]) == 1
    assert "keeps 5.8 GiB in main memory, of which 4.0 GiB are free" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--batch_size=2", "--host-memory=16"]) == 0


def test_no_rung_helps_where_it_is_taken_already() -> None:
    gpu = gpus.find("RTX 4070")
    asked = replace(setting("1.5B", "RTX 4070"), chunked_loss=True, optimizer_device="cpu", optimizer_state="8bit")
    found = ladder.climb(asked, gpu, memory.usable_bytes(gpu))
    saved = {step.rung.words: step.saves_bytes for step in found.steps}
    assert saved["chunked_loss=True"] == saved["optimizer_device=cpu"] == 0
    assert saved["checkpoint_activations=True"] > saved["checkpoint_activations=wide"] > 0


def test_plan_shows_the_ladder_and_writes_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "fits.py"
    words = ["plan", "--n_layer=36", "--n_embd=1280", "--n_head=20", "--gpu=4070", f"--write={written}"]
    assert main(words) == 1
    shown = capsys.readouterr().out
    assert "memory ladder" in shown
    assert "optimizer_device = 'cpu'" in shown
    config = load_config([str(written)], []).config
    assert (config.optimizer_device, config.tokens_per_iter()) == ("cpu", TrainConfig().tokens_per_iter())
    assert main(["plan", str(written), "--gpu=4070"]) == 0
