"""`attention`: torch's switches follow the key, and a kernel that does not run is refused before training starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from gptfit.config.keys import TrainConfig
from gptfit.device import nvml
from gptfit.device.device import Device, choose_attention, find_device
from gptfit.errors import DeviceError
from tests import cuda_stand_in

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _usual_kernels() -> Iterator[None]:
    yield
    choose_attention("auto", CPU, torch.float32)


def kernels_run() -> set[str]:
    """Names of torch's operations under one attention of the size a model has."""
    x = torch.randn(1, 2, 64, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        F.scaled_dot_product_attention(x, x, x, is_causal=True)
    return {event.key for event in profile.key_averages()}


def test_the_kernel_that_was_asked_for_runs_and_the_usual_one_afterwards() -> None:
    flash, math = "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_attention_math"
    for wish, expected in (("flash", flash), ("math", math), ("auto", flash)):
        find_device(TrainConfig(device="cpu", attention=wish))
        assert {flash, math} & kernels_run() == {expected}


def test_all_kernels_compute_the_same() -> None:
    x = torch.randn(2, 2, 64, 32)
    results = []
    for wish in ("flash", "math"):
        choose_attention(wish, CPU, torch.float32)
        results.append(F.scaled_dot_product_attention(x, x, x, is_causal=True))
    torch.testing.assert_close(*results)


def test_a_kernel_that_does_not_run_here_is_one_line_and_changes_nothing() -> None:
    with pytest.raises(
        DeviceError, match=r"attention = 'cudnn' does not run on cpu in float32: .*use attention = 'auto'"
    ):
        find_device(TrainConfig(device="cpu", dtype="float32", attention="cudnn"))
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.math_sdp_enabled()


@pytest.mark.parametrize(("limit", "words"), [(150_000, "nvidia-smi -pl 200"), (200_000, "as delivered")])
def test_the_power_limit_is_advice(monkeypatch: pytest.MonkeyPatch, limit: int, words: str) -> None:
    uuid = f"0a1b2c3d-0000-0000-0000-{limit:012d}"  # the library's handle of a card is kept
    cuda_stand_in.install(monkeypatch, cuda_stand_in.Card(power_limit=limit, uuid=uuid))
    note = nvml.power_note(Device(torch.device("cuda", 0), "a card", "bfloat16"))
    assert note is not None
    assert f"power limit {limit // 1000} W" in note
    assert words in note
    assert nvml.power_note(Device(CPU, "a CPU", "float32")) is None
