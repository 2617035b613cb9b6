"""Memory of a card: spilling into main memory, what a process holds, out-of-memory words, chunks of the loss."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gptfit.config.keys import TrainConfig
from gptfit.device import device as devices
from gptfit.device import nvml as readings
from gptfit.device.device import Device, exact_products, find_device
from gptfit.device.local_gpu import local_gpu, used_bytes
from gptfit.device.nvml import card_readings, context_bytes
from gptfit.device.out_of_memory import is_out_of_memory
from gptfit.plan.memory import FITTED, predict
from gptfit.plan.resolve import setting_of
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
from gptfit.train.place import place_of
from tests import cuda_stand_in
from tests.cuda_stand_in import GIB, Card, install

PLANNED = int(FITTED.context_bytes)
SMALL = ModelShape(12, 12, 768, 1024, 50304)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in devices.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "OSRELEASE", Path("/nowhere"))
    readings._open.cache_clear()
    readings._latest.clear()
    yield
    torch.backends.cuda.matmul.allow_tf32 = False
    readings._open.cache_clear()


@pytest.mark.parametrize("name", cuda_stand_in.FUNCTIONS)
def test_the_stand_in_takes_what_torch_takes(name: str) -> None:
    real = list(inspect.signature(getattr(torch.cuda, name)).parameters)
    ours = list(inspect.signature(getattr(Card(), name)).parameters)
    assert ours == real


def test_the_drivers_stand_in_takes_what_nvml_takes() -> None:
    real = pytest.importorskip("pynvml")
    ours = {name: value for name, value in vars(cuda_stand_in.nvml([])).items() if inspect.isfunction(value)}
    assert len(ours) > 10
    for name, function in ours.items():
        assert list(inspect.signature(function).parameters) == list(inspect.signature(getattr(real, name)).parameters)


def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    release = tmp_path / "osrelease"
    release.write_text("5.15.90.1-microsoft-standard-WSL2\n" if name == "WSL2" else "6.8.0-45-generic\n")
    monkeypatch.setattr(devices, "OSRELEASE", release)
    monkeypatch.setattr(sys, "platform", "win32" if name == "Windows" else "linux")


@pytest.mark.parametrize("name", ["Windows", "WSL2", "Linux"])
def test_where_memory_spills_the_process_is_capped_at_what_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    card = install(monkeypatch, Card())
    system(monkeypatch, tmp_path, name)
    device = find_device(TrainConfig(device="cuda"))
    if name == "Linux":
        assert card.fractions == []
        return
    most = (card.free - GIB // 2) / card.total
    assert card.fractions == [pytest.approx(most)]
    device.limit_memory(11 * GIB)  # what tune allows a trial must not lift the cap
    assert card.fractions[-1] == pytest.approx(most)
    device.limit_memory(4 * GIB)
    assert card.fractions[-1] == pytest.approx(4 / 12)


@pytest.mark.parametrize(("name", "is_set"), [("Windows", False), ("WSL2", False), ("Linux", True)])
def test_segments_grow_on_native_linux_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, is_set: bool
) -> None:
    install(monkeypatch, Card())
    system(monkeypatch, tmp_path, name)
    find_device(TrainConfig(device="cuda"))
    assert ("expandable_segments:True" in os.environ.get("PYTORCH_ALLOC_CONF", "")) is is_set


def test_a_users_own_allocator_setting_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Card())
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    find_device(TrainConfig(device="cuda"))
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:128"
    assert "PYTORCH_ALLOC_CONF" not in os.environ


def test_a_process_is_its_context_and_what_came_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML counts a quarter of a GiB that CUDA does not: taking one from the other would be wrong by that much."""
    card = install(monkeypatch, Card(has_context=False))
    before = used_bytes()
    device = find_device(TrainConfig(device="cuda"))
    context = context_bytes(device, before, PLANNED)
    assert context == card.context
    card.reserved = card.peak_reserved = 6 * GIB
    assert device.peak_device_bytes(context) == 6 * GIB + card.context
    card.others = 0  # another program ended while the trial ran
    assert device.peak_device_bytes(context) == 6 * GIB + card.context


def test_a_context_that_nvml_cannot_tell_is_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    card = install(monkeypatch, Card())
    device = find_device(TrainConfig(device="cuda"))
    assert context_bytes(device, {}, PLANNED) == PLANNED
    before = used_bytes()
    card.others = 0
    assert context_bytes(device, before, PLANNED) == PLANNED, "less in use than before is no context"


def test_the_driver_is_asked_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Card())
    device = find_device(TrainConfig(device="cuda"))
    asked: list[object] = []
    monkeypatch.setattr(sys.modules["pynvml"], "nvmlDeviceGetPowerUsage", lambda card: asked.append(card) or 1)
    for now in (10.0, 10.2, 10.9, 11.0, 11.5):
        assert card_readings(device, lambda now=now: now)["clock_mhz"] == 2500
    assert len(asked) == 2


def test_the_first_card_is_the_one_cuda_counts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = Card("NVIDIA GeForce GTX 1080", uuid="old", capability=(6, 1)), Card(uuid="new")
    monkeypatch.setitem(sys.modules, "pynvml", cuda_stand_in.nvml([old, new]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert (found := local_gpu()) is not None
    assert found.uuid == "GPU-new"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert (found := local_gpu()) is not None
    assert found.uuid == "GPU-old"
    assert used_bytes() == {"GPU-old": old.nvml_used, "GPU-new": new.nvml_used}


class FromTheCompiler(RuntimeError):
    """As torch's BackendCompilerFailed: the real error is kept inside."""

    def __init__(self, inner: Exception) -> None:
        super().__init__("backend='inductor' raised:")
        self.inner_exception = inner


def raised_from(cause: Exception) -> Exception:
    try:
        raise RuntimeError("while compiling") from cause
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (FromTheCompiler(torch.OutOfMemoryError("CUDA out of memory.")), True),
        (raised_from(torch.OutOfMemoryError("CUDA out of memory.")), True),
        (FromTheCompiler(RuntimeError("out of resource: shared memory")), False),
        (RuntimeError("CUDA driver error: invalid argument"), False),
    ],
)
def test_out_of_memory_is_known_by_its_words_and_its_cause(error: Exception, is_so: bool) -> None:
    assert is_out_of_memory(error) is is_so


COMBINATIONS = list(
    itertools.product(
        (True, False), (1, 2, 4, 8, 12, 16, 32), (257, 8192, 50304), (4 * GIB, 8 * GIB, 11 * GIB, 24 * GIB)
    )
)


@pytest.mark.parametrize(("compiled", "batch", "vocab", "free"), COMBINATIONS)
def test_chunks_are_for_what_does_not_fit_whole_and_for_nothing_else(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, batch: int, vocab: int, free: int
) -> None:
    card = install(monkeypatch, Card(total=25 * GIB))
    card.others = card.total - card.context - free
    config = TrainConfig(device="cuda", dtype="bfloat16", batch_size=batch, gradient_accumulation_steps=8)
    shape = ModelShape(12, 12, 768, 1024, vocab)
    chunked = is_chunked(config, shape, find_device(config), compiled)
    setting = Setting(shape, micro_batch=batch, accumulation=8, compile=compiled)
    fits_whole = predict(setting).device.value <= free + FITTED.context_bytes
    assert chunked is not fits_whole


def is_chunked(config: TrainConfig, shape: ModelShape, device: Device, compiled: bool) -> bool:
    """What training decides for `chunked_loss = 'auto'`."""
    return setting_of(config, shape, place_of(device, compiled)).chunked_loss


def test_auto_is_right_where_one_constant_was_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 x 768 on a 12 GB card: eager B = 10 does not fit whole, compiled B = 12 does; 10 bytes per logit said otherwise."""
    install(monkeypatch, Card(others=GIB))
    keys: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "gradient_accumulation_steps": 8}
    eager = TrainConfig(batch_size=10, compile=False, **keys)
    assert is_chunked(eager, SMALL, find_device(eager), compiled=False)
    compiled = TrainConfig(batch_size=12, **keys)
    assert not is_chunked(compiled, SMALL, find_device(compiled), compiled=True)


def test_memory_a_process_holds_already_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    card = install(monkeypatch, Card(others=GIB // 2))
    config = TrainConfig(device="cuda", dtype="bfloat16", batch_size=10, gradient_accumulation_steps=8)
    device = find_device(config)
    card.reserved = 3 * GIB
    assert not is_chunked(config, SMALL, device, compiled=True)


def test_an_exact_loss_is_computed_with_all_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Card())
    find_device(TrainConfig(device="cuda"))
    assert torch.backends.cuda.matmul.allow_tf32
    with exact_products():
        assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32
