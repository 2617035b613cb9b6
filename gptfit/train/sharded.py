"""parallel='fsdp': FSDP2. Weights, gradients and optimizer state are divided; a block is whole only while it is at work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from gptfit.device.device import Device
from gptfit.device.processes import Processes, all_gather
from gptfit.errors import DeviceError
from gptfit.model.base import LanguageModel
from gptfit.train.parallel import Alone, Forward, Passes
from gptfit.train.parts import Part, gather, part_of, tied_names, whole_shape

REHEARSED_TOKENS = 8


def shard(model: LanguageModel, device: Device, processes: Processes) -> dict[str, Part]:
    """Divide a model that is still on the host; what it leaves on the device is this process's part, by name.

    Blocks travel in the number format they compute in. What is outside of them stays in float32, and with it the
    residual stream, as autocast has it. Gradients are summed in float32.
    """
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise DeviceError(
            f"parallel = 'fsdp' needs torch 2.13, this is {torch.__version__}", fix="use parallel = 'ddp'"
        )
    mesh = init_device_mesh(device.kind, (processes.count,))
    in_blocks = None if device.dtype == "float32" else device.torch_dtype
    narrow = MixedPrecisionPolicy(param_dtype=in_blocks, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in model.units():
        fully_shard(module, mesh=mesh, mp_policy=narrow)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    model.to(device.torch_device)  # tables that are no weights
    return {name: part_of(parameter) for name, parameter in model.named_parameters()}


class Sharded(Alone):
    """FSDP2's hooks do the work; this says when gradients are summed, and finishes for a process that gives up."""

    is_sharded = True

    def __init__(
        self, forward: Forward, model: LanguageModel, parts: dict[str, Part], device: Device, processes: Processes
    ) -> None:
        super().__init__(forward, parts)
        assert isinstance(model, FSDPModule)
        self._model, self._device, self._processes = model, device, processes
        self._divided = list(model.parameters())
        self._host_mesh = init_device_mesh("cpu", (processes.count,))
        self._exchange = Exchange()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_AllGather(self._exchange))  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(_ReduceScatter(self._exchange))  # type: ignore[arg-type]
                # gloo cannot average, and a sum divided afterwards is the same
                module.set_force_sum_reduction_for_comms(dist.get_backend() == "gloo")
        self._rehearse()

    def begin(self, passes: Passes) -> None:
        self._exchange.begin(passes)

    def sum_in_every_micro_step(self) -> bool:
        is_change = self._exchange.sums_late
        self._exchange.sums_late = False
        return is_change

    def forward(self, ids: Tensor, targets: Tensor, is_last: bool) -> Tensor:
        self._exchange.next_pass()
        self._model.set_requires_gradient_sync(is_last or not self._exchange.sums_late)
        return self._forward(ids, targets)

    def evaluate(self, ids: Tensor, targets: Tensor) -> Tensor:
        self._exchange.next_pass()
        loss = self._forward(ids, targets)
        self._model.reset_iter_state()  # there is no backward that would do so
        return loss

    def give_up(self) -> None:
        """Others need this process's rows of the weights for what they still have to do."""
        self._exchange.take_part_to_the_end(self._device.torch_device)

    def renew(self, forward: Forward) -> None:
        """Measures against a lack of memory may have changed what backward gathers."""
        super().renew(forward)
        self._model.reset_iter_state()
        self._rehearse()

    def forget_gradients(self, optimizer: Optimizer) -> None:
        for parameter in (*self._divided, *self.parameters.values()):
            parameter.grad = None

    def hand_over_gradients(self) -> None:
        for divided, part in zip(self._divided, self.parameters.values(), strict=True):
            part.grad = None if divided.grad is None else divided.grad.to_local()  # type: ignore[attr-defined]

    def total_norm(self, norm: Tensor) -> Tensor:
        square = norm.square()
        dist.all_reduce(square)
        return square.sqrt()

    def agree_on_overflow(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        if scaler.is_enabled():
            for found in scaler._found_inf_per_device(optimizer).values():
                dist.all_reduce(found, op=dist.ReduceOp.MAX)

    def whole_weights(self, model: nn.Module) -> dict[str, Tensor]:
        wholes = self.whole({name: part.detach() for name, part in self.parameters.items()})
        # One tensor under both names where embedding and head are one.
        first, named = tied_names(model), model.named_parameters(remove_duplicate=False)
        return {name: wholes[first.get(name, name)] for name, _ in named} if wholes else {}

    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On the host of the first process, which needs room for all of them; the others have nothing of it."""
        wholes = {}
        for name, rows in parts.items():
            whole = gather(rows, whole_shape(self.parameters[name])[0], self._processes)
            if self._processes.is_master:
                wholes[name] = whole.cpu()
        return wholes

    def divided(self, name: str, rows: Tensor) -> Tensor:
        shape = torch.Size((whole_shape(self.parameters[name])[0], *rows.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        # torch would bring rows on the host to the mesh's device, where there may be no room for them
        mesh = self._host_mesh if rows.device.type == "cpu" else self._divided[0].device_mesh  # type: ignore[attr-defined]
        return DTensor.from_local(rows, mesh, [Shard(0)], shape=shape, stride=stride)

    def _rehearse(self) -> None:
        """A few tokens forward and backward, to know what a pass exchanges before memory can run out in one."""
        is_training, tokens = self._model.training, torch.zeros(1, REHEARSED_TOKENS, dtype=torch.long)
        tokens = tokens[:, : self._model.shape.block_size].to(self._device.torch_device)
        self._model.eval()  # dropout would draw from the run's random stream
        try:
            with torch.compiler.set_stance("force_eager"), self._device.autocast():
                self._exchange.begin(Passes(updates=1))
                loss = self.forward(tokens, tokens, is_last=True)
                self._exchange.backward_begins()
                loss.backward()  # type: ignore[no-untyped-call]
            self._exchange.learn()
        finally:
            self._model.train(is_training)
            for parameter in self._divided:
                parameter.grad = None


@dataclass(frozen=True)
class Collective:
    """One exchange of all processes: what each of them puts in and gets out."""

    op: Any  # how gradients are summed, each process getting its rows; None where weights are gathered
    n_in: int
    n_out: int
    dtype: torch.dtype


@dataclass
class Exchange:
    """What the passes of this update have exchanged so far, and what they will have exchanged at their end."""

    passes: Passes | None = None
    started: int = 0  # passes
    done: list[Collective] = field(default_factory=list)  # of the pass at work
    in_forward: list[Collective] = field(default_factory=list)
    in_backward: list[Collective] = field(default_factory=list)
    group: Any = None  # of processes that FSDP's collectives go through
    sums_late: bool = True  # gradients are summed in the last pass only
    _n_forward: int = 0

    def begin(self, passes: Passes) -> None:
        self.passes, self.started, self.done = passes, 0, []

    def next_pass(self) -> None:
        self.started += 1
        self.done = []

    def add(self, collective: Collective, group: Any) -> None:
        self.group = group
        self.done.append(collective)

    def backward_begins(self) -> None:
        self._n_forward = len(self.done)

    def learn(self) -> None:
        self.in_forward, self.in_backward = self.done[: self._n_forward], self.done[self._n_forward :]

    def take_part_to_the_end(self, device: torch.device) -> None:
        for collective in self._missing():
            given = torch.zeros(collective.n_in, dtype=collective.dtype, device=device)
            got = torch.empty(collective.n_out, dtype=collective.dtype, device=device)
            if collective.op is not None:
                dist.reduce_scatter_single(got, given, op=collective.op, group=self.group)
            else:
                all_gather(got, given, group=self.group)

    def _missing(self) -> Iterator[Collective]:
        assert self.passes is not None
        if self.started:
            yield from self._of_pass(self.started)[len(self.done) :]
        for number in range(self.started + 1, self.passes.total + 1):
            yield from self._of_pass(number)

    def _of_pass(self, number: int) -> list[Collective]:
        """An evaluation has no backward."""
        assert self.passes is not None
        if self.passes.evaluations:
            return self.in_forward
        sums = number == self.passes.total or not self.sums_late
        return [*self.in_forward, *(one for one in self.in_backward if sums or one.op is None)]


class _AllGather:
    """As FSDP2's own, and counted."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        work = all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        sizes = input_tensor.numel(), output_tensor.numel()
        self._exchange.add(Collective(None, *sizes, input_tensor.dtype), group)
        return work


class _ReduceScatter(_AllGather):
    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        work = dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        sizes = input_tensor.numel(), output_tensor.numel()
        self._exchange.add(Collective(op, *sizes, input_tensor.dtype), group)
        return work
