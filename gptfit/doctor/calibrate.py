"""Calibrate: which pieces are timed, in which order, and what they come to as one record of this device."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from gptfit.config.keys import TrainConfig
from gptfit.device.allocator import keep_freed_memory
from gptfit.device.compiler import find_compile_problem
from gptfit.device.device import find_device
from gptfit.doctor.pieces import BLOCK_HEAD, BLOCK_POSITIONS, Ruler, yardstick_of
from gptfit.doctor.rounds import Costs, Place, Timed
from gptfit.doctor.whole_models import dtypes_of
from gptfit.plan.calibration import Calibration, micro_seconds, step_parts
from gptfit.plan.grid import Grid, grid_of
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
from gptfit.train.engine import collection_frozen
from gptfit.tune.rank import FAIR_CPU_SHARE
from gptfit.tune.trials import Timing

ARCHITECTURES = ("gpt2", "modern")
MOST_ROUNDS = 4  # after the first
PIECES_S = 25.0  # no further round is begun when so long has passed
# Where the other ways to run a block are timed beside gpt2's eager one: what they add or save goes with tokens times width.
OTHER_ARCH: tuple[Place, ...] = ((64, 128), (256, 256), (1024, 256), (4096, 128), (8192, 128))
# What compiling saves, by tokens times width; compiling takes long, so only gpt2 at the second. Tiny ones a tiny model tells.
COMPILED_AT: tuple[tuple[int, int], ...] = ((1024, 256), (256, 256))
MOST_START = (
    0.25  # of a tiny eager block, that compiling may add or save however small it is; more is the machine's noise
)
LEAST_SHARE = 0.2  # of what an eager block takes that another way takes at least
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
    compiled: dict[str, dict[Place, Timed]]  # blocks at COMPILED_AT, by architecture
    grids: dict[str, Costs]
    kept: dict[str, float]
    usual: Pieces | None = None  # of the format that is trained in, the only one that blocks are compiled in

    def all_grids(self) -> dict[str, Grid]:
        attention = self.attention.grid()
        grids = {name: costs.grid() for name, costs in self.grids.items()} | {f"attention {self.dtype}": attention}
        for arch in ARCHITECTURES:
            grids[f"blocks {arch} {self.dtype} eager"] = self._blocks(attention, arch)
            grids[f"blocks {arch} {self.dtype} compiled"] = self._blocks(attention, arch, self._compiled_adds(arch))
        return grids

    def _blocks(self, attention: Grid, arch: str, added: Sequence[tuple[float, float]] = ()) -> Grid:
        """Without their attention, which depends on other sizes."""
        found: dict[Place, float] = {}
        more = self._more(arch)
        for (n, c), cost in self.eager.points().items():
            positions = min(n, BLOCK_POSITIONS)
            seconds = n * 12 * c**2 * cost
            each = between(more, n * c) + between(added, n * c) - positions * attention.at(positions, BLOCK_HEAD)
            found[(n, c)] = max(seconds + n * c * each, LEAST_SHARE * seconds) / (n * 12 * c**2)
        return grid_of(found)

    def _more(self, arch: str) -> list[tuple[float, float]]:
        """Seconds per token and channel that a block of another architecture takes more, by tokens times width."""
        found = []
        for (n, c), timed in self.others.get(arch, {}).items():
            seconds = self._seconds(timed, n, c) - self._seconds(self.eager.timed[n, c], n, c)
            found.append((n * c, seconds / (n * c)))
        return sorted(found)

    def _compiled_adds(self, arch: str) -> list[tuple[float, float]]:
        """Seconds per token and channel, by tokens times width; less than nothing where it saves.

        Where another architecture was not compiled, it is as much more or less than at the first place as of gpt2.
        """
        if arch not in self.compiled:
            return self.usual._compiled_adds(arch) if self.usual else []
        own, gpt2 = ({at: self._saved(each, at) for at in self.compiled[each]} for each in (arch, "gpt2"))
        first = COMPILED_AT[0]
        return sorted((math.prod(at), own.get(at, own[first] + gpt2[at] - gpt2[first])) for at in gpt2)

    def _saved(self, arch: str, at: Place) -> float:
        before = self.others.get(arch, self.eager.timed)[at]
        return (self._seconds(self.compiled[arch][at], *at) - self._seconds(before, *at)) / math.prod(at)

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


def measure_pieces(config: TrainConfig, compiled: bool, tell: Callable[[str], None]) -> Calibration:
    """Everything but what needs a process of its own (`settled` and `complete` add that)."""
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
        usual = next(each for each in pieces if each.dtype == device.dtype)
        for other in pieces:
            other.usual = None if other is usual else usual
        first = next(iter(rulers.values()))
        tell("lookup and updates")
        lookup, grids = first.lookup(), {"update": first.update()}
        for dtype, ruler in rulers.items():
            grids[f"orthogonal {dtype}"] = ruler.orthogonal(grids["update"])
        for i in itertools.takewhile(lambda _: time.monotonic() - began < PIECES_S, range(MOST_ROUNDS)):
            tell(f"everything again, {i + 1} of at most {MOST_ROUNDS}")
            for ruler in rulers.values():
                ruler.rounds.go(1)
    grids["lookup"] = lookup.grid()
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
    fast: dict[str, dict[Place, Timed]] = {}
    kept = {}
    for arch in ARCHITECTURES:
        kept[f"{arch} {dtype} eager"] = eager_bytes = ruler.kept(arch, 256, 128, False)
        kept[f"{arch} {dtype} compiled"] = eager_bytes * COMPILED_KEEPS[arch]
        if compiled and all(place in eager.timed for place in COMPILED_AT):
            tell(f"compiled blocks {arch} {dtype}")
            usual = others.get(arch, eager.timed)
            at = COMPILED_AT if arch == "gpt2" else COMPILED_AT[:1]
            fast[arch] = {place: ruler.other_block(arch, place, usual[place], compiled=True) for place in at}
            kept[f"{arch} {dtype} compiled"] = ruler.kept(arch, *COMPILED_AT[0], True)
    tell(f"attention {dtype}")
    attention = ruler.attention()
    tell(f"loss {dtype}")
    grids = {f"head {dtype} {kind}": ruler.head(kind) for kind in ("whole", "chunked")}
    grids |= {f"outside {arch} {dtype}": ruler.outside(arch) for arch in ARCHITECTURES}
    return Pieces(dtype, ruler.layers, eager, attention, others, fast, grids, kept)


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


def complete(found: Calibration, tiny: dict[bool, Timing]) -> Calibration:
    """With what tiny trials, by whether they were compiled, tell: the memory of a process, and fixed costs of a step."""
    context = {
        "compiled" if compiled else "eager": (timing.device_gib or 0.0) * 1024**3 for compiled, timing in tiny.items()
    }
    eager = tiny[False]
    setting = Setting(TINY, micro_batch=TINY_BATCH, dtype=found.dtype, compile=False)
    update_s = step_parts(setting, found)["update"]
    return replace(
        found,
        context_bytes=context,
        grids=found.grids if True not in tiny else _with_compiled_start(found, tiny),
        micro_step_s=max(0.0, _own_ms(eager) / 1e3 - micro_seconds(setting, found)),
        update_s=max(0.0, eager.ms_per_update / 1e3 - update_s),
    )


def _own_ms(timing: Timing) -> float:
    """Of a micro-step; on shared cores its processor time."""
    is_shared = timing.cpu_ms and (timing.cpu_share or 1.0) < FAIR_CPU_SHARE
    return timing.cpu_ms if is_shared and timing.cpu_ms else timing.ms_per_micro_step


def _with_compiled_start(found: Calibration, tiny: dict[bool, Timing]) -> dict[str, Grid]:
    """What compiling adds to or saves of a block however small it is: the tiny model has one block, and little else."""
    added_s = (_own_ms(tiny[True]) - _own_ms(tiny[False])) / 1e3
    width, tokens = TINY.n_embd, TINY_BATCH * TINY.block_size
    names = [f"blocks gpt2 {found.dtype} {how}" for how in ("eager", "compiled")]
    eager, compiled = (found.grids[name].at(tokens, width) for name in names)
    block_s = eager * tokens * 12 * width**2
    start_s = added_s - (compiled - eager) * tokens * 12 * width**2
    start_s = min(max(start_s, -MOST_START * block_s), MOST_START * block_s)
    grids = dict(found.grids)
    for name in found.grids:
        if name.startswith("blocks") and name.endswith("compiled"):
            before = found.grids[name.replace("compiled", "eager")]
            grids[name] = _with_start(found.grids[name], before, start_s)
    return grids


def _with_start(grid: Grid, eager: Grid, start_s: float) -> Grid:
    found: dict[Place, float] = {}
    for n in grid.axes[0]:
        for c in grid.axes[1]:
            cost = grid.at(n, c) + start_s / (n * 12 * c**2)
            found[n, c] = max(cost, LEAST_SHARE * eager.at(n, c))
    return grid_of(found)
