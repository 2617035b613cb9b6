"""Several processes training one model, started by torchrun as nanoGPT's: who am I, and agreeing on things."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gptfit.errors import DeviceError
from gptfit.run.device import Device

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among its peers; alone unless torchrun set RANK, WORLD_SIZE and LOCAL_RANK."""

    rank: int = 0
    count: int = 1
    local_rank: int | None = None

    @property
    def is_master(self) -> bool:
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.count == 1

    def average(self, value: Tensor) -> Tensor:
        """The mean over all processes; the tensor itself when alone."""
        if not self.is_alone:
            dist.all_reduce(value)
            value /= self.count
        return value

    def any_of(self, flags: list[bool], device: Device) -> list[bool]:
        """Each flag, true if it is for at least one process, so that all leave a loop at the same step."""
        if self.is_alone:
            return flags
        seen = torch.tensor([int(flag) for flag in flags], device=device.torch_device)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in seen.tolist()]

    def gather(self, value: T) -> list[T]:
        """Every process's value, in rank order."""
        if self.is_alone:
            return [value]
        everyone: list[Any] = [None] * self.count
        dist.all_gather_object(everyone, value)
        return everyone

    def wait(self) -> None:
        if not self.is_alone:
            dist.barrier()


def find_processes() -> Processes:
    """From torchrun's environment; nothing is contacted yet."""
    if int(os.environ.get("RANK", -1)) == -1:
        return Processes()
    try:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        rank, count, local_rank = (int(os.environ[name]) for name in names)
    except (KeyError, ValueError) as error:
        raise DeviceError(f"RANK is set but {error} is not as torchrun sets it; start with torchrun") from None
    return Processes(rank, count, local_rank)


def join(processes: Processes, backend: str, device: Device) -> None:
    """Meet the others. nccl is for NVIDIA cards only, so a CPU run uses gloo whatever the config says."""
    if not processes.is_alone:
        dist.init_process_group(backend=backend if device.kind == "cuda" else "gloo")


def leave(processes: Processes) -> None:
    if not processes.is_alone and dist.is_initialized():
        dist.destroy_process_group()
