"""TailAverage: the mean of the weights over the last updates of a run; it is what is evaluated, sampled and exported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gptfit.model.base import LanguageModel


class TailAverage:
    """Empty until the tail begins. Training itself goes on with the weights as they are."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.weights: dict[str, Tensor] = {}
        self.count = 0

    @torch.no_grad()
    def include(self) -> None:
        """The weights as they are now, with the same share as every earlier one."""
        self.count += 1
        for name, p in self._model.named_parameters():
            if name in self.weights:
                self.weights[name].lerp_(p, 1 / self.count)
            else:
                self.weights[name] = p.detach().clone()

    def forget(self) -> None:
        self.weights, self.count = {}, 0

    def restore(self, weights: Mapping[str, Tensor], count: int) -> None:
        """As a checkpoint has them."""
        parameters = dict(self._model.named_parameters())
        self.weights = {name: tensor.to(parameters[name].device, copy=True) for name, tensor in weights.items()}
        self.count = count

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the averaged weights, where there are any."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, p in self._model.named_parameters():
            if name in self.weights:
                p.data, self.weights[name] = self.weights[name], p.data
