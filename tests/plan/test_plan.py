"""What plan says of whole configs: the worked numbers, a real six-step history, and advice that circulates."""

from __future__ import annotations

import math

import pytest

from gptfit.config.keys import TrainConfig
from gptfit.estimate import Estimate
from gptfit.gpus import find
from gptfit.measured import MeasuredLoss, MeasuredSpeed, Measurements
from gptfit.plan.plan import eval_seconds, plan
from gptfit.plan.resolve import on_card, setting_of
from gptfit.plan.result import DataFacts, Plan
from gptfit.plan.setting import speed_key

RTX_4070 = find("RTX 4070")


def planned(gpu: str = "RTX 4070", program: str = "gptfit", **values: object) -> Plan:
    config = TrainConfig.unchecked(**values)
    return plan(config, config.shape(), find(gpu), program=program)


def test_worked_numbers_of_gpt2_small() -> None:
    answer = planned(batch_size=8, gradient_accumulation_steps=64)
    assert answer.shape.n_weights == 124_373_760
    assert answer.shape.parameters == 123_587_328
    assert answer.shape.flops_per_token == 854_770_176
    assert answer.tokens_per_step == 524_288
    assert answer.speed is not None
    assert answer.speed.mfu == pytest.approx(0.82, abs=0.08)
    assert answer.speed.mfu_a100 == pytest.approx(0.154, abs=0.015)
    assert answer.speed.tokens_per_s.low <= 56_109 <= answer.speed.tokens_per_s.high


def test_worked_numbers_of_the_41m_model() -> None:
    answer = planned(n_embd=384, batch_size=16, gradient_accumulation_steps=32)
    assert answer.shape.parameters == pytest.approx(40.55e6, rel=0.001)
    assert answer.speed is not None
    assert answer.speed.mfu == pytest.approx(0.69, abs=0.05)
    assert answer.speed.tokens_per_s.low <= 134_272 <= answer.speed.tokens_per_s.high


class TestSixStepsOfARealHistory:
    """12 layers, 12 heads, block 1024 on a 12 GB RTX 4070, as tried one after the other with nanoGPT."""

    def test_512_with_12_heads_cannot_start(self) -> None:
        answer = planned(n_embd=512, batch_size=16, gradient_accumulation_steps=32)
        assert not answer.starts
        assert not answer.runs
        assert answer.errors[0].where == "n_embd"
        assert "n_head = 8" in answer.errors[0].fix

    def test_576_at_16_is_out_of_memory(self) -> None:
        answer = planned(n_embd=576, batch_size=16, gradient_accumulation_steps=32, program="nanogpt")
        assert answer.starts
        assert answer.fits is False
        assert not answer.runs

    def test_504_runs_but_its_head_size_is_slow(self) -> None:
        answer = planned(n_embd=504, batch_size=16, gradient_accumulation_steps=32)
        assert answer.runs
        assert any("head size 42" in problem.message for problem in answer.problems)
        wider = planned(n_embd=512, n_head=8, batch_size=16, gradient_accumulation_steps=32)
        assert answer.speed is not None
        assert wider.speed is not None
        # The wider model does more work in the same or less time.
        assert wider.speed.tflops > answer.speed.tflops

    def test_384_fits_at_69_percent_of_peak(self) -> None:
        answer = planned(n_embd=384, batch_size=16, gradient_accumulation_steps=32)
        assert answer.runs
        assert answer.speed is not None
        assert answer.speed.mfu == pytest.approx(0.69, abs=0.05)

    def test_768_at_16_is_out_of_memory_and_8_is_the_remedy(self) -> None:
        answer = planned(batch_size=16, gradient_accumulation_steps=32, program="nanogpt")
        assert answer.fits is False
        assert "batch_size = 8 with gradient_accumulation_steps = 64" in answer.errors[0].fix
        assert answer.ladder is not None
        assert not answer.ladder.steps  # nanoGPT has no rungs

    @pytest.mark.parametrize(("rows", "chunked"), [(16, False), (32, True)])
    def test_what_fits_here_and_not_in_nanogpt_is_said(self, rows: int, chunked: bool) -> None:
        answer = planned(batch_size=rows, n_layer=6, gradient_accumulation_steps=512 // rows, gpu="RTX 3080 10GB")
        assert answer.fits
        assert answer.setting is not None
        assert answer.setting.chunked_loss is chunked
        (remark,) = [problem for problem in answer.problems if problem.where == "chunked_loss"]
        assert "nanoGPT computes it whole" in remark.message
        assert "in nanoGPT batch_size = 8 with gradient_accumulation_steps = 64" in remark.fix

    def test_768_at_8_fits(self) -> None:
        answer = planned(batch_size=8, gradient_accumulation_steps=64, program="nanogpt")
        assert answer.runs
        assert answer.largest_micro_batch is not None
        assert 8 <= answer.largest_micro_batch < 16

    def test_without_logits_that_come_back_larger_ones_fit(self) -> None:
        wide = planned(batch_size=16, gradient_accumulation_steps=32, chunked_loss=False)
        assert wide.runs
        assert wide.memory is not None
        nanogpt = planned(batch_size=16, gradient_accumulation_steps=32, program="nanogpt").memory
        assert nanogpt is not None
        # Two more tensors of the size of the logits, and room for gradients and state that are made late.
        assert nanogpt.allocated.value - wide.memory.allocated.value == pytest.approx(2 * 2 * 16 * 1024 * 50304)


class TestAdviceThatCirculates:
    """An RTX 4070 recipe passed around, corrected."""

    def test_12_12_512_called_125m_does_not_start(self) -> None:
        answer = planned(n_embd=512, n_head=12, wandb_run_name="gpt2-125M")
        assert not answer.starts
        assert any(problem.where == "wandb_run_name" and "63.5M" in problem.message for problem in answer.problems)

    def test_12_8_512_is_63m(self) -> None:
        assert planned(n_embd=512, n_head=8).shape.parameters == pytest.approx(63.5e6, rel=0.001)

    def test_6_6_384_called_84m_is_30m(self) -> None:
        answer = planned(n_layer=6, n_head=6, n_embd=384, wandb_run_name="my-84M")
        assert answer.shape.parameters == pytest.approx(29.9e6, rel=0.002)
        assert any("says 84M" in problem.message for problem in answer.problems)

    def test_less_accumulation_frees_no_memory_and_shrinks_the_step(self) -> None:
        many = planned(batch_size=16, gradient_accumulation_steps=32)
        few = planned(batch_size=16, gradient_accumulation_steps=4)
        assert many.memory is not None
        assert few.memory is not None
        assert few.memory.device.value == many.memory.device.value
        assert few.tokens_per_step == many.tokens_per_step // 8

    def test_6000_iterations_take_about_15_hours_not_5_to_10(self) -> None:
        answer = planned(batch_size=8, gradient_accumulation_steps=64, max_iters=6000, lr_decay_iters=6000)
        assert answer.hours is not None
        assert answer.hours.low <= 15.6 <= answer.hours.high
        assert answer.hours.low > 10

    def test_a_val_loss_of_22_is_a_perplexity(self) -> None:
        assert math.log(22) == pytest.approx(3.09, abs=0.005)
        answer = planned(batch_size=8, gradient_accumulation_steps=64, max_iters=6000, lr_decay_iters=6000)
        fields = answer.as_json()
        assert fields["perplexity"]["value"] == pytest.approx(math.exp(fields["loss"]["value"]))
        assert fields["loss"]["value"] < 5 < fields["perplexity"]["value"]

    @pytest.mark.parametrize("micro_batch", [16, 32, 64])
    def test_a_larger_micro_batch_changes_speed_by_minus_2_to_plus_5_percent(self, micro_batch: int) -> None:
        eight = planned("RTX 4090", batch_size=8, gradient_accumulation_steps=64)
        step = {"batch_size": micro_batch, "gradient_accumulation_steps": 512 // micro_batch}
        larger = planned("RTX 4090", **step, chunked_loss=False)
        assert eight.speed is not None
        assert larger.speed is not None
        ratio = larger.speed.tokens_per_s.value / eight.speed.tokens_per_s.value
        assert -0.02 <= ratio - 1 <= 0.05


def test_evaluation_time_is_that_of_the_log() -> None:
    """nanogpt_4070_12x768_b8x64.txt: iterations with an eval take 29.1 to 29.3 s, others 9.34 s."""
    assert eval_seconds(TrainConfig(eval_iters=200, sampling="random"), 9344 / 64) == pytest.approx(
        29.2 - 9.34, rel=0.05
    )


def test_a_config_that_makes_no_sense_still_gets_an_answer() -> None:
    answer = planned(n_layer=0, n_embd=-3)
    assert not answer.starts
    assert answer.memory is None
    assert answer.as_json()["parameters"] is None


def test_a_config_that_cannot_start_still_says_what_can_be_said() -> None:
    answer = planned(n_embd=512, n_head=12)
    assert answer.memory is not None
    assert answer.speed is not None
    assert answer.loss is not None


def test_without_a_card_the_rest_is_said() -> None:
    config = TrainConfig()
    answer = plan(config, config.shape(), None)
    assert answer.runs
    assert answer.fits is None
    assert answer.speed is None
    assert answer.memory is not None
    assert answer.notes


def test_a_laptop_card_has_a_wide_range_and_says_why() -> None:
    answer = planned("RTX 3070 Laptop", batch_size=2)
    assert answer.speed is not None
    rate = answer.speed.tokens_per_s
    assert rate.low <= 0.5 * rate.value
    assert any("power limit" in note for note in answer.notes)


def test_a_card_without_bf16_is_planned_in_another_dtype() -> None:
    turing, pascal = planned("RTX 2080 Ti", batch_size=2), planned("GTX 1080 Ti", batch_size=2)
    assert turing.setting is not None
    assert pascal.setting is not None
    assert (turing.setting.dtype, pascal.setting.dtype) == ("float16", "float32")
    assert any("no bfloat16" in note for note in turing.notes)


def test_a_card_without_a_known_rate_has_memory_but_no_speed() -> None:
    answer = planned("Jetson Orin Nano", batch_size=1)
    spark = planned("GB10", batch_size=1)
    assert answer.memory is not None
    assert spark.speed is None or spark.speed.mfu is not None


def test_a_card_without_memory_fits_nothing() -> None:
    from dataclasses import replace

    config = TrainConfig()
    answer = plan(config, config.shape(), replace(RTX_4070, vram_gib=0.0))
    assert answer.fits is False
    assert answer.largest_micro_batch == 0
    assert not answer.runs


def test_more_gpus_share_the_micro_steps() -> None:
    config = TrainConfig.unchecked(batch_size=8, gradient_accumulation_steps=64)
    one, two = (plan(config, config.shape(), find("4090"), processes=n) for n in (1, 2))
    assert one.tokens_per_step == two.tokens_per_step
    assert one.speed is not None
    assert two.speed is not None
    assert 1.5 < two.speed.tokens_per_s.value / one.speed.tokens_per_s.value < 2


def test_accumulation_that_does_not_divide_by_the_gpus_is_an_error() -> None:
    config = TrainConfig.unchecked(gradient_accumulation_steps=5)
    assert not plan(config, config.shape(), RTX_4070, processes=2).starts


def test_what_was_measured_replaces_the_fit() -> None:
    config = TrainConfig(batch_size=8, gradient_accumulation_steps=64)
    shape = config.shape()
    key = speed_key(setting_of(config, shape, on_card(RTX_4070)), "NVIDIA GeForce RTX 4070")
    timing = MeasuredSpeed(key, "2.9", 56_200.0, 145.8, ms_per_update=13.0, allocated_gib=6.3, device_gib=7.4)
    cache = Measurements(speeds=(timing,))
    answer = plan(config, shape, RTX_4070, measurements=cache, device_name="NVIDIA GeForce RTX 4070")
    assert answer.speed is not None
    assert answer.memory is not None
    assert answer.speed.tokens_per_s.basis == "measured"
    assert answer.speed.ms_per_step.value == pytest.approx(64 * 145.8 + 13, rel=1e-6)
    assert answer.memory.device.basis == "measured"
    elsewhere = plan(config, shape, RTX_4070, measurements=cache, device_name="NVIDIA GeForce RTX 4090")
    assert elsewhere.speed is not None
    assert elsewhere.speed.tokens_per_s.basis == "fit"


def test_the_loss_offset_is_learnt_from_finished_runs() -> None:
    data = DataFacts("mine", Estimate.exact(2e9))
    config = TrainConfig(max_iters=2000, lr_decay_iters=2000, gradient_accumulation_steps=64, batch_size=8)
    before = plan(config, config.shape(), RTX_4070, data=data)
    assert before.loss is not None
    finished = MeasuredLoss("mine", "gpt2", 123_587_328, before.tokens, 2_000_000_000, "gpt2", "adamw", 4.0)
    after = plan(config, config.shape(), RTX_4070, data=data, measurements=Measurements(losses=(finished,)))
    assert after.loss is not None
    assert after.loss.loss.basis == "measured"
    assert after.loss.loss.value == pytest.approx(4.0, abs=0.01)
    assert after.loss.loss.high - after.loss.loss.low < before.loss.loss.high - before.loss.loss.low


def test_epochs_carry_the_range_of_the_token_count() -> None:
    config = TrainConfig(max_iters=1000, lr_decay_iters=1000, warmup_iters=10)
    data = DataFacts("x", Estimate(1e9, 0.9e9, 1.1e9, "fit"))
    answer = plan(config, config.shape(), RTX_4070, data=data)
    assert answer.epochs is not None
    assert answer.epochs.low < answer.epochs.value < answer.epochs.high


def test_bytes_of_another_tokenizer_are_converted() -> None:
    config = TrainConfig(
        max_iters=5000, lr_decay_iters=5000, vocab_size=256, gradient_accumulation_steps=64, batch_size=8
    )
    bytes_data = DataFacts("fineweb", Estimate.exact(3e9), vocab_size=256, tokenizer="bytes", bytes_per_token=1.0)
    answer = plan(config, config.shape(), RTX_4070, data=bytes_data)
    assert answer.loss is not None
    assert 0.6 < answer.loss.loss.value < 1.1  # nats per byte; about 1 bit per byte


def test_unknown_bytes_per_token_means_no_loss() -> None:
    config = TrainConfig(vocab_size=65)
    data = DataFacts("shakespeare_char", Estimate.exact(1e6), vocab_size=65, tokenizer="chars")
    assert plan(config, config.shape(), RTX_4070, data=data).loss is None


def test_electricity_is_hours_times_watts() -> None:
    config = TrainConfig(max_iters=1000, lr_decay_iters=1000, warmup_iters=30)
    answer = plan(config, config.shape(), RTX_4070, watts=300)
    assert answer.kwh is not None
    assert answer.hours is not None
    assert answer.kwh.value == pytest.approx(0.3 * answer.hours.value)


def test_the_largest_micro_batch_is_one_number_whatever_was_asked() -> None:
    """It was 19 beside batch_size = 18, and batch_size = 20 fitted: in chunks, which 'auto' brings."""
    found = set()
    for size in (8, 18, 20):
        config = TrainConfig(batch_size=size)
        answer = plan(config, config.shape(50304), RTX_4070)
        assert answer.fits
        found.add(answer.largest_micro_batch)
    (largest,) = found
    assert largest is not None
    for size, fits in ((largest, True), (largest + 1, False)):
        config = TrainConfig(batch_size=size)
        assert plan(config, config.shape(50304), RTX_4070).fits is fits
    whole = TrainConfig(batch_size=8, chunked_loss=False)
    assert (plan(whole, whole.shape(50304), RTX_4070).largest_micro_batch or 0) < largest
