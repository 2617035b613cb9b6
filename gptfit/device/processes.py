"""Several processes training one model, started by torchrun as nanoGPT's: who am I, and agreeing on things."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gptfit.device.device import Device
from gptfit.errors import DeviceError

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

    @property
    def machines(self) -> int:
        """As torchrun spread the processes; one where it did not say."""
        here = os.environ.get("LOCAL_WORLD_SIZE", "")
        return -(-self.count // int(here)) if here.isdigit() and int(here) else 1

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


ALONE = Processes()

# One name since torch 2.13, another before.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def own_rows(whole: Tensor, rank: int, count: int) -> Tensor:
    """What a process has of a tensor that is divided by rows, as torch.chunk does: the last ones may have fewer or none."""
    each = -(-len(whole) // count)
    return whole[rank * each : (rank + 1) * each]


# Set by `train --gpus` for the processes it starts; torchrun has names of its own for the same.
START_VARIABLE, RESTARTS_VARIABLE = "GPTFIT_START", "GPTFIT_RESTARTS"
LOST_PEER = "another process of this run is gone"


def this_start() -> str:
    """The same for all processes and all restarts of one `train --gpus` or torchrun, and no other."""
    ours, theirs = os.environ.get(START_VARIABLE), os.environ.get("TORCHELASTIC_RUN_ID", "none")
    # torchrun without --rdzv-id calls every run 'none', but its own process lives as long as the run.
    return ours or (theirs if theirs != "none" else f"agent {os.getppid()}")


def is_restart() -> bool:
    """Whether processes of this very start were here before and ended too soon."""
    names = (RESTARTS_VARIABLE, "TORCHELASTIC_RESTART_COUNT")
    return any(os.environ.get(name, "0") not in ("", "0") for name in names)


def find_processes() -> Processes:
    """From torchrun's environment; nothing is contacted yet."""
    if os.environ.get("RANK", "") in ("", "-1"):
        return ALONE
    count = _number("WORLD_SIZE", 1)
    return Processes(_number("RANK", 0, count - 1), count, _number("LOCAL_RANK", 0))


def _number(name: str, low: int, high: int | None = None) -> int:
    """A variable that torchrun sets."""
    text = os.environ.get(name, "")
    if not text.isascii() or not text.isdigit() or int(text) < low or (high is not None and int(text) > high):
        wanted = f"a number from {low}" + (f" to {high}" if high is not None else " on")
        problem = f"{name} is {text[:40]!r}, not {wanted}" if text else f"RANK is set and {name} is not"
        raise DeviceError(problem, fix="start with torchrun, which sets them all, or unset RANK")
    return int(text)


def join(processes: Processes, backend: str, device: Device) -> None:
    """Meet the others. nccl is for NVIDIA cards and not for Windows; everything else talks through gloo."""
    if processes.is_alone:
        return
    try:
        _join(backend, device)
    except (ValueError, dist.DistError) as error:  # no address, a port that is none, nobody there
        reason = str(error).partition("\n")[0]
        raise DeviceError(f"the {processes.count} processes cannot meet: {reason}", fix="start with torchrun") from None


def _join(backend: str, device: Device) -> None:
    if device.kind != "cuda" or (backend == "nccl" and not dist.is_nccl_available()):
        dist.init_process_group("gloo")
    else:
        # The card is named so that the communicator is made now, on it, and not at the first exchange on a guessed one.
        dist.init_process_group(backend, device_id=device.torch_device if backend == "nccl" else None)


# How gloo and NCCL say that another process is gone.
LOST_PEER_WORDS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL communicator was aborted",
)


def is_lost_peer(error: BaseException) -> bool:
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in LOST_PEER_WORDS)


def leave(processes: Processes) -> None:
    if not processes.is_alone and dist.is_initialized():
        dist.destroy_process_group()
