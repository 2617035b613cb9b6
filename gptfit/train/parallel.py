"""One model in several processes: DDP around it, gradients exchanged once per update, and no peer left waiting."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gptfit.device.device import Device
from gptfit.device.processes import Processes
from gptfit.model.tables import Table

# Buffers are constants, which nobody needs to send; torch 2.13 calls that otherwise.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
DDP_OPTIONS: dict[str, Any] = {
    "gradient_as_bucket_view": True,  # one memory for gradients and what is sent of them
    "forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False,
}

Forward = Callable[[Tensor, Tensor], Tensor]


class MemoryRanOut(MemoryError):
    """In one process at least; raised in all of them at the same place, so that all do the same about it."""


@dataclass(frozen=True)
class Passes:
    """What every process is about to do: micro-steps of one update, or batches of an evaluation."""

    updates: int = 0
    evaluations: int = 0

    @property
    def total(self) -> int:
        return self.updates + self.evaluations


class Alone:
    """A single process: nothing to exchange. `parameters` are what the optimizer has."""

    is_sharded = False

    def __init__(self, forward: Forward, parameters: Mapping[str, nn.Parameter]) -> None:
        self._forward, self.parameters = forward, parameters
        self.keeps_gradients = False
        self.kept_tables: dict[Tensor, Table] = {}  # whose gradients stay, and only their touched rows are looked at

    def begin(self, passes: Passes) -> None:
        """Nothing was exchanged for these yet."""

    def forward(self, ids: Tensor, targets: Tensor, is_last: bool) -> Tensor:
        return self._forward(ids, targets)

    def evaluate(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self._forward(ids, targets)

    def give_up(self) -> None:
        """This process cannot finish its share: take part, with nothing, in what the others are waiting for."""

    def renew(self, forward: Forward) -> None:
        """After an update was given up, by all processes together; the model may have been compiled anew."""
        self._forward = forward

    def keep_gradients_of(self, tables: Iterable[Table]) -> None:
        for table in tables:
            table.keep_gradient()
            self.kept_tables[table.weight] = table

    def forget_gradients(self, optimizer: Optimizer) -> None:
        if self.keeps_gradients:
            optimizer.zero_grad(set_to_none=False)
            return
        for parameter in self.parameters.values():
            if parameter in self.kept_tables:
                self.kept_tables[parameter].forget_gradient()
            else:
                parameter.grad = None

    def gradients(self) -> Iterator[Tensor]:
        """All that is not zero, one by one: rows of a table are copies."""
        for p in self.parameters.values():
            gradient = self.kept_tables[p].gradient_rows() if p in self.kept_tables else p.grad
            if gradient is not None:
                yield gradient

    @torch.no_grad()
    def scale_gradients(self, factor: Tensor) -> None:
        for p in self.parameters.values():
            if p in self.kept_tables:
                self.kept_tables[p].scale_gradient(factor)
            elif p.grad is not None:
                p.grad.mul_(factor.to(p.grad.device, p.grad.dtype))

    def clip_gradients(self, most: float, norm: Tensor) -> None:
        """Of a larger norm."""
        nn.utils.clip_grads_with_norm_([p for p in self.parameters.values() if p not in self.kept_tables], most, norm)
        for table in self.kept_tables.values():
            table.scale_gradient(most / (norm + 1e-6))  # as torch does with the others

    def hand_over_gradients(self) -> None:
        """To `parameters`, after the last micro-step, where they are not the model's own."""

    def sum_in_every_micro_step(self) -> bool:
        """From now on gradients do not wait, whole, for the last micro-step; whether that is a change."""
        return False

    def total_norm(self, norm: Tensor) -> Tensor:
        """Of the whole gradient, from the norm of this process's part of it."""
        return norm

    def whole_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """By name, as a checkpoint has them; all processes must call this, and the first has the result."""
        return model.state_dict()

    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of tensors like the parameters; as `whole_weights` does."""
        return dict(parts)

    def divided(self, name: str, rows: Tensor) -> Tensor:
        """Rows of something like that parameter, as torch knows what several processes share."""
        raise AssertionError("nothing is divided here")

    def agree_on_overflow(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        """Whether a 16-bit gradient overflowed, where each process sees its part only."""


class Replicated(Alone):
    """DDP: everyone has the whole model; gradients are averaged bucket by bucket while backward still runs."""

    def __init__(
        self, forward: Forward, parameters: Mapping[str, nn.Parameter], device: Device, processes: Processes
    ) -> None:
        assert isinstance(forward, nn.Module)
        super().__init__(forward, parameters)
        self._module, self._device, self._count = forward, device, processes.count
        self._ddp = self._wrapped()
        self._exchanges: list[torch.futures.Future[Any]] = []
        self._is_update = False  # or an evaluation, which exchanges nothing
        self._has_met = False  # whether the forward pass before the exchange was begun

    def begin(self, passes: Passes) -> None:
        self._exchanges, self._has_met, self._is_update = [], False, passes.updates > 0

    def forward(self, ids: Tensor, targets: Tensor, is_last: bool) -> Tensor:
        self._has_met = is_last
        self._ddp.require_backward_grad_sync = is_last
        loss: Tensor = self._ddp(ids, targets)
        return loss

    def give_up(self) -> None:
        """As torch's own join of uneven inputs does: the buckets still missing, as zeros, in DDP's order."""
        if not self._is_update:
            return
        if not self._has_met:
            self._ddp.reducer._rebuild_buckets()  # the others do so in their forward if it is due
        missing = self._ddp.reducer._get_zeros_like_grad_buckets()[len(self._exchanges) :]
        for bucket in missing:
            self._exchange(bucket)
        for exchange in self._exchanges:
            exchange.wait()

    def renew(self, forward: Forward) -> None:
        """A reducer that was left half-way cannot be used again."""
        assert isinstance(forward, nn.Module)
        self._forward = self._module = forward
        forward.zero_grad(set_to_none=True)  # they are views into what goes now
        del self._ddp
        self._ddp = self._wrapped()

    def forget_gradients(self, optimizer: Optimizer) -> None:
        """In place: gradients are views into DDP's buckets, and new ones would take their memory once more."""
        optimizer.zero_grad(set_to_none=False)

    def _wrapped(self) -> DistributedDataParallel:
        ddp = DistributedDataParallel(
            self._module,
            device_ids=[self._device.torch_device.index] if self._device.kind == "cuda" else None,
            **DDP_OPTIONS,
        )
        ddp.register_comm_hook(None, lambda _, bucket: self._exchange(bucket))
        return ddp

    def _exchange(self, bucket: Any) -> torch.futures.Future[Any]:
        """The mean over all processes, as DDP does by itself; counted, so that `give_up` knows what is missing."""
        buffer = bucket.buffer().div_(self._count)
        exchange: torch.futures.Future[Any]
        exchange = dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])
        self._exchanges.append(exchange)
        return exchange
