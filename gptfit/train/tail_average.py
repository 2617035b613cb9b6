"""TailAverage: the mean of the weights over the last updates of a run; it is what is evaluated, sampled and exported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from gptfit.device.processes import ALONE, Processes, own_rows
from gptfit.train.parts import Part


class TailAverage:
    """Empty until the tail begins. Training itself goes on with the weights as they are.

    Of a model that is divided, each process averages its part.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], processes: Processes = ALONE) -> None:
        self._parameters, self._processes = parameters, processes
        self.weights: dict[str, Tensor] = {}
        self.count = 0

    def make_room(self) -> None:
        """All of its memory, before the update that it is for: where that runs out, no weight has moved."""
        if not self.weights:
            self.weights = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def include(self) -> None:
        """The weights as they are now, with the same share as every earlier one."""
        self.make_room()
        self.count += 1
        for name, p in self._parameters.items():
            self.weights[name].lerp_(p, 1 / self.count)

    def forget(self) -> None:
        self.weights, self.count = {}, 0

    def restore(self, weights: Mapping[str, Tensor], count: int) -> None:
        """As a checkpoint has them."""
        self.weights = {name: self._own(name, tensor) for name, tensor in weights.items()}
        self.count = count

    def _own(self, name: str, whole: Tensor) -> Tensor:
        p = self._parameters[name]
        own = own_rows(whole, self._processes.rank, self._processes.count) if isinstance(p, Part) else whole
        return own.to(p.device, p.dtype, copy=True)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the averaged weights, where there are any."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, p in self._parameters.items():
            if name not in self.weights:
                continue
            if isinstance(p, Part):  # its memory is what FSDP gathers from
                held = p.detach().clone()
                p.copy_(self.weights[name])
                self.weights[name] = held
            else:
                p.data, self.weights[name] = self.weights[name], p.data
