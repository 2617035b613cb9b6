"""Calibrate: which pieces are timed, in which order, and what they come to as one record of this device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from gptfit.config.keys import TrainConfig
from gptfit.device.allocator import keep_freed_memory
from gptfit.device.device import Device, find_device, has_bf16
from gptfit.doctor.pieces import Ruler
from gptfit.plan.calibration import PER_UPDATE, Calibration, step_parts
from gptfit.plan.grid import Grid
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
from gptfit.tune.trials import Timing

ARCHITECTURES = ("gpt2", "modern")
# Nearly no work: what such a model still takes is what every run takes.
TINY = ModelShape(n_layer=1, n_head=2, n_embd=128, block_size=64, vocab_size=256)

SETTLING = ModelShape(n_layer=3, n_head=4, n_embd=256, block_size=256, vocab_size=512)
SETTLING_BATCH = 4
MOST_SCALE = 3.0

Piece = tuple[str, Callable[[], Grid]]


def dtypes_of(device: Device) -> tuple[str, ...]:
    """The formats a run may have here; the one that 'auto' means last."""
    if device.kind == "cpu":
        return ("float32", "bfloat16") if has_bf16(device.torch_device) else ("float32",)
    return tuple(sorted({"float32", device.dtype}, key=lambda dtype: dtype == device.dtype))


def measure_pieces(
    config: TrainConfig, compiled: bool, tell: Callable[[str], None], clock: Callable[[], float] = time.perf_counter
) -> Calibration:
    """Everything but what needs a process of its own (`complete` adds that)."""
    device = find_device(config)
    if device.kind == "cpu":
        keep_freed_memory()
    rulers = {dtype: Ruler(replace(device, dtype=dtype), clock) for dtype in dtypes_of(device)}
    grids: dict[str, Grid] = {}
    for name, measure in _pieces(rulers, grids):
        tell(name)
        grids[name] = measure()
    saved: dict[str, float] = {}
    for arch in ARCHITECTURES:
        for dtype, ruler in rulers.items():
            eager, way = f"{arch} {dtype} eager", f"{arch} {dtype} compiled"
            tell(f"blocks {eager}")
            blocks = ruler.blocks(arch, grids)
            grids[f"rest {eager}"], saved[eager] = blocks.rest, blocks.saved_bytes
            if compiled:
                tell(f"blocks {way}")
                blocks = ruler.compiled_blocks(arch, grids, blocks.rest)
                grids[f"rest {way}"], saved[way] = blocks.rest, blocks.saved_bytes
    return Calibration(
        device=device.name,
        torch=torch.__version__,
        grids=grids,
        kind=device.kind,
        saved_bytes=saved,
        total_bytes=float(device.total_memory_bytes()),
        time=time.time(),
    )


def _pieces(rulers: dict[str, Ruler], grids: dict[str, Grid]) -> Iterator[Piece]:
    for dtype, ruler in rulers.items():
        yield f"products {dtype}", ruler.products
        yield f"attention {dtype}", ruler.attention
        yield f"weights {dtype}", ruler.weights
        for kind in ("whole", "chunked"):
            yield f"head {dtype} {kind}", lambda ruler=ruler, kind=kind: ruler.head(kind)  # type: ignore[misc]
    first = next(iter(rulers.values()))
    yield "lookup", first.lookup
    yield "update", first.update
    for dtype, ruler in rulers.items():
        yield f"orthogonal {dtype}", lambda ruler=ruler: ruler.orthogonal(grids["update"])  # type: ignore[misc]


def tiny_config(config: TrainConfig, compiled: bool) -> TrainConfig:
    """A trial of next to nothing, in a fresh process."""
    return config.replace(
        n_layer=TINY.n_layer,
        n_head=TINY.n_head,
        n_embd=TINY.n_embd,
        block_size=TINY.block_size,
        vocab_size=TINY.vocab_size,
        batch_size=1,
        gradient_accumulation_steps=2,
        tokens_per_step=0,
        arch="gpt2",
        optimizer="adamw",
        compile=compiled,
        chunked_loss=False,
        checkpoint_activations=False,
        dropout=0.0,
    )


def settling_config(config: TrainConfig, dtype: str) -> TrainConfig:
    """A small model as a whole, in a fresh process: what its pieces do not add up to is told by it."""
    return tiny_config(config, compiled=False).replace(
        n_layer=SETTLING.n_layer,
        n_head=SETTLING.n_head,
        n_embd=SETTLING.n_embd,
        block_size=SETTLING.block_size,
        vocab_size=SETTLING.vocab_size,
        batch_size=SETTLING_BATCH,
        dtype=dtype,
    )


def settled(found: Calibration, dtype: str, timing: Timing) -> Calibration:
    """With the small operations of a block scaled so that the whole model takes what it took.

    They are a difference of measurements, and in a model they find other things in the caches than alone.
    """
    setting = Setting(SETTLING, SETTLING_BATCH, dtype=dtype, compile=False)
    parts = step_parts(setting, found)
    micro_s = sum(seconds for name, seconds in parts.items() if name not in PER_UPDATE)
    channels = setting.micro_tokens * SETTLING.n_embd
    rest_s = channels * found.grids[f"rest gpt2 {dtype} eager"].at(channels) * SETTLING.n_layer
    scale = 1 + (timing.ms_low / 1e3 - micro_s) / rest_s  # the quiet quarter of its micro-steps, as the pieces' best
    scale = min(max(scale, 1 / MOST_SCALE), MOST_SCALE)
    grids = dict(found.grids)
    for name, grid in found.grids.items():
        if name.startswith("rest") and f" {dtype} " in name:
            grids[name] = Grid(grid.axes, tuple(value * scale for value in grid.values))
    return replace(found, grids=grids)


def complete(found: Calibration, dtype: str, tiny: dict[bool, Timing]) -> Calibration:
    """With what tiny trials, by whether they were compiled, tell: the memory of a process, and fixed costs of a step."""
    context = {
        "compiled" if compiled else "eager": (timing.device_gib or 0.0) * 1024**3 for compiled, timing in tiny.items()
    }
    eager = tiny[False]
    setting = Setting(TINY, micro_batch=1, dtype=dtype, compile=False)
    parts = step_parts(setting, found)
    update_s = parts["update"]
    micro_s = sum(parts.values()) - update_s
    return replace(
        found,
        context_bytes=context,
        micro_step_s=max(0.0, eager.ms_per_micro_step / 1e3 - micro_s),
        update_s=max(0.0, eager.ms_per_update / 1e3 - update_s),
    )


def ways(dtypes: Sequence[str], compiled: bool) -> int:
    """How many pieces `measure_pieces` will tell about."""
    return 6 * len(dtypes) + 2 + len(ARCHITECTURES) * len(dtypes) * (2 if compiled else 1)
