"""The worked numbers: what a shape weighs and costs, against nanoGPT's own figures."""

from __future__ import annotations

import pytest

from gptfit.config.keys import TrainConfig
from gptfit.shape import ModelShape

RTX_4070_TFLOPS = 58.3
A100_TFLOPS = 312


def gpt(
    n_layer: int, n_embd: int, n_head: int, vocab: int = 50304, block: int = 1024, bias: bool = False
) -> ModelShape:
    return ModelShape(n_layer, n_head, n_embd, block, vocab, bias)


def test_gpt2_small_has_124373760_weights_and_123587328_parameters() -> None:
    shape = gpt(12, 768, 12)
    assert shape.n_weights == 124_373_760
    assert shape.parameters == 123_587_328


def test_gpt2_small_with_bias_and_real_vocabulary_has_openais_124439808_weights() -> None:
    assert gpt(12, 768, 12, vocab=50257, bias=True).n_weights == 124_439_808


@pytest.mark.parametrize(("n_layer", "n_embd", "n_head", "weights"), [
    (24, 1024, 16, 354_823_168),  # gpt2-medium
    (36, 1280, 20, 774_030_080),  # gpt2-large
    (48, 1600, 25, 1_557_611_200),  # gpt2-xl
])  # fmt: skip
def test_published_gpt2_sizes(n_layer: int, n_embd: int, n_head: int, weights: int) -> None:
    assert gpt(n_layer, n_embd, n_head, vocab=50257, bias=True).n_weights == weights


def test_gpt2_small_costs_855_million_flops_per_token() -> None:
    assert gpt(12, 768, 12).flops_per_token == pytest.approx(854.8e6, rel=1e-4)


def test_12x384_called_33m_is_40_55m_at_300m_flops() -> None:
    shape = gpt(12, 384, 12)
    assert shape.parameters == pytest.approx(40.55e6, rel=1e-3)
    assert shape.flops_per_token == pytest.approx(300e6, rel=2e-3)


def test_12x512_called_125m_is_63_5m() -> None:
    assert gpt(12, 512, 8).parameters == pytest.approx(63.5e6, rel=1e-3)


def test_6x384_called_84m_is_29_9m() -> None:
    assert gpt(6, 384, 6).parameters == pytest.approx(29.9e6, rel=2e-3)


def test_shakespeare_char_has_10646784_parameters() -> None:
    # nanoGPT prints 10.65M without the position table and 10.75M decayed with it.
    shape = gpt(6, 384, 6, vocab=65, block=256)
    assert shape.parameters == 10_646_784
    assert sum(weight.size for weight in shape.weights() if weight.decays) == 10_740_096
    assert sum(weight.size for weight in shape.weights() if not weight.decays) == 4_992


@pytest.mark.parametrize(
    ("n_embd", "seconds", "of_a100", "of_4070"), [(768, 9.34, 0.154, 0.82), (384, 3.90, 0.129, 0.69)]
)
def test_mfu_of_the_two_4070_runs(n_embd: int, seconds: float, of_a100: float, of_4070: float) -> None:
    tflops = gpt(12, n_embd, 12).flops_per_token * 524_288 / seconds / 1e12
    assert tflops / A100_TFLOPS == pytest.approx(of_a100, abs=0.001)
    assert tflops / RTX_4070_TFLOPS == pytest.approx(of_4070, abs=0.006)


def test_weight_names_are_unique_and_groups_cover_everything() -> None:
    shape = TrainConfig(bias=True).shape()
    names = [weight.name for weight in shape.weights()]
    assert len(names) == len(set(names)) == 2 + 12 * 12 + 2
    assert sum(weight.size for weight in shape.weights()) == shape.n_weights
