"""Calibrate: which pieces are timed, in which order, and what they come to as one record of this device."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from gptfit.config.keys import TrainConfig
from gptfit.device.allocator import keep_freed_memory
from gptfit.device.compiler import find_compile_problem
from gptfit.device.device import find_device
from gptfit.doctor.pieces import BLOCK_HEAD, BLOCK_POSITIONS, Ruler, yardstick_of
from gptfit.doctor.rounds import Costs, Place, Timed
from gptfit.doctor.whole_models import Saved, dtypes_of
from gptfit.plan.calibration import Calibration, step_parts
from gptfit.plan.grid import Grid, grid_of
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
from gptfit.train.engine import collection_frozen
from gptfit.tune.trials import Timing

ARCHITECTURES = ("gpt2", "modern")
MOST_ROUNDS = 6  # after the first
# Where the other ways to run a block are timed beside gpt2's eager one: what they add or save goes with tokens times width.
OTHER_ARCH: tuple[Place, ...] = ((64, 128), (256, 256), (1024, 256), (4096, 128), (4096, 256))
LEAST_SHARE = 0.2  # of what an eager block takes that another way takes at least
KEPT_AT = (1024, 256)  # as the check of compiled models has compiled a block
# Of the bytes that an eager block keeps in 16 bits; counted in the format that blocks are compiled in.
COMPILED_KEEPS = {"gpt2": 0.94, "modern": 0.80}
# Nearly no work: what such a model still takes is what every run takes. The check of compiled models has compiled its block.
TINY = ModelShape(n_layer=1, n_head=2, n_embd=128, block_size=64, vocab_size=256)
TINY_BATCH = 2


@dataclass
class Pieces:
    """Everything timed in one number format."""

    dtype: str
    layers: Callable[[float, float], int]  # of a stack of blocks with so many tokens and channels
    eager: Costs  # blocks of gpt2
    attention: Costs
    others: dict[str, dict[Place, Timed]]  # blocks of other architectures, by place
    grids: dict[str, Costs]
    kept: dict[str, float]

    def all_grids(self) -> dict[str, Grid]:
        attention = self.attention.grid()
        grids = {name: costs.grid() for name, costs in self.grids.items()} | {f"attention {self.dtype}": attention}
        for arch in ARCHITECTURES:
            grids[f"blocks {arch} {self.dtype} eager"] = self._blocks(attention, arch)
        return grids

    def _blocks(self, attention: Grid, arch: str) -> Grid:
        """Without their attention, which depends on other sizes."""
        found: dict[Place, float] = {}
        more = self._more(arch)
        for (n, c), cost in self.eager.points().items():
            positions = min(n, BLOCK_POSITIONS)
            seconds = n * 12 * c**2 * cost
            each = between(more, n * c) - positions * attention.at(positions, BLOCK_HEAD)
            found[(n, c)] = max(seconds + n * c * each, LEAST_SHARE * seconds) / (n * 12 * c**2)
        return grid_of(found)

    def _more(self, arch: str) -> list[tuple[float, float]]:
        """Seconds per token and channel that a block of another architecture takes more, by tokens times width."""
        found = []
        for (n, c), timed in self.others.get(arch, {}).items():
            seconds = self._seconds(timed, n, c) - self._seconds(self.eager.timed[n, c], n, c)
            found.append((n * c, seconds / (n * c)))
        return sorted(found)

    def _seconds(self, timed: Timed, n: float, c: float) -> float:
        """Of one block."""
        return timed.seconds / self.layers(n, c)


def between(points: Sequence[tuple[float, float]], where: float) -> float:
    """Along straight lines over the logarithm of the size, at the edges as there; values may be below zero.

    >>> between([(1, 0.0), (100, 2.0)], 10), between([(1, 0.0), (100, 2.0)], 1000), between([], 10)
    (1.0, 2.0, 0.0)
    """
    if not points:
        return 0.0
    for (low, at_low), (high, at_high) in itertools.pairwise(points):
        if low <= where <= high:
            return at_low + (at_high - at_low) * math.log(where / low) / math.log(high / low)
    return points[0][1] if where < points[0][0] else points[-1][1]


def measure_pieces(config: TrainConfig, compiled: bool, most_s: float, tell: Callable[[str], None]) -> Calibration:
    """Everything but what needs a process of its own (`settled` and `complete` add that); no further round after `most_s`."""
    began, device = time.monotonic(), find_device(config)
    compiled = compiled and find_compile_problem(device) is None  # which also finds the code that was compiled before
    if device.kind == "cpu":
        keep_freed_memory()
    yardstick = yardstick_of(device)
    formats = dtypes_of(device)
    rulers = {
        dtype: Ruler(replace(device, dtype=dtype), yardstick, is_seldom=dtype != device.dtype) for dtype in formats
    }
    with collection_frozen():
        pieces = [_pieces(ruler, compiled and ruler.device.dtype == device.dtype, tell) for ruler in rulers.values()]
        first = next(iter(rulers.values()))
        tell("lookup and updates")
        lookup, update = first.lookup(), first.update()
        orthogonal = {dtype: ruler.orthogonal() for dtype, ruler in rulers.items()}
        for i in itertools.takewhile(lambda _: time.monotonic() - began < most_s, range(MOST_ROUNDS)):
            tell(f"everything again, {i + 1} of at most {MOST_ROUNDS}")
            for ruler in rulers.values():
                ruler.rounds.go(1)
    grids = {"lookup": lookup.grid(), "update": update.grid()}
    grids |= {f"orthogonal {dtype}": muon.grid_beside(grids["update"]) for dtype, muon in orthogonal.items()}
    for each in pieces:
        grids |= each.all_grids()
    return Calibration(
        device=device.name,
        torch=torch.__version__,
        grids=grids,
        kind=device.kind,
        dtype=device.dtype,
        saved_bytes={name: kept for each in pieces for name, kept in each.kept.items()},
        total_bytes=float(device.total_memory_bytes()),
        time=time.time(),
    )


def _pieces(ruler: Ruler, compiled: bool, tell: Callable[[str], None]) -> Pieces:
    dtype = ruler.device.dtype
    tell(f"blocks {dtype}")
    eager = ruler.blocks()
    places = [place for place in OTHER_ARCH if place in eager.timed]
    others = {"modern": {place: ruler.other_block("modern", place, eager.timed[place]) for place in places}}
    kept = {}
    for arch in ARCHITECTURES:
        kept[f"{arch} {dtype} eager"] = eager_bytes = ruler.kept(arch, 256, 128, False)
        kept[f"{arch} {dtype} compiled"] = eager_bytes * COMPILED_KEEPS[arch]
        if compiled:
            tell(f"compiled block {arch} {dtype}")
            kept[f"{arch} {dtype} compiled"] = ruler.kept(arch, *KEPT_AT, True)
    tell(f"attention {dtype}")
    attention = ruler.attention()
    tell(f"loss {dtype}")
    grids = {f"head {dtype} {kind}": ruler.head(kind) for kind in ("whole", "chunked")}
    grids |= {f"outside {arch} {dtype}": ruler.outside(arch) for arch in ARCHITECTURES}
    return Pieces(dtype, ruler.layers, eager, attention, others, grids, kept)


def tiny_config(config: TrainConfig, compiled: bool) -> TrainConfig:
    """A trial of next to nothing, in a fresh process."""
    return config.replace(
        n_layer=TINY.n_layer,
        n_head=TINY.n_head,
        n_embd=TINY.n_embd,
        block_size=TINY.block_size,
        vocab_size=TINY.vocab_size,
        batch_size=TINY_BATCH,
        gradient_accumulation_steps=2,
        tokens_per_step=0,
        arch="gpt2",
        optimizer="adamw",
        compile=compiled,
        chunked_loss=False,
        checkpoint_activations=False,
        dropout=0.0,
    )


def complete(found: Calibration, tiny: dict[bool, Timing], saved: Saved) -> Calibration:
    """With what tiny trials, by whether they were compiled, tell: the memory of a process, and fixed costs of an update.

    `saved` is what compiling saved of larger models.
    """
    context = {
        "compiled" if compiled else "eager": (timing.device_gib or 0.0) * 1024**3 for compiled, timing in tiny.items()
    }
    setting = Setting(TINY, micro_batch=TINY_BATCH, dtype=found.dtype, compile=False)
    update_s = step_parts(setting, found)["update"]
    return replace(
        with_compiled(found, saved) if saved else found,
        context_bytes=context,
        update_s=max(0.0, tiny[False].ms_per_update / 1e3 - update_s),
    )


def with_compiled(found: Calibration, saved: Saved) -> Calibration:
    """With blocks as compiled: what compiling saves per token and channel is the same in every number format."""
    grids = dict(found.grids)
    for name, eager in found.grids.items():
        kind, *ways = name.split()
        if kind == "blocks" and ways[-1] == "eager":
            grids[name.replace("eager", "compiled")] = eager.times(
                partial(_share_left, eager, _saved_of(saved, ways[0]))
            )
    return replace(found, grids=grids)


def _saved_of(saved: Saved, arch: str) -> list[tuple[float, float]]:
    """By tokens times width. Where this architecture was not compiled, it is as much more or less than of the other as
    where both were."""
    own = dict(saved.get(arch, ()))
    for other in (dict(each) for name, each in saved.items() if name != arch):
        more = median([own[at] - other[at] for at in own.keys() & other.keys()] or [0.0])
        own = {at: seconds + more for at, seconds in other.items()} | own
    return sorted(own.items())


def _share_left(eager: Grid, saved: Sequence[tuple[float, float]], tokens: float, width: float) -> float:
    cost = eager.at(tokens, width) * 12 * width  # per token and channel
    return max(LEAST_SHARE, 1 - between(saved, tokens * width) / cost)
