"""Whole models: timed alone as a trial times them, they tell what their pieces do not add up to.

A piece is timed in a heap full of other pieces, a model in one of its own: narrow blocks took a sixth longer as pieces.
"""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import torch

from gptfit.config.keys import TrainConfig
from gptfit.device.compiler import find_compile_problem
from gptfit.device.device import Device, find_device, has_bf16
from gptfit.plan.calibration import Calibration, micro_seconds, step_parts
from gptfit.plan.grid import Grid
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
from gptfit.train.batches import Batch
from gptfit.train.engine import Engine, build_engine, collection_frozen
from gptfit.tune.rank import FAIR_CPU_SHARE
from gptfit.tune.trial import random_batch, run_micro_step, time_micro_steps

# The micro-batch of each; widths, tokens and vocabularies spread as those of the models that are planned by them.
WHOLE = (
    (ModelShape(8, 2, 128, 96, 300), 2),
    (ModelShape(6, 3, 192, 96, 300, arch="modern"), 1),
    (ModelShape(5, 5, 320, 160, 700), 2),
    (ModelShape(4, 7, 448, 96, 2000, arch="modern"), 2),
    (ModelShape(2, 2, 128, 320, 40000), 1),
    (ModelShape(3, 3, 192, 320, 6000, arch="modern"), 4),
    (ModelShape(6, 2, 128, 320, 300), 4),
    (ModelShape(2, 12, 768, 96, 300, arch="modern"), 1),
    (ModelShape(3, 6, 384, 160, 12000, arch="modern"), 1),
    (ModelShape(4, 4, 256, 320, 700), 4),
    (ModelShape(2, 10, 640, 160, 20000), 1),
    (ModelShape(3, 8, 512, 192, 500, arch="modern"), 3),
    (ModelShape(1, 11, 704, 384, 300), 2),
    (ModelShape(5, 4, 128, 512, 6000, arch="modern"), 4),
)
# Held against themselves compiled, in the format that is trained in, with blocks as the check of compiled models has compiled
# them: a new size takes the compiler up to 20 seconds.
_COMPILED = ModelShape(4, 4, 256, 128, 300)
COMPILED = ((_COMPILED, 8), (replace(_COMPILED, arch="modern"), 8))
TIMED_S = 0.2
TURNS, TURN_S = 9, 0.06
LONGEST_S = 1.2  # a micro-step; a format without units of its own may be a hundred times slower
FORMAT_S, AGAIN_S = 18.0, 10.0  # of one format, and when they are timed again
AGAIN_EVERY = 2  # then only every second one: the time is better spent on more rounds of the pieces

# Standard deviations. A model's own time; of the pieces' sum: for all blocks, for blocks of twice the width or twice the
# tokens, and of the loss beside the blocks: where the models that are quick enough have little of it, what they leave
# unexplained must not become its cost. And of the seconds that every micro-step takes besides. (Tried: a scale of the tables
# that are looked up; it stayed at one.)
WHOLE_ERROR, BLOCKS_ERROR, WIDTH_ERROR, TOKENS_ERROR, HEAD_ERROR = 0.04, 0.15, 0.05, 0.03, 0.2
FIXED_ERROR_S = 5e-4
MIDDLE_WIDTH, MIDDLE_TOKENS = 256, 512
STRANGE = 2.0  # standard deviations from which on a model's time counts less: others used the machine meanwhile
FITS = 5
MOST_SCALE = 2.0

Timings = dict[str, list[tuple[int, float]]]  # by number format: places in WHOLE, seconds of a micro-step
# By architecture: tokens times width, and seconds less per token and channel of a block.
Saved = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Pass:
    """Every model once."""

    times: Timings
    saved: Saved = field(default_factory=dict)  # by compiling


def time_whole_models(config: TrainConfig, is_first: bool, compiled: bool, tell: Callable[[str], None]) -> Pass:
    """One after another, nothing else in memory, the least first, until one or all of a format take too long.

    `compiled`: some of them compiled, too.
    """
    device = find_device(config)
    times: Timings = {}
    most_s = FORMAT_S if is_first else AGAIN_S
    for dtype in dtypes_of(device):
        tell(f"whole models {dtype}")
        began, times[dtype] = time.monotonic(), []
        for number in sorted(range(0, len(WHOLE), 1 if is_first else AGAIN_EVERY), key=_work):
            seconds = _micro_step_seconds(replace(device, dtype=dtype), *WHOLE[number])
            times[dtype].append((number, seconds))
            if seconds > LONGEST_S or time.monotonic() - began > most_s:
                break
    if not compiled or find_compile_problem(device) is not None:
        return Pass(times)
    tell(f"compiled models {device.dtype}")
    return Pass(times, _saved_by_compiling(device))


def _saved_by_compiling(device: Device) -> Saved:
    """In turns with the same model eager: what the machine does meanwhile, it does to both."""
    found: Saved = {}
    for shape, rows in COMPILED:
        engines = [plain_engine(device, shape, "adamw", rows, compiled) for compiled in (False, True)]
        batch = random_batch(engines[0], shape.vocab_size)
        engines[1].compile_now(batch, with_backward=True, with_eval=False)
        with collection_frozen():
            differences = [_difference(engines, batch, device) for _ in range(TURNS + 1)][1:]
        channels = rows * shape.block_size * shape.n_embd
        found.setdefault(shape.arch, []).append((channels, median(differences) / (channels * shape.n_layer)))
        engines.clear()
        gc.collect()
    return found


def _difference(engines: Sequence[Engine], batch: Batch, device: Device) -> float:
    """Seconds that a micro-step of the first takes more than one of the second."""
    each = []
    for engine in engines:
        samples, cpu_samples = time_micro_steps(partial(run_micro_step, engine, batch), device, TURN_S)
        each.append(_seconds(samples, cpu_samples, device))
    return each[0] - each[1]


def dtypes_of(device: Device) -> tuple[str, ...]:
    """The formats a run may have here; the one that 'auto' means first, while nothing else is in memory."""
    if device.kind == "cpu":  # also where bfloat16 is no faster: a plan must be able to say so
        return ("bfloat16", "float32") if has_bf16(device.torch_device) else ("float32", "bfloat16")
    return tuple(sorted({"float32", device.dtype}, key=lambda dtype: dtype != device.dtype))


def _work(number: int) -> float:
    shape, rows = WHOLE[number]
    return rows * shape.block_size * shape.flops_per_token


def _micro_step_seconds(device: Device, shape: ModelShape, rows: int) -> float:
    gc.collect()  # a model is full of cycles, and this one is to find the memory of the last one free
    engine = plain_engine(device, shape, "adamw", rows)
    batch = random_batch(engine, shape.vocab_size)
    with collection_frozen():
        run_micro_step(engine, batch)  # a first one loads kernels
        samples, cpu_samples = time_micro_steps(lambda: run_micro_step(engine, batch), device, TIMED_S)
    return _seconds(samples, cpu_samples, device)


def _seconds(samples: list[float], cpu_samples: list[float], device: Device) -> float:
    """On a CPU shared with other programs its processor time, as of pieces."""
    is_shared = device.kind == "cpu" and sum(cpu_samples) < FAIR_CPU_SHARE * sum(samples)
    return median(cpu_samples if is_shared else samples) / 1e3


def plain_engine(
    device: Device, shape: ModelShape, optimizer: str, micro_batch: int = 1, compiled: bool = False
) -> Engine:
    """A model to be timed whole, its loss not in chunks."""
    config = TrainConfig(
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_embd=shape.n_embd,
        block_size=shape.block_size,
        batch_size=micro_batch,
        arch=shape.arch,
        optimizer=optimizer,
        dtype=device.dtype,
        device=device.kind,
        compile=compiled,
        chunked_loss=False,
    )
    return build_engine(config, shape, device)


def whole_setting(number: int, dtype: str) -> Setting:
    shape, rows = WHOLE[number]
    return Setting(shape, rows, dtype=dtype, compile=False)


def settled(found: Calibration, passes: Sequence[Pass]) -> Calibration:
    """With blocks and loss scaled so that whole models take what they took, in every pass."""
    every = [each.times for each in passes]
    for dtype in dict.fromkeys(dtype for times in every for dtype in times):
        whole = [(whole_setting(number, dtype), seconds) for times in every for number, seconds in times.get(dtype, ())]
        scales = scales_of(whole, found)
        found = replace(found, grids={name: _scaled(name, grid, dtype, scales) for name, grid in found.grids.items()})
        if dtype == found.dtype:
            found = replace(found, micro_step_s=scales.fixed_s)
    return found


@dataclass(frozen=True)
class Scales:
    """What the costs of pieces are multiplied with."""

    blocks: float = 1.0
    per_doubled_width: float = 0.0  # added to it
    per_doubled_tokens: float = 0.0
    head: float = 1.0
    fixed_s: float = 0.0  # of every micro-step besides
    widths: tuple[float, ...] = (MIDDLE_WIDTH,)  # of the models that told it; beyond them it stays as at their edge
    tokens: tuple[float, ...] = (MIDDLE_TOKENS,)

    def of_blocks(self, tokens: float, width: float) -> float:
        width, tokens = _within(width, self.widths), _within(tokens, self.tokens)
        more = self.per_doubled_width * math.log2(width / MIDDLE_WIDTH)
        more += self.per_doubled_tokens * math.log2(tokens / MIDDLE_TOKENS)
        return _bounded(self.blocks + more)


def _within(size: float, sizes: Sequence[float]) -> float:
    return min(max(size, min(sizes)), max(sizes))


def _bounded(scale: float) -> float:
    return min(max(scale, 1 / MOST_SCALE), MOST_SCALE)


def _scaled(name: str, grid: Grid, dtype: str, scales: Scales) -> Grid:
    kind, *ways = name.split()
    if dtype not in ways or kind not in ("blocks", "attention", "head"):
        return grid
    if kind == "blocks":
        return grid.times(scales.of_blocks)
    return grid.times(lambda *_: _bounded(scales.head if kind == "head" else scales.blocks))


def scales_of(whole: Sequence[tuple[Setting, float]], found: Calibration) -> Scales:
    """The likeliest, when a model's relative error and every scale's distance from one are as large as is said above."""
    if not whole:
        return Scales()
    times = Counter(setting for setting, _ in whole)  # what the pieces miss of a model, they miss in every pass
    errors = torch.tensor([WHOLE_ERROR * math.sqrt(times[setting]) for setting, _ in whole]).double()
    rows, missing = map(torch.tensor, zip(*(_equation(*one, found) for one in whole), strict=True))
    rows, missing = rows.double() / errors[:, None], missing.double() / errors
    deviations = torch.tensor([BLOCKS_ERROR, WIDTH_ERROR, TOKENS_ERROR, HEAD_ERROR, FIXED_ERROR_S]).double()
    prior = torch.diag(1 / deviations)
    prior[3, 0] = -prior[3, 3]  # the loss beside the blocks
    weights = torch.ones_like(missing)
    for _ in range(FITS):
        a = torch.cat([rows * weights[:, None], prior])
        b = torch.cat([missing * weights, torch.zeros(len(prior)).double()])
        more = torch.linalg.lstsq(a, b[:, None]).solution[:, 0].tolist()
        left = missing - rows @ torch.tensor(more).double()
        weights = (STRANGE / left.abs().clamp(min=STRANGE)).sqrt()
    widths, lengths = ({float(size(s)) for s, _ in whole} for size in (_width, _tokens))
    each = (1 + more[0], more[1], more[2], 1 + more[3], max(0.0, more[4]))
    return Scales(*each, tuple(sorted(widths)), tuple(sorted(lengths)))


def _width(setting: Setting) -> int:
    return setting.shape.n_embd


def _tokens(setting: Setting) -> int:
    return setting.micro_tokens


def _equation(setting: Setting, seconds: float, found: Calibration) -> tuple[list[float], float]:
    """How much each scale, and a fixed second, add to the pieces' sum, and what is missing, as shares of what it took."""
    parts = step_parts(setting, found)
    blocks, attention, head = (parts[name] / seconds for name in ("blocks", "attention", "head and loss"))
    wide, long = math.log2(_width(setting) / MIDDLE_WIDTH), math.log2(_tokens(setting) / MIDDLE_TOKENS)
    shares = [blocks + attention, blocks * wide, blocks * long, head, 1 / seconds]
    return shares, 1 - micro_seconds(setting, found) / seconds
