"""The NVIDIA card in this machine as NVML sees it, without torch: name, memory and what is in use."""

from __future__ import annotations

from dataclasses import dataclass

from gptfit.gpus import GPU, find_or_none
from gptfit.units import GIB


@dataclass(frozen=True)
class LocalGPU:
    """The first card of this machine. `gpu` is None when the table does not know it."""

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
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        name = pynvml.nvmlDeviceGetName(handle)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        text = name.decode() if isinstance(name, bytes) else str(name)
        return LocalGPU(text, int(memory.total), int(memory.used), count)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
