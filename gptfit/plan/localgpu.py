"""The NVIDIA card in this machine as NVML sees it, without torch: name, memory and what is in use."""

from __future__ import annotations

import os
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

    @property
    def gpu(self) -> GPU | None:
        return find_or_none(self.name, self.total_bytes / GIB)


def local_gpu() -> LocalGPU | None:
    """None without a card, a driver, or the nvidia-ml-py package."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        count = int(pynvml.nvmlDeviceGetCount())
        if not count:
            return None
        handle = _first_visible(pynvml)
        if handle is None:
            return None
        name = pynvml.nvmlDeviceGetName(handle)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        text = name.decode() if isinstance(name, bytes) else str(name)
        return LocalGPU(text, int(memory.total), int(memory.used), count)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _first_visible(pynvml: Any) -> Any | None:
    """The card that CUDA_VISIBLE_DEVICES names first, by number or identity; None where it hides them all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if visible.startswith("GPU-"):
        return pynvml.nvmlDeviceGetHandleByUUID(visible)
    return pynvml.nvmlDeviceGetHandleByIndex(int(visible)) if visible.isdecimal() else None
