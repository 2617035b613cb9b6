"""Engine: a model on its device with its optimizer, able to do micro-steps, updates and evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gptfit.allocator import keep_freed_memory
from gptfit.config import TrainConfig
from gptfit.model.base import LanguageModel
from gptfit.model.build import build_model
from gptfit.run.batches import Batch
from gptfit.run.chunking import loss_chunk_tokens
from gptfit.run.compiler import compile_model, find_compile_problem, first_line
from gptfit.run.device import Device
from gptfit.run.optimizer import make_optimizer, set_learning_rate
from gptfit.run.processes import Processes
from gptfit.shape import ModelShape


@dataclass(frozen=True)
class Update:
    """What one optimizer step saw. `applied` is False when a number was not finite and the weights were left alone."""

    loss: float
    grad_norm: float
    applied: bool


@dataclass
class Engine:
    """Built by `build_engine`. `forward` is the model compiled and without DDP; `train_forward` may be wrapped in it."""

    config: TrainConfig
    device: Device
    processes: Processes
    model: LanguageModel
    forward: Callable[[Tensor, Tensor], Tensor]
    train_forward: Callable[[Tensor, Tensor], Tensor]
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    compile_problem: str | None = None
    compiled: bool = False

    def compile_now(self, ids: Tensor, with_backward: bool) -> str | None:
        """Compile by running once. A model the compiler cannot do runs eagerly from then on; returns why."""
        try:
            if with_backward:
                self.backward_micro_step(self.forward_micro_step((ids, ids), is_last=False), 1)
            self.mean_loss([(ids, ids)])
        except torch._dynamo.exc.TorchDynamoException as error:
            torch.compiler.set_stance("force_eager")
            self.compiled = False
            return first_line(error)
        self.device.synchronize()
        return None

    def forward_micro_step(self, batch: Batch, is_last: bool) -> Tensor:
        """The micro-batch's mean loss, with a graph behind it. Gradients are exchanged on the last one only."""
        if isinstance(self.train_forward, DistributedDataParallel):
            self.train_forward.require_backward_grad_sync = is_last
        with self.device.autocast():
            return self.train_forward(*batch)

    def backward_micro_step(self, loss: Tensor, micro_steps: int) -> None:
        self.scaler.scale(loss / micro_steps).backward()  # type: ignore[no-untyped-call]

    def update(self, loss_sum: Tensor, micro_steps: int, rate: float) -> Update:
        """Clip, step, forget the gradients. The only wait for the device in a training step is in here."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        self.scaler.unscale_(self.optimizer)
        try:
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            mean_loss = self.processes.average(loss_sum / micro_steps)
            loss, grad_norm = torch.stack([mean_loss.float(), norm.float()]).tolist()
            applied = math.isfinite(loss) and math.isfinite(grad_norm)
            if applied:
                if self.config.grad_clip and grad_norm > self.config.grad_clip:
                    nn.utils.clip_grads_with_norm_(parameters, self.config.grad_clip, norm)
                set_learning_rate(self.optimizer, rate)
                self.scaler.step(self.optimizer)
        finally:
            # Also when memory ran out: the scaler takes no second update before this. It lowers its scale where a
            # gradient overflowed.
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return Update(loss, grad_norm, applied)

    def mean_loss(self, batches: Iterable[Batch]) -> float:
        """Mean over tokens of this process's and every other's batches, without dropout."""
        # Only dropout knows the difference; compiled code would be compiled again for it.
        self.model.train(not self.model.dropout_rate)
        # (sum of losses, tokens); Apple GPUs have no float64
        total = torch.zeros(2, dtype=torch.float32 if self.device.kind == "mps" else torch.float64)
        total = total.to(self.device.torch_device)
        try:
            with torch.no_grad():
                for batch in batches:
                    with self.device.autocast():
                        loss = self.forward(*batch)
                    total[0] += loss * batch[1].numel()
                    total[1] += batch[1].numel()
        finally:
            self.model.train()
        loss_sum, tokens = self.processes.average(total).tolist()
        return float(loss_sum / tokens)

    def forget_gradients(self) -> None:
        """Nothing is left of a step given up half-way, nor of optimizer state that memory ran out on before it was whole."""
        self.optimizer.zero_grad(set_to_none=True)
        for state in self.optimizer.state.values():
            if "step" in state and "exp_avg_sq" not in state:
                state.clear()


def build_engine(config: TrainConfig, shape: ModelShape, device: Device, processes: Processes | None = None) -> Engine:
    """Model (drawn from torch's global stream, on the CPU, as nanoGPT does), optimizer, compiler, DDP."""
    processes = processes or Processes()
    if device.kind == "cpu":
        keep_freed_memory()
    model = build_model(shape, config.dropout, config.checkpoint_activations)
    model.to(device.torch_device)
    model.loss_chunk_tokens = loss_chunk_tokens(config, shape, device)
    optimizer = make_optimizer(model, config, device)
    problem = find_compile_problem(device) if config.compile else None
    compiled = config.compile and problem is None
    forward: Callable[[Tensor, Tensor], Tensor] = compile_model(model, device) if compiled else model
    train_forward = forward
    if not processes.is_alone:
        assert isinstance(forward, nn.Module)
        train_forward = DistributedDataParallel(
            forward, device_ids=[device.torch_device.index] if device.kind == "cuda" else None
        )
    scaler = torch.amp.GradScaler(device.kind, enabled=device.needs_scaler)
    return Engine(config, device, processes, model, forward, train_forward, optimizer, scaler, problem, bool(compiled))
