"""Whole models: timed alone as a trial times them, they tell what their pieces do not add up to.

A piece is timed in a heap full of other pieces, a model in one of its own: narrow blocks took a sixth longer as pieces.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from gptfit.config.keys import TrainConfig
from gptfit.device.allocator import keep_freed_memory
from gptfit.device.device import Device, find_device
from gptfit.doctor.pieces import dtypes_of, plain_engine
from gptfit.plan.calibration import PER_UPDATE, Calibration, step_parts
from gptfit.plan.grid import Grid
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
from gptfit.train.engine import collection_frozen
from gptfit.tune.trial import run_micro_step, time_micro_steps

# The micro-batch of each; widths, tokens and vocabularies spread as those of the models that are planned by them.
WHOLE = (
    (ModelShape(3, 2, 128, 96, 300), 2),
    (ModelShape(2, 3, 192, 96, 300, arch="modern"), 1),
    (ModelShape(2, 4, 256, 64, 1200), 1),
    (ModelShape(6, 5, 320, 160, 700), 3),
    (ModelShape(4, 7, 448, 96, 2000, arch="modern"), 5),
    (ModelShape(2, 2, 128, 320, 40000), 1),
    (ModelShape(3, 8, 512, 128, 400), 1),
    (ModelShape(3, 3, 192, 320, 6000, arch="modern"), 6),
    (ModelShape(10, 2, 128, 320, 300), 4),
    (ModelShape(2, 12, 768, 96, 300, arch="modern"), 2),
    (ModelShape(3, 6, 384, 160, 12000, arch="modern"), 2),
    (ModelShape(4, 4, 256, 320, 700), 6),
    (ModelShape(2, 10, 640, 160, 20000), 2),
    (ModelShape(5, 4, 128, 512, 6000, arch="modern"), 6),
)
TIMED_S = 0.25
LONGEST_S = 1.2  # a micro-step; a format without units of its own may be a hundred times slower
SELDOM = 2  # of a format that hardly anyone trains in here, every second model

# Standard deviations. A model's own time; of the pieces' sum: for all blocks, for blocks of twice the width or twice the
# tokens, and of the loss beside the blocks: where the models that are quick enough have little of it, what they leave
# unexplained must not become its cost.
WHOLE_ERROR, BLOCKS_ERROR, WIDTH_ERROR, TOKENS_ERROR, HEAD_ERROR = 0.04, 0.15, 0.08, 0.05, 0.2
MIDDLE_WIDTH, MIDDLE_TOKENS = 256, 512
STRANGE = 2.0  # standard deviations from which on a model's time counts less: others used the machine meanwhile
FITS = 5
MOST_SCALE = 2.0

Timings = dict[str, list[tuple[int, float]]]  # by number format: places in WHOLE, seconds of a micro-step


def time_whole_models(config: TrainConfig, tell: Callable[[str], None]) -> Timings:
    """One after another, nothing else in memory, until one takes too long; the usual format first."""
    device = find_device(config)
    if device.kind == "cpu":
        keep_freed_memory()
    found: Timings = {}
    for dtype in dtypes_of(device):
        tell(f"whole models {dtype}")
        numbers = range(len(WHOLE)) if dtype == device.dtype else range(0, len(WHOLE), SELDOM)
        found[dtype] = []
        for number in sorted(numbers, key=_work):
            seconds = _micro_step_seconds(replace(device, dtype=dtype), *WHOLE[number])
            gc.collect()  # a model is full of cycles, and the next one is to find its memory free
            found[dtype].append((number, seconds))
            if seconds > LONGEST_S:
                break
    return found


def _work(number: int) -> float:
    shape, rows = WHOLE[number]
    return rows * shape.block_size * shape.flops_per_token


def _micro_step_seconds(device: Device, shape: ModelShape, rows: int) -> float:
    engine = plain_engine(device, shape, "adamw", rows)
    ids = torch.randint(shape.vocab_size, (2, rows, shape.block_size), generator=torch.Generator().manual_seed(0))
    batch = (device.put(ids[0]), device.put(ids[1]))
    with collection_frozen():
        samples, _ = time_micro_steps(lambda: run_micro_step(engine, batch), device, TIMED_S)
    return median(samples) / 1e3


def setting_of(number: int, dtype: str) -> Setting:
    shape, rows = WHOLE[number]
    return Setting(shape, rows, dtype=dtype, compile=False)


def micro_seconds(setting: Setting, found: Calibration) -> float:
    """What the pieces add up to for one micro-step."""
    return sum(seconds for name, seconds in step_parts(setting, found).items() if name not in PER_UPDATE)


def settled(found: Calibration, passes: Sequence[Timings]) -> Calibration:
    """With blocks and loss scaled so that whole models take what they took, in every pass."""
    for dtype in dict.fromkeys(dtype for times in passes for dtype in times):
        whole = [(setting_of(number, dtype), seconds) for times in passes for number, seconds in times.get(dtype, ())]
        scales = scales_of(whole, found)
        found = replace(found, grids={name: _scaled(name, grid, dtype, scales) for name, grid in found.grids.items()})
    return found


@dataclass(frozen=True)
class Scales:
    """What the costs of pieces are multiplied with."""

    blocks: float = 1.0
    per_doubled_width: float = 0.0  # added to it
    per_doubled_tokens: float = 0.0
    head: float = 1.0

    def of_blocks(self, tokens: float, width: float) -> float:
        more = self.per_doubled_width * _doublings(width, MIDDLE_WIDTH)
        more += self.per_doubled_tokens * _doublings(tokens, MIDDLE_TOKENS)
        return _bounded(self.blocks + more)


def _doublings(size: float, middle: float) -> float:
    return math.log2(size / middle)


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
    """The likeliest, when a model's relative error and every scale's distance from one are as large as is said above.

    >>> scales_of([], Calibration("cpu", "2", {}))
    Scales(blocks=1.0, per_doubled_width=0.0, per_doubled_tokens=0.0, head=1.0)
    """
    if not whole:
        return Scales()
    rows, missing = map(torch.tensor, zip(*(_equation(*one, found) for one in whole), strict=True))
    blocks, width, tokens, head = 1 / BLOCKS_ERROR, 1 / WIDTH_ERROR, 1 / TOKENS_ERROR, 1 / HEAD_ERROR
    prior = torch.tensor([[blocks, 0, 0, 0], [0, width, 0, 0], [0, 0, tokens, 0], [-head, 0, 0, head]]).double()
    rows, missing = rows.double() / WHOLE_ERROR, missing.double() / WHOLE_ERROR
    weights = torch.ones_like(missing)
    for _ in range(FITS):
        a = torch.cat([rows * weights[:, None], prior])
        b = torch.cat([missing * weights, torch.zeros(len(prior)).double()])
        more = torch.linalg.lstsq(a, b[:, None]).solution[:, 0]
        weights = (STRANGE / (missing - rows @ more).abs().clamp(min=STRANGE)).sqrt()
    return Scales(1 + float(more[0]), float(more[1]), float(more[2]), 1 + float(more[3]))


def _equation(setting: Setting, seconds: float, found: Calibration) -> tuple[list[float], float]:
    """How much each scale adds to the pieces' sum, and how much is missing, both as shares of what the model took."""
    parts = step_parts(setting, found)
    blocks, attention, head = (parts[name] / seconds for name in ("blocks", "attention", "head and loss"))
    wide, long = (
        _doublings(setting.shape.n_embd, MIDDLE_WIDTH),
        _doublings(setting.micro_tokens, MIDDLE_TOKENS),
    )
    return [blocks + attention, blocks * wide, blocks * long, head], 1 - micro_seconds(setting, found) / seconds
