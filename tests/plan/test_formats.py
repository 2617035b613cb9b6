"""Faster number formats in the plan: published gains, cards that cannot, and what a 16-bit stream spares."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gptfit import gpus
from gptfit.cli import main
from gptfit.plan import formats, memory, speed
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape


def gain(setting: Setting, card: str, **change: str) -> float:
    gpu = gpus.find(card)
    before, after = speed.predict(setting, gpu), speed.predict(replace(setting, **change), gpu)
    assert before is not None
    assert after is not None
    assert after.tokens_per_s.basis == "fit"
    return after.tokens_per_s.value / before.tokens_per_s.value - 1


def test_torchaos_published_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """nanochat's log, 8 x H100: 630k to 740k tokens/s at 26 layers, slower at 12; all matrices of the blocks, not the head."""
    monkeypatch.setattr(formats, "FP8_BLOCK_SHARE", 1.0)
    monkeypatch.setattr(formats, "FP8_BLOCK_CHANNELS", 16)
    plain = {"accumulation": 1, "processes": 8, "optimizer": "muon", "chunked_loss": True}
    large = Setting(ModelShape(26, 13, 1664, 2048, 32768, arch="modern"), 16, **plain)
    small = Setting(ModelShape(12, 6, 768, 2048, 32768, arch="modern"), 32, **plain)
    assert gain(large, "H100 SXM", matmul="fp8") == pytest.approx(740 / 630 - 1, abs=0.04)
    assert gain(small, "H100 SXM", matmul="fp8") < 0


def test_larger_models_gain_more_and_the_range_reaches_what_fused_kernels_reach() -> None:
    sizes = {size: Setting(ModelShape(*size, 1024, 50304), 4, 60) for size in ((12, 12, 768), (48, 25, 1600))}
    small, large = (gain(setting, "RTX 4090", matmul="fp8") for setting in sizes.values())
    assert small < large
    assert formats.EXTRA_RANGE["fp8"][1] >= 0.2


def test_float16_sums_gain_on_geforce_cards_only() -> None:
    setting = Setting(ModelShape(24, 16, 1024, 1024, 50304), 8, 60)
    assert gain(setting, "RTX 3090", matmul="fp16acc", dtype="float16") > 0.2
    assert gain(setting, "A100 80GB", matmul="fp16acc", dtype="float16") == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpu=3090", "--matmul=fp8"], "needs compute capability 8.9 with tensor cores, and RTX 3090"),
        (["--gpu=cpu", "--matmul=fp16acc"], "matmul = 'fp16acc' needs an NVIDIA card"),
        (["--gpu=GTX 1070", "--residual_dtype=bfloat16"], "needs products in 16 bits, planned in float32"),
    ],
)
def test_cards_that_cannot_are_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words, "--batch_size=1"]) == 1
    assert says in " ".join(capsys.readouterr().out.split())


def test_a_16_bit_stream_spares_a_few_per_cent_of_time_and_two_bytes_per_copy() -> None:
    setting = Setting(ModelShape(12, 12, 768, 1024, 50304), 8, 60, checkpoint_activations=True)
    assert 0.01 < gain(replace(setting, checkpoint_activations=False), "RTX 4070", residual_dtype="bfloat16") < 0.06
    wide, narrow = (memory.activation_bytes(replace(setting, residual_dtype=d)) for d in ("float32", "bfloat16"))
    assert narrow == wide / 2
