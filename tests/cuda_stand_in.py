"""A stand-in for `torch.cuda` and the driver's library: a card of any size on a machine without one.

Every function has the parameters of torch's own, which a test checks, so that a call the real one would refuse fails.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

GIB = 1024**3


@dataclass
class Card:
    """One card's memory as CUDA and NVML tell it. NVML counts what the driver keeps for itself, CUDA does not."""

    name: str = "NVIDIA GeForce RTX 4070"
    total: int = 12 * GIB
    others: int = 1 * GIB
    context: int = GIB // 2
    driver: int = GIB // 4
    reserved: int = 0
    peak_reserved: int = 0
    uuid: str = "0a1b2c3d-0000-0000-0000-000000000000"
    capability: tuple[int, int] = (8, 9)
    built_for: list[str] = field(default_factory=lambda: ["sm_80", "sm_86", "sm_90"])
    fractions: list[float] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    has_context: bool = True
    power_limit: int = 200_000  # milliwatts

    @property
    def free(self) -> int:
        return self.total - self.others - self.reserved - (self.context if self.has_context else 0)

    @property
    def nvml_used(self) -> int:
        return self.total - self.free + self.driver

    # The functions of torch.cuda, under their names.

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def get_arch_list(self) -> list[str]:
        return self.built_for

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        self.has_context = True

    def manual_seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def get_device_name(self, device: Any = None) -> str:
        return self.name

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return self.capability

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(total_memory=self.total, uuid=self.uuid, name=self.name)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self.free, self.total

    def memory_reserved(self, device: Any = None) -> int:
        return self.reserved

    def max_memory_reserved(self, device: Any = None) -> int:
        return max(self.peak_reserved, self.reserved)

    def set_per_process_memory_fraction(self, fraction: Any, device: Any = None) -> None:
        assert 0 <= fraction <= 1
        self.fractions.append(fraction)


FUNCTIONS = [n for n, v in vars(Card).items() if inspect.isfunction(v) and n[0] != "_" and hasattr(torch.cuda, n)]


def install(monkeypatch: pytest.MonkeyPatch, card: Card) -> Card:
    """torch and NVML answer for `card` until the test ends."""
    for name in FUNCTIONS:
        monkeypatch.setattr(torch.cuda, name, getattr(card, name))
    monkeypatch.setitem(sys.modules, "pynvml", nvml([card]))
    return card


def nvml(cards: list[Card]) -> ModuleType:
    """The driver's library, counting the cards by their slots."""
    module = ModuleType("pynvml")
    answers: dict[str, Any] = {
        "NVMLError": type("NVMLError", (Exception,), {}),
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_CLOCK_SM": 1,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "570.86.15",
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": lambda index: cards[index],
        "nvmlDeviceGetHandleByUUID": lambda uuid: next(c for c in cards if f"GPU-{c.uuid}" == uuid),
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle.uuid}",
        "nvmlDeviceGetName": lambda handle: handle.name.encode(),
        "nvmlDeviceGetMemoryInfo": lambda handle, version=None: SimpleNamespace(
            total=handle.total, used=handle.nvml_used
        ),
        "nvmlDeviceGetCudaComputeCapability": lambda handle: handle.capability,
        "nvmlDeviceGetNumGpuCores": lambda device: 5888,
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: handle.power_limit,
        "nvmlDeviceGetPowerManagementDefaultLimit": lambda handle: 200_000,
        "nvmlDeviceGetPowerUsage": lambda handle: 200_000,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 60,
        "nvmlDeviceGetClockInfo": lambda handle, type: 2500,
    }
    for name, value in answers.items():
        setattr(module, name, value)
    return module
