"""The speed model: the direction of each effect, and what a measurement replaces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gptfit.gpus import all_gpus, find
from gptfit.measured import MeasuredSpeed
from gptfit.plan import matmul_rate, speed
from gptfit.plan.setting import Setting, speed_key
from gptfit.shape import ModelShape

SMALL = ModelShape(12, 12, 768, 1024, 50304)
BASE = Setting(SMALL, micro_batch=8, accumulation=64)
RTX_4070 = find("4070")


def tokens_per_s(setting: Setting = BASE, gpu: str = "4070") -> float:
    predicted = speed.predict(setting, find(gpu))
    assert predicted is not None
    return predicted.tokens_per_s.value


def test_shares_sum_to_one() -> None:
    predicted = speed.predict(BASE, RTX_4070)
    assert predicted is not None
    assert sum(predicted.shares.values()) == pytest.approx(1)


def test_a_step_is_its_micro_steps_and_the_update() -> None:
    predicted = speed.predict(BASE, RTX_4070)
    assert predicted is not None
    assert predicted.ms_per_step.value == pytest.approx(64 * predicted.ms_per_micro_step.value, rel=0.01)
    assert predicted.ms_per_step.value > 64 * predicted.ms_per_micro_step.value


def test_the_slow_end_of_tokens_per_s_is_the_long_end_of_the_step() -> None:
    predicted = speed.predict(BASE, RTX_4070)
    assert predicted is not None
    slow_step = 524_288 / predicted.tokens_per_s.low * 1e3
    assert predicted.ms_per_step.high == pytest.approx(slow_step)


@pytest.mark.parametrize(
    "slower",
    [
        replace(BASE, compile=False),
        replace(BASE, checkpoint_activations=True),
        replace(BASE, micro_batch=1, accumulation=512),
        replace(BASE, flash=False),
        replace(BASE, dtype="float32"),
        replace(BASE, shape=replace(SMALL, vocab_size=50257)),
        replace(BASE, accumulation=1),
    ],
)
def test_each_of_these_is_slower(slower: Setting) -> None:
    assert tokens_per_s(slower) < tokens_per_s()


def test_compile_is_worth_an_eighth_on_a_4070() -> None:
    """Published pair at micro-batch 4: 52,682 compiled, 46,811 eager."""
    four = replace(BASE, micro_batch=4, accumulation=8)
    assert tokens_per_s(four) / tokens_per_s(replace(four, compile=False)) == pytest.approx(1.125, abs=0.06)


def test_mfu_rises_with_the_width_of_the_model() -> None:
    narrow = speed.predict(replace(BASE, shape=replace(SMALL, n_embd=384)), RTX_4070)
    wide = speed.predict(BASE, RTX_4070)
    assert narrow is not None
    assert wide is not None
    assert narrow.mfu is not None
    assert wide.mfu is not None
    assert narrow.mfu < wide.mfu


def test_a_width_of_504_takes_as_long_as_512() -> None:
    odd, even = (speed.block_flops(replace(BASE, shape=replace(SMALL, n_embd=width))) for width in (504, 512))
    assert odd == pytest.approx(even)


def test_muon_costs_little_with_a_large_step_and_much_with_a_tiny_one() -> None:
    muon = replace(BASE, optimizer="muon")
    assert tokens_per_s(muon) > 0.97 * tokens_per_s()
    tiny = replace(BASE, micro_batch=1, accumulation=1)
    assert tokens_per_s(replace(tiny, optimizer="muon")) < 0.8 * tokens_per_s(tiny)


def test_a_measurement_is_used_and_the_update_keeps_its_estimate() -> None:
    timing = MeasuredSpeed(speed_key(BASE, "card"), "2.9", 50_000.0, 160.0)
    predicted = speed.predict(BASE, RTX_4070, timing)
    assert predicted is not None
    assert predicted.ms_per_micro_step.value == 160
    assert predicted.ms_per_step.value > 64 * 160
    assert predicted.tokens_per_s.basis == "measured"


def test_a_measurement_speaks_for_a_card_without_a_known_rate() -> None:
    unknown = replace(RTX_4070, bf16_tflops=None, fp32_tflops=None, measured_low_tflops=None)
    assert speed.predict(BASE, unknown) is None
    predicted = speed.predict(BASE, unknown, MeasuredSpeed(speed_key(BASE, "card"), "2.9", 50_000.0, 160.0))
    assert predicted is not None
    assert predicted.mfu is None


@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.name)
def test_every_card_in_the_table_is_between_a_tenth_and_all_of_its_peak(gpu: object) -> None:
    from gptfit.gpus import GPU

    assert isinstance(gpu, GPU)
    predicted = speed.predict(BASE, gpu)
    if predicted is None:
        assert matmul_rate.peak_tflops(gpu) is None
    else:
        assert predicted.mfu is not None
        assert 0.1 < predicted.mfu < 1.0


@pytest.mark.parametrize(
    ("better", "worse"), [("4090", "4070"), ("4070 Ti", "4070"), ("5090", "4090"), ("H100", "A100 80GB")]
)
def test_the_faster_card_is_faster(better: str, worse: str) -> None:
    assert tokens_per_s(gpu=better) > tokens_per_s(gpu=worse)
