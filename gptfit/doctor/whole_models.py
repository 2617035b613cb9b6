"""Whole models drawn at random, timed in turns as a trial times them, and a few of them beside themselves compiled.

A piece of a model, timed by itself, took up to a third longer or shorter than in one: in other memory, after other work.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from statistics import fmean, median

import torch

from gptfit.config.keys import TrainConfig
from gptfit.device.device import Device, has_bf16
from gptfit.device.out_of_memory import is_out_of_memory
from gptfit.plan import memory
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
from gptfit.train.batches import Batch
from gptfit.train.engine import Engine, build_engine, collection_frozen
from gptfit.tune.rank import FAIR_CPU_SHARE
from gptfit.tune.trial import first_update, random_batch, run_micro_step, time_micro_steps, timed_update

HEADS = (32, 64, 128)
LARGE_VOCABULARIES = (3000, 8192, 16000, 24000, 32768, 50304)
VOCABULARIES = (257, 512, 1000, *LARGE_VOCABULARIES)
POSITIONS, ROWS = (64, 128, 192, 256, 384, 512, 768, 1024), (1, 2, 3, 4, 6, 8, 12, 16, 24)
LAYERS = (1, 2, 3)  # more are as many times the same
TABLED = 0.5  # share of modern models that have tables of value embeddings
CHUNKED_EVERY = 5  # models: one with a loss in chunks
TIMED_S, UPDATES = 0.15, 2
# A micro-step is drawn anew if it would take longer, going by those before it; the first ones are as small as this.
LONGEST_S, FIRST_FLOPS, FIRST = 0.25, 2e9, 3
MOST_DRAWN = 100
MOST_LOGITS = 2**26  # of a loss that is not in chunks
MOST_MEMORY = 0.5  # of what is free
# Width and positions of models held against themselves compiled. On a CPU the first is as the check of compiled models has
# compiled it. A card must be busy with it: what compiling saves of launches alone does not grow with tokens and width.
COMPILED = {"cpu": ((256, 128), (128, 256)), "other": ((768, 1024),)}
COMPILED_LAYERS, COMPILED_ROWS, COMPILED_VOCABULARY = 4, 8, 300
LEAST = 20  # models of each format, however long they take: there are nearly as many kinds of work
TURNS, TURN_S = 9, 0.06

# By architecture: width, and seconds less per token and channel of a block.
Saved = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Drawn:
    shape: ModelShape
    rows: int
    optimizer: str
    is_chunked: bool

    @property
    def flops(self) -> float:
        return float(self.rows * self.shape.block_size * self.shape.flops_per_token)

    def setting(self, dtype: str) -> Setting:
        return Setting(
            self.shape,
            self.rows,
            dtype=dtype,
            compile=False,
            chunked_loss=self.is_chunked,
            optimizer=self.optimizer,
        )


@dataclass(frozen=True)
class Timed:
    model: Drawn
    micro_s: float
    update_s: float | None  # none: each was skipped for a number that was not finite


def drawn(random: Random) -> Iterator[Drawn]:
    """Without end. Losses are in chunks where they are more than one, and mostly of large vocabularies."""
    while True:
        is_chunked, width = random.random() < 0.5, 64 * random.randint(2, 12)
        arch = random.choice(("gpt2", "modern"))
        shape = ModelShape(
            n_layer=random.choice(LAYERS),
            n_head=random.choice([width // size for size in HEADS if width % size == 0]),
            n_embd=width,
            block_size=random.choice(POSITIONS),
            vocab_size=random.choice(LARGE_VOCABULARIES if is_chunked else VOCABULARIES),
            arch=arch,
            value_embeddings="tables" if arch == "modern" and random.random() < TABLED else "none",
        )
        rows = random.choice(ROWS)
        tokens = rows * shape.block_size
        if tokens > memory.FITTED.chunk_tokens if is_chunked else tokens * shape.vocab_size <= MOST_LOGITS:
            yield Drawn(shape, rows, random.choice(("adamw", "muon")), is_chunked)


def dtypes_of(device: Device) -> tuple[str, ...]:
    """The formats a run may have here; the one that 'auto' means first."""
    if device.kind == "cpu":  # also where bfloat16 is no faster: a plan must be able to say so
        return ("bfloat16", "float32") if has_bf16(device.torch_device) else ("float32", "bfloat16")
    return tuple(sorted({"float32", device.dtype}, key=lambda dtype: dtype != device.dtype))


def time_models(
    device: Device,
    most_s: float,
    tell: Callable[[str], None],
    least: int = LEAST,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, list[Timed]]:
    """By number format, each as much of the time as the others, in turns: a slow minute of the machine is one of all."""
    until, models = clock() + most_s, drawn(Random(0))
    found: dict[str, list[Timed]] = {dtype: [] for dtype in dtypes_of(device)}
    spent = dict.fromkeys(found, 0.0)
    while clock() < until or any(len(timed) < least for timed in found.values()):
        waiting = found if clock() < until else [dtype for dtype, timed in found.items() if len(timed) < least]
        dtype, began = min(waiting, key=lambda each: spent[each]), clock()
        here, before = replace(device, dtype=dtype), found[dtype]
        gc.collect()  # a model is full of cycles, and the next one is to find the memory of the last one free
        device.release_memory()
        before += _timed_or_none(here, _next(models, before, here))
        spent[dtype] += clock() - began
        tell(f"whole models, {sum(map(len, found.values()))} timed")
    return found


def _next(models: Iterator[Drawn], before: Sequence[Timed], device: Device) -> Drawn:
    """The first that is possible, or the least of many on a device that is too slow for any."""
    is_chunked = (len(before) + 1) % CHUNKED_EVERY == 0
    seen: list[Drawn] = []
    for model in models:
        if model.is_chunked == is_chunked:
            if _is_possible(model, before, device):
                return model
            seen.append(model)
            if len(seen) == MOST_DRAWN:
                break
    return min(seen, key=lambda model: model.flops)


def _is_possible(model: Drawn, before: Sequence[Timed], device: Device) -> bool:
    if len(before) < FIRST:
        return model.flops <= FIRST_FLOPS
    pace = median(timed.micro_s / timed.model.flops for timed in before)
    needed = memory.predict(model.setting(device.dtype)).allocated.value
    return pace * model.flops <= LONGEST_S and needed <= MOST_MEMORY * device.free_memory_bytes()


def _timed_or_none(device: Device, model: Drawn) -> list[Timed]:
    """Nothing where memory ran out: what is free was misjudged, and there are others."""
    try:
        return [_time_model(device, model)]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return []


def _time_model(device: Device, model: Drawn) -> Timed:
    engine = plain_engine(device, model.shape, model.optimizer, model.rows, is_chunked=model.is_chunked)
    batch = random_batch(engine, model.shape.vocab_size)
    updates = []
    with collection_frozen():
        first_update(engine, batch)
        samples = time_micro_steps(partial(run_micro_step, engine, batch), device, TIMED_S)
        for _ in range(UPDATES):
            engine.forget_gradients()  # what many micro-steps left would be clipped
            run_micro_step(engine, batch)
            milliseconds, is_applied = timed_update(engine)
            updates += [milliseconds / 1e3] * is_applied
    return Timed(model, _seconds(*samples, device), fmean(updates) if updates else None)


def _seconds(samples: list[float], cpu_samples: list[float], device: Device) -> float:
    """On a CPU shared with other programs its processor time, as where `tune` ranks trials."""
    is_shared = device.kind == "cpu" and sum(cpu_samples) < FAIR_CPU_SHARE * sum(samples)
    return median(cpu_samples if is_shared else samples) / 1e3


def saved_by_compiling(device: Device, tell: Callable[[str], None]) -> Saved:
    """In turns with the same model eager: what the machine does meanwhile, it does to both. An architecture that the
    compiler cannot do is not in it.
    """
    found: Saved = {}
    for width, positions in COMPILED.get(device.kind, COMPILED["other"]):
        for arch in ("gpt2", "modern"):
            tell(f"{arch} {COMPILED_LAYERS} x {width} compiled")
            shape = ModelShape(COMPILED_LAYERS, width // 64, width, positions, COMPILED_VOCABULARY, arch=arch)
            seconds = _saved_of_one(device, shape)
            if seconds is not None:
                channels = COMPILED_ROWS * positions * width * COMPILED_LAYERS
                found.setdefault(arch, []).append((float(width), seconds / channels))
            gc.collect()
            device.release_memory()
    return {arch: sorted(points) for arch, points in found.items()}


def _saved_of_one(device: Device, shape: ModelShape) -> float | None:
    """Seconds of a micro-step."""
    torch.compiler.reset()  # the second size of a model would be compiled for any size
    engines = [plain_engine(device, shape, "adamw", COMPILED_ROWS, compiled) for compiled in (False, True)]
    batch = random_batch(engines[0], shape.vocab_size)
    if engines[1].compile_now(batch, with_backward=True, with_eval=False) is not None:
        torch.compiler.set_stance("default")
        return None
    with collection_frozen():
        return median([_difference(engines, batch, device) for _ in range(TURNS + 1)][1:])


def _difference(engines: Sequence[Engine], batch: Batch, device: Device) -> float:
    """Seconds that a micro-step of the first takes more than one of the second."""
    each = []
    for engine in engines:
        samples = time_micro_steps(partial(run_micro_step, engine, batch), device, TURN_S)
        each.append(_seconds(*samples, device))
    return each[0] - each[1]


def plain_engine(
    device: Device,
    shape: ModelShape,
    optimizer: str,
    micro_batch: int = 1,
    compiled: bool = False,
    is_chunked: bool = False,
) -> Engine:
    config = TrainConfig(
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_embd=shape.n_embd,
        block_size=shape.block_size,
        batch_size=micro_batch,
        arch=shape.arch,
        value_embeddings=shape.value_embeddings,
        optimizer=optimizer,
        dtype=device.dtype,
        device=device.kind,
        compile=compiled,
        chunked_loss=is_chunked,
    )
    return build_engine(config, shape, device)
