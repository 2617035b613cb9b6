"""One config, one setting: plan, tune, doctor, advice and training resolve what a config leaves open the same way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gptfit.config.keys import TrainConfig
from gptfit.gpus import find
from gptfit.measured import SpeedKey
from gptfit.plan.plan import plan
from gptfit.plan.resolve import Place, on_card, setting_of
from gptfit.plan.setting import Setting, speed_key
from gptfit.shape import ModelShape
from gptfit.train.out_of_memory import out_of_memory_advice
from gptfit.tune.space import base_variant, candidate_setting
from gptfit.tune.trials import Candidate, Machine
from gptfit.units import GIB

RTX_4070 = find("RTX 4070")
CARD = Machine(
    device="NVIDIA GeForce RTX 4070",
    kind="cuda",
    dtype="bfloat16",
    has_bf16=True,
    torch="2.9",
    threads=1,
    cores=8,
    total_bytes=int(12 * GIB),
    free_bytes=int(11 * GIB),
    gpu=RTX_4070.name,
)


@pytest.mark.parametrize(("rows", "chunked"), [(8, False), (32, True)])
def test_auto_chunks_are_those_that_make_it_fit_in_plan_and_in_tune(rows: int, chunked: bool) -> None:
    config = TrainConfig(batch_size=rows, gradient_accumulation_steps=512 // rows)
    planned = plan(config, config.shape(), RTX_4070).setting
    tried = candidate_setting(config, config.shape(), CARD, Candidate(rows, base_variant(config, CARD)))
    assert planned == tried
    assert planned is not None
    assert planned.chunked_loss is chunked


def test_on_a_cpu_large_logits_are_chunked_as_training_does_it() -> None:
    config = TrainConfig(batch_size=12, dtype="float32")
    cpu = Place("cpu", "float32", 64 * GIB)
    assert setting_of(config, config.shape(), cpu).chunked_loss
    assert not setting_of(config, config.shape(65), cpu).chunked_loss
    assert not setting_of(config.replace(chunked_loss=False), config.shape(), cpu).chunked_loss


def test_a_device_that_cannot_compile_is_planned_eager() -> None:
    config = TrainConfig()
    assert setting_of(config, config.shape(), on_card(RTX_4070)).compile
    assert not setting_of(config, config.shape(), Place(can_compile=False)).compile


def test_advice_leaves_out_what_is_done_already() -> None:
    """A run that computes its loss in chunks was told to do so."""
    setting = Setting(ModelShape(12, 12, 768, 1024, 50304), 1, chunked_loss=True)
    assert "--chunked_loss" not in out_of_memory_advice(setting)
    both = replace(setting, checkpoint_activations=True)
    assert "--checkpoint_activations" not in out_of_memory_advice(both)
    assert "brings it to about" in out_of_memory_advice(both)


def test_a_key_is_made_of_every_part_of_the_setting_that_matters() -> None:
    setting = Setting(ModelShape(12, 12, 768, 1024, 50304), 8, chunked_loss=True)
    key = speed_key(setting, "card")
    assert isinstance(key, SpeedKey)
    assert (key.device, key.micro_batch, key.chunked_loss, key.n_embd) == ("card", 8, True, 768)
    assert speed_key(replace(setting, accumulation=7, processes=2), "card") == key, "a micro-step is the same"
    for change in ({"flash": False}, {"compile": False}, {"dtype": "float32"}, {"chunked_loss": False}):
        assert speed_key(replace(setting, **change), "card") != key  # type: ignore[arg-type]
