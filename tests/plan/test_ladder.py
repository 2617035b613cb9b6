"""The memory ladder: what is named fits by the plan itself, costs what is said, and rounds only where it must."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gptfit import gpus
from gptfit.cli import main
from gptfit.config.keys import TrainConfig, find_problems
from gptfit.config.read import load_config
from gptfit.plan import ladder, memory
from gptfit.plan.check import way_up
from gptfit.plan.plan import plan
from gptfit.plan.resolve import on_card, setting_of
from gptfit.plan.setting import Setting, Spread
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


RECIPES: dict[str, dict[str, Any]] = {"gpt2": {}, "modern": {"arch": "modern", "optimizer": "muon"}}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cards", [*((card,) for card in CARDS), ("RTX 4090",) * 8, ("RTX 4090", "RTX 3060")], ids=str)
def test_what_is_said_of_a_way_is_what_plan_says_of_the_config_it_means(
    recipe: str, size: str, cards: tuple[str, ...]
) -> None:
    layers, heads, width = SIZES[size]
    config = TrainConfig(n_layer=layers, n_head=heads, n_embd=width, gradient_accumulation_steps=40, **RECIPES[recipe])
    gpu, n = gpus.find(cards[-1]), len(cards)
    spread = Spread(cards=tuple(map(gpus.find, cards)) if n > 1 else ())
    asked = plan(config, config.shape(), gpu, processes=n, spread=spread)
    way = asked.ladder.way if asked.ladder else None
    if way is None:
        return
    answer = plan(config.replace(**way_up(asked)), config.shape(), gpu, processes=n, spread=spread)
    assert answer.setting == way.setting
    assert answer.memory is not None
    assert answer.speed is not None
    assert answer.fits
    assert answer.memory.device == way.device
    assert answer.speed.tokens_per_s.value == pytest.approx(way.tokens_per_s)
    assert (answer.fit_chance, answer.is_tight) == (way.fit_chance, not way.is_sure)
    words = " ".join(problem.fix for problem in asked.problems)
    assert ("likely to fit)" in words) == answer.is_tight


@pytest.mark.parametrize("size", ["774M", "1.5B"])
def test_a_way_that_surely_fits_comes_before_one_that_may(size: str) -> None:
    gpu = gpus.find("RTX 4060 Ti 16GB")
    usable = memory.usable_bytes(gpu)
    way = ladder.climb(setting(size, gpu.name), gpu, usable, loss_is_open=True).way
    assert way is not None
    assert memory.predict(way.setting).device.high <= usable
    # With every measure taken already there is one way left, which fits as likely as not.
    last = replace(setting(size, gpu.name), micro_batch=1, **{rung.key: rung.value for rung in ladder.RUNGS})
    way = ladder.climb(last, gpu, memory.predict(last).device.value).way
    assert way is not None
    assert way.fit_chance == pytest.approx(0.5)


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


def test_several_processes_are_offered_what_they_can_do_and_no_more() -> None:
    for rung in ladder._rungs(replace(setting("1.5B", "RTX 4070"), processes=2)):
        assert not find_problems({**TrainConfig().as_dict(), rung.key: rung.value}, 2), rung
    for rung in ladder.RUNGS:
        problems = find_problems({**TrainConfig().as_dict(), rung.key: rung.value}, 2)
        assert bool(problems) == (rung.key in ladder.ALONE_ONLY), rung


def test_a_model_too_large_for_every_other_measure_is_divided() -> None:
    gpu = gpus.find("RTX 4090")
    config = TrainConfig(n_layer=32, n_head=32, n_embd=4096, batch_size=4, gradient_accumulation_steps=128)
    asked = setting_of(config, config.shape(), on_card(gpu), processes=8)
    found = ladder.climb(asked, gpu, memory.usable_bytes(gpu))
    assert found.way is not None
    assert found.way.keys["parallel"] == "fsdp"
    assert memory.predict(found.way.setting).device.value <= memory.usable_bytes(gpu)
    assert ladder.climb(replace(asked, processes=1), gpu, memory.usable_bytes(gpu)).way is None


def test_main_memory_that_is_too_small_closes_the_rungs_that_need_it(capsys: pytest.CaptureFixture[str]) -> None:
    gpu, asked = gpus.find("RTX 4070"), setting("774M", "RTX 4070")
    way = ladder.climb(asked, gpu, memory.usable_bytes(gpu), host_free_bytes=4 * GIB).way
    assert way is not None
    assert way.host_bytes < 4 * GIB
    words = ["plan", "--n_layer=36", "--n_embd=1280", "--n_head=20", "--gpu=4090", "--optimizer_device=cpu"]
    assert main([*words, "--batch_size=2", "--host-memory=4"]) == 1
    assert "keeps 5.8 GiB in main memory, of which 4.0 GiB are free" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--batch_size=2", "--host-memory=16"]) == 0
    capsys.readouterr()
    assert main([*words, "--batch_size=2", "--host-memory=16", "--gpus=8"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "and 8 x 5.8 GiB = 46.1 GiB of main memory, streamed" in shown
    assert "keeps 8 x 5.8 GiB = 46.1 GiB in main memory, of which 16.0 GiB are free" in shown


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
    answer = " ".join(shown.split())
    assert "fix: checkpoint_activations = 'wide', optimizer_device = 'cpu', batch_size = 2 with" in answer
    assert re.search(r"same tokens per step: 1\d\.\d GiB and 5\.8 GiB of host memory, \d\.\d+k tokens/s, \d+ d", answer)
    config = load_config([str(written)], []).config
    assert (config.optimizer_device, config.tokens_per_iter()) == ("cpu", TrainConfig().tokens_per_iter())
    assert main(["plan", str(written), "--gpu=4070"]) == 0
