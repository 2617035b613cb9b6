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
from gptfit.plan.calibration import PER_UPDATE, BlockCost, Calibration, block_weights, step_parts, way
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
LONGEST_SETTLING_S = 2.0  # per micro-step; a number format so slow is left as its pieces say
LEAST_START, MOST_START = 0.2, 2.0  # of a compiled block's fixed cost, of the eager one's

Piece = tuple[str, Callable[[], Grid]]


def dtypes_of(device: Device) -> tuple[str, ...]:
    """The formats a run may have here; the one that 'auto' means last."""
    if device.kind == "cpu":  # also where bfloat16 is emulated and slow: a plan must be able to say so
        return ("float32", "bfloat16") if has_bf16(device.torch_device) else ("bfloat16", "float32")
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
    blocks: dict[str, BlockCost] = {}
    for arch in ARCHITECTURES:
        for dtype, ruler in rulers.items():
            eager, way = f"{arch} {dtype} eager", f"{arch} {dtype} compiled"
            tell(f"blocks {eager}")
            grids[f"outside {arch} {dtype}"] = ruler.outside(arch)
            blocks[eager] = ruler.blocks(arch, grids)
            if compiled:
                tell(f"blocks {way}")
                blocks[way] = ruler.compiled_blocks(arch, grids, blocks[eager])
    return Calibration(
        device=device.name,
        torch=torch.__version__,
        grids=grids,
        kind=device.kind,
        dtype=device.dtype,
        blocks=blocks,
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


def micro_seconds(setting: Setting, found: Calibration) -> float:
    """What the pieces add up to for one micro-step."""
    return sum(seconds for name, seconds in step_parts(setting, found).items() if name not in PER_UPDATE)


def settling(dtype: str) -> Setting:
    return Setting(SETTLING, SETTLING_BATCH, dtype=dtype, compile=False)


def settled(found: Calibration, dtype: str, timing: Timing) -> Calibration:
    """With the small operations of a block scaled so that the whole model takes what it took.

    They are a difference of measurements, and in a model they find other things in the caches than alone.
    """
    setting = settling(dtype)
    channels = setting.micro_tokens * SETTLING.n_embd
    cost = found.blocks[way(setting)]
    rest_s = cost.seconds(channels, block_weights(SETTLING) / SETTLING.n_layer) * SETTLING.n_layer
    # The quiet quarter of its micro-steps, as the pieces' best.
    scale = 1 + (timing.ms_low / 1e3 - micro_seconds(setting, found)) / rest_s
    scale = min(max(scale, 1 / MOST_SCALE), MOST_SCALE)
    scaled = {name: _scaled(cost, scale) for name, cost in found.blocks.items() if f" {dtype} " in name}
    return replace(found, blocks={**found.blocks, **scaled})


def _scaled(cost: BlockCost, scale: float) -> BlockCost:
    return replace(
        cost,
        fixed_s=cost.fixed_s * scale,
        per_channel_s=cost.per_channel_s * scale,
        per_weight_s=cost.per_weight_s * scale,
    )


def complete(found: Calibration, tiny: dict[bool, Timing]) -> Calibration:
    """With what tiny trials, by whether they were compiled, tell: the memory of a process, and fixed costs of a step."""
    context = {
        "compiled" if compiled else "eager": (timing.device_gib or 0.0) * 1024**3 for compiled, timing in tiny.items()
    }
    eager = tiny[False]
    setting = Setting(TINY, micro_batch=1, dtype=found.dtype, compile=False)
    update_s = step_parts(setting, found)["update"]
    return replace(
        found,
        context_bytes=context,
        blocks=found.blocks if True not in tiny else _with_compiled_start(found, tiny),
        micro_step_s=max(0.0, eager.ms_low / 1e3 - micro_seconds(setting, found)),
        update_s=max(0.0, eager.ms_per_update / 1e3 - update_s),
    )


def _with_compiled_start(found: Calibration, tiny: dict[bool, Timing]) -> dict[str, BlockCost]:
    """What a compiled block takes however small it is: the tiny model has one block, and little but such costs."""
    saved_s = (tiny[False].ms_low - tiny[True].ms_low) / 1e3
    blocks = dict(found.blocks)
    share = 1 - saved_s / max(blocks[f"gpt2 {found.dtype} eager"].fixed_s, 1e-9)
    share = min(max(share, LEAST_START), MOST_START)
    for name, cost in found.blocks.items():
        if name.endswith(" compiled"):
            blocks[name] = replace(cost, fixed_s=cost.fixed_s * share)
    return blocks


def ways(dtypes: Sequence[str], compiled: bool) -> int:
    """How many pieces `measure_pieces` will tell about."""
    return 6 * len(dtypes) + 2 + len(ARCHITECTURES) * len(dtypes) * (2 if compiled else 1)
