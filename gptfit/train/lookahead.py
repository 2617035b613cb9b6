"""EMA-Nesterov (modded-nanogpt's track 3): gradients are taken a little further along the way the weights are going.

x' = A(x + share * m) and m' = beta * m + (1 - beta) * (x' - x), where A is one update of Muon, for the matrices alone.
Between updates the weights are x: what is evaluated and saved. m is kept with the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

AVERAGE = "update_average"
# Of a run's updates that m remembers: 100 of 3,125 in the record, and as large a part of a shorter run.
MEMORY_FRACTION, MOST_MEMORY, LEAST_MEMORY = 0.032, 100.0, 2.0


def memory(max_iters: int) -> float:
    return max(LEAST_MEMORY, min(MOST_MEMORY, MEMORY_FRACTION * max_iters))


class LookAhead:
    """Moves the matrices of a Muon optimizer ahead for the time of a step's gradients."""

    def __init__(self, optimizer: Optimizer, max_iters: int) -> None:
        self._optimizer, self._beta = optimizer, 1 - 1 / memory(max_iters)
        self._places: dict[Tensor, Tensor] = {}  # where the weights were, while they are ahead
        self._averages: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def go(self, share: float) -> None:
        """To where the gradients are to be taken. All memory of the step is taken here, before the update."""
        for p in self._matrices():
            self._places[p] = p.detach().clone()
            average = self._optimizer.state[p].get(AVERAGE)
            self._averages[p] = torch.zeros_like(p) if average is None else average
            p.add_(self._averages[p], alpha=share)

    @torch.no_grad()
    def come_back(self) -> None:
        """As if the step had never begun."""
        for p, place in self._places.items():
            p.copy_(place)
        self._places.clear()

    @torch.no_grad()
    def settle(self) -> None:
        """After the update: remember by how much the weights moved in all."""
        for p, place in self._places.items():
            moved = place.neg_().add_(p)
            self._optimizer.state[p][AVERAGE] = self._averages[p].lerp_(moved, 1 - self._beta)
        self._places.clear()

    def _matrices(self) -> Iterator[Tensor]:
        return (p for group in self._optimizer.param_groups if "parts" in group for p in group["params"])
