"""Engine: a model on its device with its optimizer, able to do micro-steps, updates and evaluations."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from gptfit.config.keys import TrainConfig
from gptfit.device.allocator import keep_freed_memory
from gptfit.device.compiler import compile_model, find_compile_problem, first_line
from gptfit.device.device import Device, is_out_of_memory
from gptfit.device.processes import ALONE, Processes
from gptfit.model.base import LanguageModel
from gptfit.model.build import build_model
from gptfit.plan.memory import FITTED
from gptfit.plan.resolve import setting_of
from gptfit.schedule import Knobs
from gptfit.shape import ModelShape
from gptfit.train.batches import Batch
from gptfit.train.kept_state import KeptStateOptimizer
from gptfit.train.lookahead import LookAhead
from gptfit.train.muon import Muon
from gptfit.train.optimizers import AdamW, make_optimizer, set_gradient_dtype, turn
from gptfit.train.parallel import Alone, MemoryRanOut, make_parallel
from gptfit.train.place import place_of
from gptfit.train.tail_average import TailAverage

T = TypeVar("T")
TIMED_MICRO_STEPS = 4  # of which the fastest counts


@dataclass(frozen=True)
class Update:
    """What one optimizer step saw. `applied` is False when a number was not finite and the weights were left alone."""

    loss: float
    grad_norm: float
    applied: bool


@dataclass
class Engine:
    """Built by `build_engine`. `forward` is the model compiled; `parallel` calls it for training, in all processes."""

    config: TrainConfig
    device: Device
    processes: Processes
    model: LanguageModel
    forward: Callable[[Tensor, Tensor], Tensor]
    parallel: Alone
    optimizer: AdamW | Muon | KeptStateOptimizer
    scaler: torch.amp.GradScaler
    tail: TailAverage
    ahead: LookAhead | None = None
    compile_problem: str | None = None
    compiled: bool = False
    is_optimizer_ready: bool = False  # its state was made, with all processes agreeing that memory suffices
    compiled_rows: int | None = None  # the micro-batch there is code for
    is_settled: bool = False  # gradients and optimizer state were made first, where they are kept

    def compile_now(self, batch: Batch, with_backward: bool, with_eval: bool = True) -> str | None:
        """Compile by running once. A model the compiler cannot do runs eagerly from then on; returns why.

        The batch comes as training's do: code is made for its layout, and for inputs that are not the targets.
        """
        self.compiled_rows = batch[0].shape[0]
        try:
            if with_backward:
                self.backward_micro_step(self.forward_micro_step(batch, is_last=False), 1)
            if with_eval:
                self.mean_loss([batch])
        except torch._dynamo.exc.TorchDynamoException as error:
            if is_out_of_memory(error):
                raise
            torch.compiler.set_stance("force_eager")
            self.compiled = False
            return first_line(error)
        self.device.synchronize()
        return None

    def chunk_loss(self, micro_tokens: int) -> bool:
        """Compute the loss in chunks from now on, where the config leaves it open and it helps; whether that is a change."""
        is_open = self.config.chunked_loss == "auto" and not self.model.loss_chunk_tokens
        if not is_open or micro_tokens <= CHUNK_TOKENS:
            return False
        self.model.loss_chunk_tokens = CHUNK_TOKENS
        self._compile_anew()
        return True

    def checkpoint(self, how: str | bool) -> None:
        """Compute activations again in backward from now on: 'wide' or True."""
        self.model.checkpoint_activations = how
        self._compile_anew()

    def move_state_to_host(self) -> bool:
        """Keep optimizer state in host memory from now on; whether that is a change."""
        if self.device.kind == "cpu" or self.optimizer_is_on_host or self.ahead:
            return False
        saved = self.optimizer.state_dict()
        config = self.config.replace(optimizer_device="cpu")
        self.optimizer = make_optimizer(self.model, config, self.device, self.processes)
        self.optimizer.load_state_dict(saved)
        return True

    @property
    def optimizer_is_on_host(self) -> bool:
        return isinstance(self.optimizer, KeptStateOptimizer) and self.optimizer.is_on_host

    def _compile_anew(self) -> None:
        if self.compiled:
            torch.compiler.reset()
            self.forward = compile_model(self.model, self.device, self.config.fused_loss)

    def settle(self) -> None:
        """Gradients and optimizer state take their places before anything that comes and goes, and keep them.

        Made in the first backward and update they would lie where the first logits were, which then need memory once more:
        2 to 17 % of all (bench/replay.py).
        """
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
            self.optimizer.make_state()
        self.is_settled = True

    def begin_step(self, knobs: Knobs) -> None:
        """Put the weights where the step's gradients are to be taken."""
        if self.ahead:
            self.ahead.go(knobs.lookahead)

    def forward_micro_step(self, batch: Batch, is_last: bool) -> Tensor:
        """The micro-batch's mean loss, with a graph behind it. Gradients are exchanged on the last one only."""
        if self.parallel.keeps_gradients and not self.is_settled:
            self.settle()
        with self.device.autocast():
            return self.parallel.forward(*batch, is_last)

    def backward_micro_step(self, loss: Tensor, micro_steps: float) -> None:
        """`micro_steps`: of a process with an even share of the update, so that all processes' mean is the mean."""
        self.scaler.scale(loss / micro_steps).backward()  # type: ignore[no-untyped-call]

    def whole_micro_step(self, batch: Batch) -> bool:
        """Forward, backward and exchange, as the last micro-step of an update."""
        self.backward_micro_step(self.forward_micro_step(batch, is_last=True), 1)
        self.device.synchronize()
        return True

    def seconds_per_micro_step(self, batch: Batch) -> float:
        """The best of a few, without an exchange, so that no other process is waited for."""
        seconds = []
        for _ in range(TIMED_MICRO_STEPS):
            began = time.perf_counter()
            self.backward_micro_step(self.forward_micro_step(batch, is_last=False), 1)
            self.device.synchronize()
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    def together(self, action: Callable[[], T], exchanges: bool = True) -> T:
        """Do this process's part of what all do; where memory runs out for one, all raise `MemoryRanOut` at the end.

        `exchanges`: gradients are exchanged in it, so that the others would wait for one that has given up.
        """
        if self.processes.is_alone:
            return action()
        self.parallel.begin()
        result: T | None = None
        try:
            result = action()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        if result is None:  # outside the except block: the error holds the frames, and the frames hold the memory
            gc.collect()
            self.device.release_memory()
            if exchanges:
                self.parallel.give_up()
        if self.processes.any_of([result is None], self.device)[0]:
            raise MemoryRanOut("out of memory in one of the processes")
        assert result is not None
        return result

    def ready_optimizer(self) -> None:
        """Its state exists before all agree that memory suffices; an update itself then needs none."""
        if not self.processes.is_alone and not self.is_optimizer_ready:
            with torch.no_grad():
                self.optimizer.make_state()
            self.is_optimizer_ready = True

    def update(self, loss_sum: Tensor, micro_steps: float, knobs: Knobs) -> Update:
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
                turn(self.optimizer, knobs)
                self.scaler.step(self.optimizer)
                self._settle(knobs)
            elif self.ahead:
                self.ahead.come_back()
        finally:
            # Also when memory ran out: the scaler takes no second update before this. It lowers its scale where a
            # gradient overflowed.
            self.scaler.update()
        self.parallel.forget_gradients(self.optimizer)
        return Update(loss, grad_norm, applied)

    def _settle(self, knobs: Knobs) -> None:
        if self.ahead:
            self.ahead.settle()
        if knobs.is_averaged:
            self.tail.include()
        else:
            self.tail.forget()  # a run that was made longer begins its tail later

    def mean_loss(self, batches: Iterable[Batch]) -> float:
        """Mean over tokens of this process's and every other's batches, without dropout."""
        # Only dropout knows the difference; compiled code would be compiled again for it.
        self.model.train(not self.model.dropout_rate)
        # (sum of losses, tokens); Apple GPUs have no float64
        total = torch.zeros(2, dtype=torch.float32 if self.device.kind == "mps" else torch.float64)
        total = total.to(self.device.torch_device)
        try:
            self.together(lambda: self._add_losses(batches, total), exchanges=False)
        finally:
            self.model.train()
        loss_sum, tokens = self.processes.average(total).tolist()
        return float(loss_sum / tokens)

    @torch.no_grad()
    def _add_losses(self, batches: Iterable[Batch], total: Tensor) -> Tensor:
        for batch in batches:
            with self.device.autocast(), self._eager_unless_compiled_for(batch):
                loss = self.forward(*batch)
            total[0] += loss * batch[1].numel()
            total[1] += batch[1].numel()
        return total

    def _eager_unless_compiled_for(self, batch: Batch) -> contextlib.AbstractContextManager[object]:
        """The smaller last batch of an evaluation would be compiled in the middle of a run, for any size and slower."""
        if self.compiled_rows in (None, batch[0].shape[0]):
            return contextlib.nullcontext()
        return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]

    def forget_gradients(self) -> None:
        """Forget a step that was given up half-way: its gradients, and optimizer state that is incomplete as memory ran out."""
        self.parallel.forget_gradients(self.optimizer)
        if self.ahead:
            self.ahead.come_back()
        for state in self.optimizer.state.values():
            if "step" in state and "exp_avg_sq" not in state:
                state.clear()


def build_engine(config: TrainConfig, shape: ModelShape, device: Device, processes: Processes = ALONE) -> Engine:
    """Model (drawn from torch's global stream, on the CPU, as nanoGPT does), optimizer, compiler, DDP."""
    if device.kind == "cpu":
        keep_freed_memory()
    model = build_model(shape, config.dropout, config.checkpoint_activations)
    model.to(device.torch_device)
    set_gradient_dtype(model, config)
    optimizer = make_optimizer(model, config, device, processes)
    problem = find_compile_problem(device) if config.compile else None
    compiled = config.compile and problem is None
    model.loss_chunk_tokens = loss_chunk_tokens(config, shape, device, bool(compiled))
    forward: Callable[[Tensor, Tensor], Tensor] = compile_model(model, device, config.fused_loss) if compiled else model
    # Where memory is the allocator's and gradients live through the peak anyway.
    keeps_gradients = device.kind == "cuda" and config.accumulation(processes.count) > 1
    parallel = make_parallel(forward, device, processes, keeps_gradients)
    scaler = torch.amp.GradScaler(device.kind, enabled=device.needs_scaler)
    ahead = LookAhead(optimizer, config.max_iters) if config.lookahead else None
    return Engine(
        config,
        device,
        processes,
        model,
        forward,
        parallel,
        optimizer,
        scaler,
        TailAverage(model),
        ahead,
        problem,
        bool(compiled),
    )


@contextlib.contextmanager
def collection_frozen() -> Iterator[None]:
    """A collection in the middle of a step costs tens of milliseconds; the loop makes no cycles to collect."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


CHUNK_TOKENS = FITTED.chunk_tokens


def loss_chunk_tokens(config: TrainConfig, shape: ModelShape, device: Device, compiled: bool) -> int:
    """Tokens per chunk, or 0 to compute all logits at once."""
    return CHUNK_TOKENS if setting_of(config, shape, place_of(device, compiled)).chunked_loss else 0
