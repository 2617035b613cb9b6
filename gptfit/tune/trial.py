"""One trial in a process of its own: `python -m gptfit.tune.trial`, a request on stdin, JSON lines on stdout."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import median, quantiles
from typing import IO, Any

import torch

from gptfit.config.keys import TrainConfig
from gptfit.device.compiler import find_compile_problem
from gptfit.device.device import Device, find_device, has_bf16
from gptfit.device.nvml import context_bytes, power_note
from gptfit.device.out_of_memory import is_out_of_memory
from gptfit.device.settling import run_settled
from gptfit.errors import GptfitError
from gptfit.plan.memory import FITTED
from gptfit.schedule import Knobs
from gptfit.train.batches import Batch
from gptfit.train.engine import Engine, build_engine, collection_frozen
from gptfit.tune.trials import Machine, Timing
from gptfit.units import GIB

FEWEST_SAMPLES = 4
# Micro-steps of many seconds each: two show whether they agree, and the time is better spent on another size.
SLOW_SECONDS = 15.0
FEWEST_SLOW_SAMPLES = 2
MOST_SAMPLES = 1000
# Time between two waits for a card: long enough that launches run ahead as they do in training.
BURST_SECONDS = 0.25
# float16's loss scale starts high and halves until an update succeeds; from 2^16 that takes at most this many.
SCALE_SEARCH = 20

QUICK_UPDATES, QUICK_MS = 3, 500.0

Tell = Callable[..., None]


def main() -> int:
    return serve(answer)


def serve(answer: Callable[[dict[str, Any], Tell], None]) -> int:
    """Read one request, let `answer` tell its events, and say how it went where it cannot."""
    answers = _own_stdout()

    def tell(event: str, **values: Any) -> None:
        answers.write(json.dumps({"event": event, **values}) + "\n")
        answers.flush()

    requests = _own_stdin()
    request = json.loads(requests.readline())
    threading.Thread(target=_end_with_parent, args=(requests,), daemon=True).start()
    try:
        answer(request, tell)
    except GptfitError as error:
        tell("error", message=str(error))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        tell("oom")
    return 0


def answer(request: dict[str, Any], tell: Tell) -> None:
    """Either what this machine is, or one measurement."""
    config = TrainConfig(**request["config"])
    if request["threads"]:
        torch.set_num_threads(request["threads"])
    device = find_device(config)
    if request["purpose"] == "machine":
        tell("machine", **asdict(_machine(config, device, _context(device, request))))
        return
    if request["limit_bytes"]:
        device.limit_memory(request["limit_bytes"])
    tell("stage", name="building")
    engine = build_engine(config, config.shape(request["vocab_size"]), device)
    tell("stage", name="compiling" if engine.compiled else "warming up")
    with collection_frozen():
        timing = measure(engine, request, tell)
    tell("done", **asdict(timing))


def measure(engine: Engine, request: dict[str, Any], tell: Tell) -> Timing:
    """Compile, warm up, time micro-steps as training does them, then one update and one eval of this size."""
    device = engine.device
    batch = random_batch(engine, request["vocab_size"])
    if engine.compiled:
        engine.compile_now(batch, with_backward=True, with_eval=request["has_eval"])
        engine.forget_gradients()
    first_update(engine, batch)
    device.synchronize()
    device.reset_peak_memory()
    tell("stage", name="timing")
    samples, cpu_samples = time_micro_steps(lambda: run_micro_step(engine, batch), device, request["timed_s"])
    update_ms = _update_ms(engine, batch, median(samples))
    eval_ms = None
    if request["has_eval"]:
        tell("stage", name="evaluating")
        engine.mean_loss([batch])  # compiles
        eval_ms = _ms(lambda: engine.mean_loss([batch]), device)
    low, _, high = quantiles(samples, n=4, method="inclusive")
    allocated, reserved = device.peak_memory_bytes(), device.peak_reserved_bytes()
    device_bytes = device.peak_device_bytes(_context(device, request))
    # After the memory was read: an unknown card's peak rate is measured with large matrices.
    peak_tflops, peak_basis = device.peak_rate() if request["has_eval"] else (None, "")
    return Timing(
        device=device.name,
        chunked_loss=bool(engine.model.loss_chunk_tokens),
        compiled=engine.compiled,
        ms_per_micro_step=median(samples),
        ms_low=low,
        ms_high=high,
        samples=len(samples),
        ms_per_update=update_ms,
        ms_per_eval=eval_ms,
        allocated_gib=allocated / GIB if device.kind == "cuda" else None,
        reserved_gib=reserved / GIB if reserved is not None else None,
        device_gib=device_bytes / GIB,
        peak_tflops=peak_tflops,
        peak_basis=peak_basis,
        cpu_ms=median(cpu_samples) if device.kind == "cpu" else None,
        cpu_share=sum(cpu_samples) / sum(samples) if device.kind == "cpu" else None,
    )


def time_micro_steps(micro_step: Callable[[], None], device: Device, timed_s: float) -> tuple[list[float], list[float]]:
    """Milliseconds per micro-step, one value per burst: elapsed, and processor time of this thread."""
    first_ms = 1e3 * run_settled(lambda: _ms(micro_step, device) / 1e3, timed_s)  # the gradients exist from here on
    burst = 1 if device.kind == "cpu" else max(1, min(50, round(BURST_SECONDS * 1e3 / first_ms)))
    samples: list[float] = []
    cpu_samples: list[float] = []
    began = time.perf_counter()
    while not _is_enough(len(samples), time.perf_counter() - began, timed_s):
        began_cpu = time.thread_time()
        samples.append(_ms(lambda: _repeat(micro_step, burst), device) / burst)
        cpu_samples.append((time.thread_time() - began_cpu) * 1e3 / burst)
    return samples, cpu_samples


def _is_enough(samples: int, elapsed_s: float, timed_s: float) -> bool:
    if elapsed_s < timed_s:
        return samples >= MOST_SAMPLES
    return samples >= (FEWEST_SAMPLES if elapsed_s < SLOW_SECONDS else FEWEST_SLOW_SAMPLES)


def _repeat(action: Callable[[], None], times: int) -> None:
    for _ in range(times):
        action()


def run_micro_step(engine: Engine, batch: Batch) -> None:
    loss = engine.forward_micro_step(batch, is_last=False)
    engine.backward_micro_step(loss, engine.config.accumulation())


def first_update(engine: Engine, batch: Batch) -> None:
    """It makes the optimizer's state, so that memory is complete when the timing begins; float16 finds its scale."""
    for _ in range(SCALE_SEARCH):
        run_micro_step(engine, batch)
        if timed_update(engine)[1]:
            break


def _update_ms(engine: Engine, batch: Batch, micro_ms: float) -> float:
    """The median of three, or one where micro-steps are slow; each after a micro-step of its own.

    What the timed ones left would be clipped, and so much overflows float16, whose update would then be skipped.
    """
    updates: list[float] = []
    while len(updates) < (QUICK_UPDATES if micro_ms < QUICK_MS else 1):
        engine.forget_gradients()
        run_micro_step(engine, batch)
        updates.append(timed_update(engine)[0])
    return median(updates)


def timed_update(engine: Engine) -> tuple[float, bool]:
    """(milliseconds, whether the weights moved)."""
    engine.device.synchronize()
    began = time.perf_counter()
    loss = torch.zeros((), device=engine.device.torch_device)
    update = engine.update(loss, 1, Knobs(engine.config.min_lr))
    engine.device.synchronize()
    return (time.perf_counter() - began) * 1e3, update.applied


def _ms(action: Callable[[], object], device: Device) -> float:
    began = time.perf_counter()
    action()
    device.synchronize()
    return (time.perf_counter() - began) * 1e3


def random_batch(engine: Engine, vocab_size: int) -> Batch:
    """Speed does not depend on which tokens they are, as long as they are spread over the embedding."""
    config, device = engine.config, engine.device
    generator = torch.Generator().manual_seed(config.seed)
    ids = torch.randint(vocab_size, (config.batch_size, config.block_size + 1), generator=generator)
    return device.put(ids[:, :-1].contiguous()), device.put(ids[:, 1:].contiguous())


def _machine(config: TrainConfig, device: Device, context: int) -> Machine:
    return Machine(
        device=device.name,
        kind=device.kind,
        dtype=device.dtype,
        has_bf16=has_bf16(device.torch_device),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        total_bytes=device.total_memory_bytes(),
        free_bytes=device.free_memory_bytes() + context,  # a trial has a context of its own in place of this one's
        gpu=device.gpu.name if device.gpu else None,
        compile_problem=find_compile_problem(device) if config.compile else None,
        notes=(*device.notes, *filter(None, [power_note(device)])),
    )


def _context(device: Device, request: dict[str, Any]) -> int:
    return context_bytes(device, request["used_bytes"], int(FITTED.context_bytes))


def _own_stdout() -> IO[str]:
    """The answer channel; whatever a compiler or library prints goes to stderr instead."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _own_stdin() -> IO[str]:
    """The request's channel, not inherited by programs started from here: on Windows they would wait for it."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return requests


def _end_with_parent(requests: IO[str]) -> None:
    """The parent holds the other end of the channel as long as it wants an answer."""
    requests.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
