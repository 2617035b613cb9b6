"""Power, temperature and clock of an NVIDIA card, where the driver's library answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from gptfit.device.device import Device
from gptfit.units import GIB

MOST_CONTEXT_BYTES = 2 * GIB


LEAST_SECONDS = 1.0  # between two questions to the driver, each of which waits for the card
_latest: dict[str, tuple[float, dict[str, float]]] = {}


def card_readings(device: Device, clock: Callable[[], float] = time.monotonic) -> dict[str, float]:
    """Empty on anything but an NVIDIA card with a working driver library; at most a second old."""
    if device.kind != "cuda":
        return {}
    uuid, now = _uuid(device), clock()
    if uuid not in _latest or now - _latest[uuid][0] >= LEAST_SECONDS:
        _latest[uuid] = now, _readings(uuid)
    return _latest[uuid][1]


def context_bytes(device: Device, used_before: dict[str, int], otherwise: int) -> int:
    """What this process's own context takes on the card: in use now less before it started, both by NVML's count.

    `otherwise` where NVML does not answer, or something else came or went meanwhile.
    """
    if device.kind != "cuda":
        return 0
    uuid = _uuid(device)
    opened = _open(uuid)
    if opened is None or uuid not in used_before:
        return otherwise
    library, handle = opened
    try:
        own = int(library.nvmlDeviceGetMemoryInfo(handle).used) - used_before[uuid]
    except library.NVMLError:
        return otherwise
    return own if 0 < own < MOST_CONTEXT_BYTES else otherwise


def _readings(uuid: str) -> dict[str, float]:
    opened = _open(uuid)
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


def power_note(device: Device) -> str | None:
    """Advice about the card's power limit, which only an administrator can change; None where the driver does not tell.

    The example is of tests/measured.csv: nanochat-3090-2x350w-d12-b4 against 2x250w.
    """
    opened = _open(_uuid(device)) if device.kind == "cuda" else None
    if opened is None:
        return None
    library, handle = opened
    try:
        limit = library.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
        usual = library.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000
    except library.NVMLError:  # laptop cards
        return None
    if limit < usual:
        return (
            f"power limit {limit:.0f} W, below the {usual:.0f} W the card came with, and so slower "
            f"(a 3090 at 250 of 350 W: 10 %, published); `nvidia-smi -pl {usual:.0f}`, as administrator, lifts it"
        )
    return (
        f"power limit {limit:.0f} W, as delivered; with less a card is quieter and not much slower "
        "(a 3090 at 250 of 350 W: 10 %, published): `nvidia-smi -pl` sets it, tune does not try it"
    )


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
