"""The memory model: what it depends on, what it does not, and the published anchors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gptfit.gpus import all_gpus, find
from gptfit.plan import memory
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
from gptfit.units import GIB, MIB

SMALL = ModelShape(12, 12, 768, 1024, 50304)
BASE = Setting(SMALL, micro_batch=8, accumulation=64)


@pytest.mark.parametrize(
    ("micro_batch", "low_mib", "high_mib"),
    [(8, 7600, 7731), (16, 12600, 13100), (32, 24365, 24800), (64, 47500, 48200)],
)
def test_compiled_gpt2_small_shows_what_was_published(micro_batch: int, low_mib: int, high_mib: int) -> None:
    """By code that returns its logits, as nanoGPT's model does; gptfit's does not and needs less."""
    published = replace(BASE, micro_batch=micro_batch, logits="returned")
    predicted = memory.predict(published).device.value / MIB
    assert 0.97 * low_mib <= predicted <= 1.03 * high_mib
    assert memory.predict(replace(BASE, micro_batch=micro_batch)).device.value / MIB < 0.82 * predicted


def test_parts_sum_to_the_device_total() -> None:
    answer = memory.predict(BASE)
    assert sum(answer.parts.values()) == pytest.approx(answer.device.value)


def test_logits_are_the_largest_part_of_a_small_model_with_a_large_vocabulary() -> None:
    parts = memory.predict(replace(BASE, shape=ModelShape(6, 6, 384, 1024, 50304))).parts
    assert parts["logits"] == max(parts.values()) or parts["logits"] > parts["activations"]


def test_state_is_sixteen_bytes_per_weight_and_twelve_for_muon_matrices() -> None:
    matrices = sum(weight.size for weight in SMALL.weights() if weight.kind == "matrix")
    adamw = Setting(SMALL, 1)
    assert memory.state_bytes(adamw) == 8 * SMALL.n_weights
    assert memory.state_bytes(replace(adamw, optimizer="muon")) == 8 * SMALL.n_weights - 4 * matrices
    assert memory.kept_state_bytes(replace(adamw, optimizer_state="8bit")) < 0.26 * memory.state_bytes(adamw)


def test_chunks_save_most_of_the_logits() -> None:
    large = replace(BASE, micro_batch=32)
    whole, chunked = (memory.predict(replace(large, chunked_loss=chunks)) for chunks in (False, True))
    assert chunked.parts["logits"] < 0.25 * whole.parts["logits"]
    assert chunked.device.value < 0.85 * whole.device.value


def test_checkpoints_save_most_of_the_activations() -> None:
    kept, recomputed = (memory.activation_bytes(replace(BASE, checkpoint_activations=on)) for on in (False, True))
    assert recomputed < 0.35 * kept


def test_eager_needs_more_than_compiled() -> None:
    assert memory.predict(replace(BASE, compile=False)).device.value > 1.4 * memory.predict(BASE).device.value


def test_a_single_micro_step_has_no_gradients_at_the_peak() -> None:
    one, two = (memory.predict(replace(BASE, accumulation=n)).allocated.value for n in (1, 2))
    assert two - one == pytest.approx(4 * SMALL.n_weights)


def test_with_tiny_batches_the_peak_is_at_the_update() -> None:
    answer = memory.predict(Setting(ModelShape(12, 12, 768, 64, 256), micro_batch=1, accumulation=1))
    assert answer.parts["gradients"] > 0
    assert answer.parts["activations"] == 0


@pytest.mark.parametrize("gpu", [gpu for gpu in all_gpus() if gpu.is_nvidia], ids=lambda gpu: gpu.name)
def test_the_largest_micro_batch_fits_and_one_more_does_not(gpu: object) -> None:
    from gptfit.gpus import GPU

    assert isinstance(gpu, GPU)
    largest = memory.largest_micro_batch(BASE, gpu)
    if largest:
        assert memory.fits(replace(BASE, micro_batch=largest), gpu)
    if largest < memory.MICRO_BATCH_LIMIT:
        assert not memory.fits(replace(BASE, micro_batch=largest + 1), gpu)


def test_memory_others_hold_is_not_usable() -> None:
    card = find("4070")
    assert memory.usable_bytes(card, 3 * GIB) == 9 * GIB
    assert memory.usable_bytes(card, 0) < 12 * GIB


def test_float32_needs_more_than_bfloat16() -> None:
    wide = memory.predict(replace(BASE, dtype="float32")).allocated.value
    assert wide > 1.3 * memory.predict(BASE).allocated.value
