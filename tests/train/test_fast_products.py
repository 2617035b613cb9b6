"""matmul = 'fp8' and 'fp16acc': emulated on a CPU they end where bfloat16 does; what does not is left for bfloat16."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from gptfit.checkpoint.format import load_checkpoint
from gptfit.config.keys import TrainConfig
from gptfit.device import formats
from gptfit.device.device import Device, find_device
from gptfit.errors import ConfigError, DeviceError
from gptfit.logs.events import Event
from gptfit.model.head import UNCOUNTED
from gptfit.train import fast_products
from gptfit.train.engine import build_engine
from gptfit.train.train import train
from tests import cuda_stand_in
from tests.small_runs import messages_in

pytest.importorskip("torchao")
MakeConfig = Callable[..., TrainConfig]
SIZES: dict[str, Any] = {"n_embd": 64, "vocab_size": 80, "dtype": "auto", "matmul": "fp8"}


@pytest.fixture
def cpu_emulates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is for people, whom an emulation would only slow down."""
    monkeypatch.setattr(formats, "matmul_problem", lambda matmul, device: None)
    monkeypatch.setattr(fast_products, "WATCHED_STEPS", 4)
    # A CPU without 16-bit units takes a minute to time a large product.
    monkeypatch.setattr(Device, "peak_rate", lambda self: (1.0, "not measured"))


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_mlps_and_head_are_swapped_on_the_same_weights_and_back(small_config: MakeConfig, arch: str) -> None:
    config = small_config(**SIZES, arch=arch)
    torch.manual_seed(0)
    engine = build_engine(config, config.shape(), find_device(config))
    fast = {name for name, module in engine.model.named_modules() if type(module).__name__ == "Float8Linear"}
    assert fast == {f"transformer.h.{i}.mlp.{part}" for i in range(2) for part in ("c_fc", "c_proj")} | {"lm_head"}
    torch.manual_seed(0)
    plain_config = config.replace(matmul="plain", dtype="bfloat16")
    plain = build_engine(plain_config, config.shape(), find_device(plain_config))
    assert engine.model.state_dict().keys() == plain.model.state_dict().keys()
    ids = torch.randint(0, 80, (2, 17), generator=torch.Generator().manual_seed(1))
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    expected = plain.mean_loss([batch])
    rounded = engine.mean_loss([batch])
    assert rounded != expected
    assert rounded == pytest.approx(expected, abs=0.01)
    with engine.products.plainly():
        assert engine.mean_loss([batch]) == expected
    assert engine.mean_loss([batch]) == rounded
    engine.leave_fast_products()
    with engine.products.plainly():
        pass
    assert engine.mean_loss([batch]) == expected


def test_where_few_tokens_count_the_difference_is_of_those(small_config: MakeConfig) -> None:
    config = small_config(**SIZES)
    engine = build_engine(config, config.shape(), find_device(config))
    engine.model.loss_is_masked = True
    ids = torch.randint(0, 80, (2, 17), generator=torch.Generator().manual_seed(1))
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    batch[1][:, :12] = UNCOUNTED
    rounded = engine.mean_loss([batch])
    with engine.products.plainly():
        expected = engine.mean_loss([batch])
    engine.products.watch(batch, step=0)
    engine.products.watch(batch, step=0)  # the step is done again, with less memory
    batch[1][:] = UNCOUNTED
    engine.products.watch(batch, step=1)
    assert list(engine.products.differences.values()) == pytest.approx([rounded - expected, 0.0], rel=1e-3)
    assert rounded != expected


def test_a_format_within_the_noise_stays(small_config: MakeConfig, cpu_emulates: None) -> None:
    events: list[Event] = []
    train(small_config(**SIZES), events.append)
    (told,) = [message for message in messages_in(events) if "matmul" in message]
    assert "the first 4 steps, within the noise" in told


def test_a_format_beyond_the_noise_is_left_and_a_resume_goes_on(
    small_config: MakeConfig, cpu_emulates: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torchao.float8.float8_linear import Float8Linear

    broken = Float8Linear.forward
    monkeypatch.setattr(Float8Linear, "forward", lambda self, x: 3 * broken(self, x))
    events: list[Event] = []
    train(small_config(**SIZES, max_iters=6), events.append)
    (told,) = [message for message in messages_in(events) if "matmul" in message]
    assert "beyond the noise" in told
    assert told.endswith("from here on bfloat16")
    events.clear()
    train(small_config(**{**SIZES, "matmul": "plain", "dtype": "bfloat16"}, init_from="resume"), events.append)
    assert any("matmul: fp8 -> plain" in message for message in messages_in(events))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in load_checkpoint(tmp_path / "out").model.values())


def test_float16_sums_are_torchs_own_switch_and_go_off_with_it(small_config: MakeConfig) -> None:
    config = small_config(n_embd=64, dtype="auto", matmul="fp16acc")
    engine = build_engine(config, config.shape(65), find_device(config))
    try:
        assert torch.backends.cuda.matmul.allow_fp16_accumulation
    finally:
        engine.leave_fast_products()
    assert not torch.backends.cuda.matmul.allow_fp16_accumulation


def test_devices_that_cannot_say_so_in_one_line(small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for matmul in ("fp8", "fp16acc"):
        with pytest.raises(DeviceError, match=rf"matmul = '{matmul}' needs an NVIDIA card, and this is .*; use matmul"):
            train(small_config(dtype="auto", matmul=matmul))
    device = Device(torch.device("cuda", 0), "NVIDIA GeForce RTX 3070", "bfloat16")
    cuda_stand_in.install(monkeypatch, cuda_stand_in.Card(name=device.name, capability=(8, 6)))
    assert formats.matmul_problem("fp16acc", device) is None
    assert "needs compute capability 8.9" in str(formats.matmul_problem("fp8", device))
    with pytest.raises(ConfigError, match="matmul = 'fp16acc' with dtype = 'bfloat16'; use dtype = 'float16'"):
        TrainConfig(matmul="fp16acc", dtype="bfloat16")


@pytest.fixture
def bench(repo: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repo / "bench"))
    return importlib.import_module("formats")


def test_a_small_model_ends_where_it_does_in_bfloat16(
    bench: ModuleType, token_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "EVAL_BATCHES", 4)
    size = {"n_layer": 2, "n_embd": 64, "block_size": 16, "warmup_iters": 4, "learning_rate": 1e-2, "min_lr": 1e-3}
    plain, *others = (bench.final_loss(token_folder, name, 1, 20, **size) for name in bench.FORMATS)
    assert plain < 3.5  # it has learnt: it began at ln 128
    assert plain not in others
    assert others == pytest.approx([plain] * len(others), abs=0.05)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_5m_parameters_end_within_the_noise_of_seeds(bench: ModuleType, tmp_path: Path, repo: Path) -> None:
    from gptfit.cli import main

    data = tmp_path / "text"
    source = repo.parent / "shared" / "data" / "tinyshakespeare.txt"
    assert main(["prepare", str(source), "--out", str(data), "--tokenizer", "bytes"]) == 0
    losses = {name: [bench.final_loss(data, name, seed, 200) for seed in (1, 2, 3)] for name in bench.FORMATS}
    noise = 2 * statistics.stdev(losses["bf16"])
    for name, found in losses.items():
        assert statistics.mean(found) == pytest.approx(statistics.mean(losses["bf16"]), abs=max(noise, 0.01)), name
