"""Power, temperature and clock of an NVIDIA card, where the driver's library answers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from gptfit.run.device import Device


def card_readings(device: Device) -> dict[str, float]:
    """Empty on anything but an NVIDIA card with a working driver library."""
    opened = _open(_uuid(device)) if device.kind == "cuda" else None
    if opened is None:
        return {}
    library, handle = opened
    try:
        return {
            "power_w": library.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature_c": library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU),
            "clock_mhz": library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM),
        }
    except library.NVMLError:  # laptop cards and some drivers do not tell
        return {}


def driver_version() -> str | None:
    """'570.86.15', or None where the driver's library does not answer."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def _uuid(device: Device) -> str:
    """torch and the driver may number the cards differently; the identity is the same for both."""
    return f"GPU-{torch.cuda.get_device_properties(device.torch_device).uuid}"


@cache
def _open(uuid: str) -> tuple[Any, Any] | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return None
