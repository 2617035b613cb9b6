"""Batches: which windows a micro-step sees, and a thread that reads the next ones ahead."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gptfit.data.token_files import TokenFile
from gptfit.device.device import Device
from gptfit.model.head import UNCOUNTED
from gptfit.train.order import EpochOrder, Ints

Batch = tuple[Tensor, Tensor]


def counted_share(batch: Batch) -> Tensor:
    """Of a batch's targets, the part that a loss is about."""
    return (batch[1] != UNCOUNTED).sum() / batch[1].numel()


class Sampler(Protocol):
    """Says where the windows of a micro-step begin."""

    def starts(self, step: int, first: int, count: int) -> Ints:
        """Windows first .. first+count-1 of this process's share of update `step`."""
        ...

    def state(self) -> list[int]:
        """Windows drawn but not yet used, for an exact return to this point."""
        ...

    def restore(self, state: list[int]) -> None: ...


@dataclass
class EpochSampler:
    """Position from the step alone: each window of each epoch once, whatever the micro-batch or process count."""

    order: EpochOrder
    until: Callable[[int], int]  # windows of all updates before a step, all processes together
    offset: Callable[[int], int] = lambda step: 0  # windows of that update that belong to the processes before this one
    # The run reads on from `base_window` at `base_step`; they move when a resumed run changes its step size.
    base_step: int = 0
    base_window: int = 0

    def position(self, step: int) -> int:
        return self.base_window + self.until(step) - self.until(self.base_step)

    def starts(self, step: int, first: int, count: int) -> Ints:
        return self.order.starts(self.position(step) + self.offset(step) + first, count)

    def state(self) -> list[int]:
        return []

    def restore(self, state: list[int]) -> None:
        assert not state


class RandomSampler:
    """nanoGPT's: uniformly random windows from torch's global stream, drawn in nanoGPT's order.

    Always `batch_size` at a time, also when memory made the micro-batch smaller: the windows stay the same.
    """

    def __init__(self, n_tokens: int, block_size: int, batch_size: int) -> None:
        self._choices = n_tokens - block_size
        self._batch_size = batch_size
        self._drawn: list[int] = []
        self._latest: list[int] = []

    def starts(self, step: int, first: int, count: int) -> Ints:
        while len(self._drawn) < count:
            self._drawn += torch.randint(self._choices, (self._batch_size,)).tolist()
        self._latest, self._drawn = self._drawn[:count], self._drawn[count:]
        return np.array(self._latest, dtype=np.int64)

    def state(self) -> list[int]:
        """nanoGPT draws one batch ahead, so at a step's beginning its first batch is drawn already."""
        return self._latest + self._drawn

    def restore(self, state: list[int]) -> None:
        """Windows that the data does not have any more are drawn anew."""
        self._drawn, self._latest = [start for start in state if start < self._choices], []


class Feed:
    """Hands out batches on the device; `prefetch` names the next one, a thread reads it meanwhile."""

    def __init__(self, tokens: TokenFile, block_size: int, device: Device) -> None:
        self._tokens = tokens
        self._block_size = block_size
        self._device = device
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="gptfit-read")
        self._next: Future[Batch] | None = None

    def prefetch(self, starts: Ints) -> None:
        self._next = self._reader.submit(self.read, starts)

    def take(self) -> Batch:
        assert self._next is not None, "prefetch comes first"
        pending, self._next = self._next, None
        return self.to_device(pending.result())

    def read(self, starts: Ints) -> Batch:
        """Inputs and targets one token apart, in memory a card can copy from by itself."""
        tokens, counts = self._tokens.marked_windows(starts, self._block_size + 1)
        rows = torch.from_numpy(tokens)
        targets = _laid_out(rows[:, 1:])
        if counts is not None:
            targets[torch.from_numpy(~counts[:, 1:])] = UNCOUNTED
        return self._device.pinned(_laid_out(rows[:, :-1])), self._device.pinned(targets)

    def to_device(self, batch: Batch) -> Batch:
        return self._device.put(batch[0]), self._device.put(batch[1])

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)


def _laid_out(rows: Tensor) -> Tensor:
    """Contiguous with the usual strides, which `contiguous` does not give a single row: compiled code is made for one layout."""
    return rows.clone(memory_format=torch.contiguous_format)
