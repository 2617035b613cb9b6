"""The NVIDIA card in this machine as NVML sees it, without torch: name, memory and what is in use."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gptfit.gpus import GPU, find_or_none
from gptfit.units import GIB


@dataclass(frozen=True)
class LocalGPU:
    """The first card that programs here may use. `gpu` is None when the table does not know it."""

    name: str  # as torch names it too, which is how measurements are keyed
    total_bytes: int
    used_bytes: int  # by the desktop and other programs, now
    count: int
    uuid: str = ""  # the same for NVML and CUDA, whose numbers for the cards differ

    @property
    def gpu(self) -> GPU | None:
        return find_or_none(self.name, self.total_bytes / GIB)


def local_gpu() -> LocalGPU | None:
    """None without a card, a driver, or the nvidia-ml-py package."""
    cards: list[LocalGPU | None] = []
    with _driver() as pynvml:
        cards.append(_first(pynvml) if pynvml else None)
    return cards[0] if cards else None  # nothing where the driver refused to answer


def used_bytes() -> dict[str, int]:
    """What is in use on every card, by UUID; empty where nothing answers."""
    found = {}
    with _driver() as pynvml:
        for index in range(pynvml.nvmlDeviceGetCount() if pynvml else 0):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            found[_text(pynvml.nvmlDeviceGetUUID(handle))] = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    return found


@contextlib.contextmanager
def _driver() -> Iterator[Any]:
    """NVML opened, or None; what it refuses to answer ends the block."""
    if not _has_library():
        yield None
        return
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        yield None
        return
    except pynvml.NVMLError:
        yield None
        return
    try:
        with contextlib.suppress(pynvml.NVMLError):
            yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _has_library() -> bool:
    """False where the driver's library cannot be loaded: then pynvml, a quarter of a plan's time to import, has no use."""
    if sys.platform != "linux" or "pynvml" in sys.modules:
        return True
    import ctypes

    try:
        ctypes.CDLL("libnvidia-ml.so.1")  # the name pynvml loads
    except OSError:
        return False
    return True


def _first(pynvml: Any) -> LocalGPU | None:
    count = int(pynvml.nvmlDeviceGetCount())
    handle = _first_visible(pynvml, count) if count else None
    if handle is None:
        return None
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    name, uuid = _text(pynvml.nvmlDeviceGetName(handle)), _text(pynvml.nvmlDeviceGetUUID(handle))
    return LocalGPU(name, int(memory.total), int(memory.used), count, uuid)


def _first_visible(pynvml: Any, count: int) -> Any | None:
    """The card that CUDA_VISIBLE_DEVICES names first, by number or identity; None where it hides them all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if visible.startswith("GPU-"):
        return pynvml.nvmlDeviceGetHandleByUUID(visible)
    if not visible.isdecimal():
        return None
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
    if os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and count > 1:
        # NVML counts by slot, CUDA the fastest first.
        handles.sort(key=lambda handle: _rank(pynvml, handle), reverse=True)
    return handles[int(visible)] if int(visible) < count else None


def _rank(pynvml: Any, handle: Any) -> tuple[Any, ...]:
    return tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)), int(pynvml.nvmlDeviceGetNumGpuCores(handle))


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
