"""Engine: a model on its device with its optimizer, able to do micro-steps, updates and evaluations."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gptfit.config.keys import TrainConfig
from gptfit.device.allocator import keep_freed_memory
from gptfit.device.compiler import compile_model, find_compile_problem, first_line
from gptfit.device.device import Device
from gptfit.device.out_of_memory import is_out_of_memory
from gptfit.device.processes import ALONE, Processes
from gptfit.model.base import LanguageModel
from gptfit.model.build import build_model
from gptfit.plan.memory import FITTED
from gptfit.plan.resolve import setting_of
from gptfit.schedule import Knobs
from gptfit.shape import ModelShape
from gptfit.train.batches import Batch, counted_share
from gptfit.train.fast_products import FastProducts, make_fast_products
from gptfit.train.kept_state import KeptStateOptimizer
from gptfit.train.lookahead import LookAhead
from gptfit.train.muon import Muon
from gptfit.train.optimizers import AdamW, make_optimizer, set_gradient_dtype, turn
from gptfit.train.parallel import Alone, Forward, MemoryRanOut, Passes, Replicated
from gptfit.train.parts import Part, entries, own_state, whole_state
from gptfit.train.place import place_of
from gptfit.train.tail_average import TailAverage

T = TypeVar("T")
TIMED_MICRO_STEPS = 4  # of which the fastest counts


@dataclass(frozen=True)
class Update:
    """What one optimizer step saw. `applied` is False when a number was not finite and the weights were left alone.

    `is_empty`: no token of it counted, so there was nothing to learn.
    """

    loss: float
    grad_norm: float
    applied: bool
    is_empty: bool = False


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
    products: FastProducts
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
                self.together(lambda: self.whole_micro_step(batch), Passes(updates=1))
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

    def leave_fast_products(self) -> Device:
        """Back to bfloat16; the device as it is used from now on."""
        self.device = self.products.give_up()
        self.scaler = make_scaler(self.device)
        self._compile_anew()
        self.parallel.renew(self.forward)
        return self.device

    def move_state_to_host(self) -> bool:
        """Keep optimizer state in host memory from now on; whether that is a change."""
        if self.device.kind == "cpu" or self.optimizer_is_on_host or self.ahead:
            return False
        self._renew_optimizer(optimizer_device="cpu")
        return True

    def move_tables_to_host(self) -> bool:
        """Keep embeddings and head, with their gradients and state, in host memory from now on; whether that is a change."""
        if self.device.kind == "cpu" or self.model.tables_on_host or not self.processes.is_alone:
            return False
        if self.ahead or self.tail.weights:  # whose copies would stay behind
            return False
        self.model.keep_tables_on_host(self.device.pinned)
        self._renew_optimizer(optimizer_device="cpu" if self.optimizer_is_on_host else "auto")
        self._compile_anew()
        return True

    def _renew_optimizer(self, **changes: str) -> None:
        """Its state goes where the weights and the config are now."""
        saved, config = self.optimizer.state_dict(), self.config.replace(**changes)
        self.optimizer = make_optimizer(self.model, config, self.device, self.processes, self.parallel.parameters)
        self.optimizer.load_state_dict(saved)

    @property
    def optimizer_is_on_host(self) -> bool:
        return isinstance(self.optimizer, KeptStateOptimizer) and self.optimizer.is_on_host

    def _compile_anew(self) -> None:
        if self.compiled:
            torch.compiler.reset()
            self.forward = compile_model(self.model, self.device, self.config.fused_loss, self.parallel.is_sharded)

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
        if knobs.is_averaged:
            self.tail.make_room()
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

    def together(self, action: Callable[[], T], passes: Passes) -> T:
        """Do this process's part of what all do; where memory runs out for one, all raise `MemoryRanOut` at the end.

        `passes`: how much of the model's work is in it, which the others may need this process for.
        """
        if self.processes.is_alone:
            return action()
        self.parallel.begin(passes)
        result: T | None = None
        try:
            result = action()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        if result is None:  # outside the except block: the error holds the frames, and the frames hold the memory
            gc.collect()
            self.device.release_memory()
            self.parallel.give_up()
        if self.processes.any_of([result is None], self.device)[0]:
            raise MemoryRanOut("out of memory in one of the processes")
        assert result is not None
        return result

    def ready_optimizer(self) -> None:
        """Its state exists before all agree that memory suffices; an update itself then needs none."""
        self.parallel.hand_over_gradients()
        if not self.processes.is_alone and not self.is_optimizer_ready:
            with torch.no_grad():
                self.optimizer.make_state()
            self.is_optimizer_ready = True

    def update(self, loss_sum: Tensor, micro_steps: float, knobs: Knobs, counted: Tensor | None = None) -> Update:
        """Clip, step, forget the gradients. The only wait for the device in a training step is in here.

        `counted`: the sum of the micro-steps' shares of tokens that count, where not all do.
        """
        self.scaler.unscale_(self.optimizer)
        self.parallel.agree_on_overflow(self.scaler, self.optimizer)
        share = None if counted is None else self.processes.average(counted / micro_steps)
        if share is not None:
            # From gradients of the mean over all tokens to those of the mean over the ones that count; none where none does.
            self.parallel.scale_gradients(torch.where(share > 0, 1 / share, 0.0))
        try:
            norm = self.parallel.total_norm(self._total_norm(self.parallel.gradients()))
            mean_loss = self.processes.average(loss_sum / micro_steps)
            mean_loss = mean_loss if share is None else mean_loss / share
            loss, grad_norm = torch.stack([mean_loss.float(), norm.float().to(mean_loss.device)]).tolist()
            applied = math.isfinite(loss) and math.isfinite(grad_norm)
            if applied:
                if self.config.grad_clip and grad_norm > self.config.grad_clip:
                    self.parallel.clip_gradients(self.config.grad_clip, norm)
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
        return Update(loss, grad_norm, applied, share is not None and not float(share))

    def _total_norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """A CPU reads a table of hundreds of MB a third faster row by row; a card would only wait for more launches."""
        if self.device.kind == "cpu":
            gradients = (torch.linalg.vector_norm(g, dim=1) if g.dim() == 2 else g for g in gradients)
        return nn.utils.get_total_norm(list(gradients))

    def _settle(self, knobs: Knobs) -> None:
        if self.ahead:
            self.ahead.settle()
        if knobs.is_averaged:
            self.tail.include()
        else:
            self.tail.forget()  # a run that was made longer begins its tail later

    def mean_loss(self, batches: Iterable[Batch | None], count: int = 1) -> float:
        """Mean over tokens of this process's and every other's batches, without dropout; `count` of them."""
        return self.loss_and_tokens(batches, count)[0]

    def loss_and_tokens(self, batches: Iterable[Batch | None], count: int = 1) -> tuple[float, int]:
        """The mean, and over how many tokens. A batch that is None: another process has one more, which a divided model
        must be whole for.
        """
        # Only dropout knows the difference; compiled code would be compiled again for it.
        self.model.train(not self.model.dropout_rate)
        # (sum of losses, tokens); Apple GPUs have no float64
        total = torch.zeros(2, dtype=torch.float32 if self.device.kind == "mps" else torch.float64)
        total = total.to(self.device.torch_device)
        try:
            self.together(lambda: self._add_losses(batches, total), Passes(evaluations=count))
        finally:
            self.model.train()
        loss_sum, tokens = self.processes.average(total).tolist()
        return loss_sum / tokens if tokens else math.nan, round(tokens * self.processes.count)

    @torch.no_grad()
    def _add_losses(self, batches: Iterable[Batch | None], total: Tensor) -> Tensor:
        latest: Batch | None = None
        for batch in batches:
            latest = latest if batch is None else batch
            assert latest is not None
            with self.device.autocast(), self._eager_unless_compiled_for(latest):
                loss = self.parallel.evaluate(*latest)
            if batch is not None:
                total[0] += loss * batch[1].numel()
                total[1] += (counted_share(batch) if self.model.loss_is_masked else 1) * batch[1].numel()
        return total

    def _eager_unless_compiled_for(self, batch: Batch) -> contextlib.AbstractContextManager[object]:
        """The smaller last batch of an evaluation would be compiled in the middle of a run, for any size and slower."""
        return contextlib.nullcontext() if self.compiled_rows in (None, batch[0].shape[0]) else self.eagerly()

    def eagerly(self) -> contextlib.AbstractContextManager[object]:
        """For what has shapes of its own, each of which would be compiled."""
        return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]

    def saved_weights(self) -> dict[str, Tensor]:
        """Whole, as a checkpoint has them. With several processes all must call this, and the first has the result."""
        return self.parallel.whole_weights(self.model)

    def saved_average(self) -> dict[str, Tensor]:
        return self.parallel.whole(self.tail.weights)

    def divided_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint in parts has of weights, optimizer state and average."""
        parameters = self.parallel.parameters
        members = {p: name for name, p in parameters.items()}
        names = [members[p] for group in self.optimizer.param_groups for p in group["params"]]
        state = {
            f"optimizer.{number}.{name}": (names[number], value)
            for number, name, value in entries(self.optimizer.state_dict())
            if _is_large(value)
        }
        weights = {f"model.{name}": (name, p.detach()) for name, p in parameters.items()}
        average = {f"average.{name}": (name, tensor) for name, tensor in self.tail.weights.items()}
        return {key: self.parallel.divided(*of) for key, of in {**weights, **state, **average}.items()}

    def saved_optimizer(self) -> dict[str, Any]:
        saved = self.optimizer.state_dict()
        members = [p for group in self.optimizer.param_groups for p in group["params"]]
        return whole_state(saved, members, self.processes) if self.parallel.is_sharded else saved

    def plain_state(self) -> dict[str, Any]:
        """The optimizer's state without its tensors, but for single numbers."""
        saved = self.optimizer.state_dict()
        state = {
            number: {name: value for name, value in entry.items() if not _is_large(value)}
            for number, entry in saved["state"].items()
        }
        return {**saved, "state": state}

    def is_too_large_to_gather(self, most_bytes: int) -> bool:
        """Whether weights and optimizer state, divided as they are, are more than one process should hold."""
        if not self.parallel.is_sharded:
            return False
        kept = [value for entry in self.optimizer.state_dict()["state"].values() for value in entry.values()]
        own = sum(one.nbytes for one in (*self.parallel.parameters.values(), *filter(_is_large, kept)))
        return bool(sum(self.processes.gather(own)) > most_bytes)

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        """As `saved_optimizer` gave it, of any number of processes."""
        plain = {**saved, "state": {number: dict(entry) for number, entry in saved["state"].items()}}
        self.optimizer.load_state_dict(own_state(saved, self.processes) if self.parallel.is_sharded else plain)

    def forget_gradients(self) -> None:
        """Forget a step that was given up half-way: its gradients, and optimizer state that is incomplete as memory ran out."""
        self.parallel.forget_gradients(self.optimizer)
        if self.ahead:
            self.ahead.come_back()
        for state in self.optimizer.state.values():
            if "step" in state and "exp_avg_sq" not in state:
                state.clear()


def build_engine(config: TrainConfig, shape: ModelShape, device: Device, processes: Processes = ALONE) -> Engine:
    """Model (drawn from torch's global stream, on the CPU, as nanoGPT does), optimizer, compiler, DDP or FSDP."""
    if device.kind == "cpu":
        keep_freed_memory()
    is_sharded = config.parallel == "fsdp" and not processes.is_alone
    model = build_model(shape, config.dropout, config.checkpoint_activations)
    parameters: Mapping[str, nn.Parameter]
    if is_sharded:
        from gptfit.train.sharded import shard  # FSDP takes a second to import

        parameters = shard(model, device, processes)
    else:
        parameters = dict(model.to(device.torch_device).named_parameters())
    if config.embedding_device == "cpu":
        model.keep_tables_on_host(device.pinned)
    model.stream_dtype = torch.bfloat16 if config.residual_dtype == "bfloat16" else None
    products = make_fast_products(config.matmul, model, device)
    set_gradient_dtype(model, config)
    optimizer = make_optimizer(model, config, device, processes, parameters)
    problem = find_compile_problem(device) if config.compile else None
    compiled = config.compile and problem is None
    setting = setting_of(config, shape, place_of(device, bool(compiled)), processes.count)
    model.loss_chunk_tokens = CHUNK_TOKENS if setting.chunked_loss else 0
    forward: Forward = compile_model(model, device, config.fused_loss, is_sharded) if compiled else model
    parallel = make_parallel(forward, model, parameters, device, processes)
    # Where memory is the allocator's and gradients live through the peak anyway.
    parallel.keeps_gradients = processes.is_alone and device.kind == "cuda" and config.accumulation(1) > 1
    if processes.is_alone and device.kind == "cpu":  # a card's compiled graph has the look-ups in it
        parallel.keep_gradients_of(table for table in model.tables() if table.weight is not model.lm_head.weight)
    if processes.any_of([not setting.sums_late], device)[0]:
        parallel.sum_in_every_micro_step()
    ahead = LookAhead(optimizer, config.max_iters) if config.lookahead else None
    return Engine(
        config,
        device,
        processes,
        model,
        forward,
        parallel,
        optimizer,
        make_scaler(device),
        products,
        TailAverage(parameters, processes),
        ahead,
        problem,
        bool(compiled),
    )


def make_parallel(
    forward: Forward,
    model: LanguageModel,
    parameters: Mapping[str, nn.Parameter],
    device: Device,
    processes: Processes,
) -> Alone:
    if processes.is_alone:
        return Alone(forward, parameters)
    if parts := {name: parameter for name, parameter in parameters.items() if isinstance(parameter, Part)}:
        from gptfit.train.sharded import Sharded

        return Sharded(forward, model, parts, device, processes)
    return Replicated(forward, parameters, device, processes)


def make_scaler(device: Device) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(device.kind, enabled=device.needs_scaler)


@contextlib.contextmanager
def collection_frozen() -> Iterator[None]:
    """A collection in the middle of a step costs tens of milliseconds; the loop makes no cycles to collect.

    A program that has frozen its own objects keeps them so.
    """
    gc.collect()
    if not _program_has_frozen():
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not _program_has_frozen():
            gc.unfreeze()


@functools.cache
def _program_has_frozen() -> bool:
    """Before our first run; counting them walks over all objects, which is not done for every run."""
    return gc.get_freeze_count() > 0


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


CHUNK_TOKENS = FITTED.chunk_tokens
