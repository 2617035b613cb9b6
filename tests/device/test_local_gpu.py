"""The local card through NVML, and its absence."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gptfit.device.local_gpu import LocalGPU, local_gpu


class NVMLError(Exception):
    pass


def nvml(**functions: Any) -> ModuleType:
    """A stand-in for the driver's library, which this machine does not have."""
    module = ModuleType("pynvml")
    answers: dict[str, Any] = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (8, 9),
        "nvmlDeviceGetNumGpuCores": lambda handle: 5888,
        "nvmlDeviceGetName": lambda handle: b"NVIDIA GeForce RTX 4070",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=12282 * 2**20, used=500 * 2**20),
    }
    for name, value in {**answers, **functions}.items():
        setattr(module, name, value)
    return module


def fails(*_: object) -> None:
    raise NVMLError("driver not loaded")


def test_the_card_is_found_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    card = local_gpu()
    assert card == LocalGPU("NVIDIA GeForce RTX 4070", 12282 * 2**20, 500 * 2**20, 2, "GPU-0")
    assert card.gpu is not None
    assert card.gpu.name == "RTX 4070 12GB"


@pytest.mark.parametrize(("visible", "used"), [("1", 1), ("1,0", 1), ("GPU-3f,0", 7), ("", None), ("-1", None)])
def test_the_card_is_the_one_that_programs_may_use(
    monkeypatch: pytest.MonkeyPatch, visible: str, used: int | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    memory = {"nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=2**34, used=handle)}
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetHandleByUUID=lambda uuid: 7, **memory))
    card = local_gpu()
    assert (card.used_bytes if card else None) == used


@pytest.mark.parametrize(
    "broken", [{"nvmlInit": fails}, {"nvmlDeviceGetName": fails}, {"nvmlDeviceGetCount": lambda: 0}]
)
def test_no_driver_or_no_card_is_none(monkeypatch: pytest.MonkeyPatch, broken: dict[str, Any]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(**broken))
    assert local_gpu() is None


def test_no_library_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert local_gpu() is None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere pynvml itself looks for the driver's library")
def test_a_driver_that_is_not_installed_costs_no_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """pynvml is large: where the library it would load is not there, it is not imported."""

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setattr("ctypes.CDLL", missing)
    assert local_gpu() is None
    assert "pynvml" not in sys.modules
