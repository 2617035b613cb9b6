"""Look-up tables. Where a table is in host memory the gradients of its rows are added up in place, and so they are on a CPU.

Autograd makes a gradient as large as the table for every look-up, nearly all of it zeros. Of a table in host memory the
device has only the rows of a micro-batch and, for the time of the loss, the head in the products' format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Table(nn.Embedding):
    """An embedding; `keep_on_host` once its weights are there."""

    fetch: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
    touched: Tensor | None = None  # which rows have a gradient, once those without need not be looked at

    def keep_on_host(self) -> None:
        # Not a decorator: it imports the compiler, seconds that most programs can do without.
        self.fetch = torch.compiler.disable(_rows)  # type: ignore[no-untyped-call]

    def keep_gradient(self) -> None:
        """It stays between updates, zero everywhere; only rows looked up since the last one are counted, scaled and zeroed.

        For a table on the CPU whose gradient nothing but look-ups writes.
        """
        self.fetch, self.touched = _rows, torch.zeros(self.num_embeddings, dtype=torch.bool)

    def gradient_rows(self) -> Tensor | None:
        """All of the gradient that is not zero."""
        gradient = self.weight.grad
        if gradient is None:
            return None
        rows = self._touched_rows()
        return gradient if rows is None else gradient.index_select(0, rows)

    def scale_gradient(self, factor: Tensor) -> None:
        gradient, rows = self.weight.grad, self._touched_rows()
        if gradient is not None and rows is not None:
            gradient.index_copy_(0, rows, gradient.index_select(0, rows) * factor)
        elif gradient is not None:
            gradient.mul_(factor)

    def forget_gradient(self) -> None:
        gradient, rows = self.weight.grad, self._touched_rows()
        if gradient is not None and rows is not None:
            gradient.index_fill_(0, rows, 0.0)
        elif gradient is not None:
            gradient.zero_()
        assert self.touched is not None
        self.touched.zero_()

    def _touched_rows(self) -> Tensor | None:
        """None: so many that looking at all is faster."""
        assert self.touched is not None
        rows = self.touched.nonzero().squeeze(1)
        return None if 2 * len(rows) > len(self.touched) else rows

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) if self.fetch is None else self.fetch(self.weight, ids, self.touched)


def _rows(weight: Tensor, ids: Tensor, touched: Tensor | None) -> Tensor:
    return _Rows.apply(weight, ids, touched)  # type: ignore[no-any-return, no-untyped-call]


class _Rows(torch.autograd.Function):
    """The weight has no gradient for autograd; what there is goes straight into its own."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, touched: Tensor | None) -> Tensor:
        ctx.weight, ctx.ids, ctx.touched = weight, ids.to(weight.device), touched
        rows = F.embedding(ctx.ids, weight.detach())
        return (rows.pin_memory() if ids.is_cuda else rows).to(ids.device, non_blocking=True)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[None, None, None]:
        weight, ids = ctx.weight, ctx.ids.flatten()
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        if ctx.touched is not None:
            ctx.touched[ids] = True  # before they are: where memory runs out in between they are still forgotten
        weight.grad.index_add_(0, ids, grad_rows.to(weight.device, weight.dtype).flatten(0, -2))
        return None, None, None


def on_device(weight: Tensor, device: torch.device) -> Tensor:
    """A matrix from host memory for one product, in the format the product has: half the bytes on the way."""
    kind = device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    return weight.to(dtype).to(device, non_blocking=True)
