"""Calibration: this device's own costs, measured piece by piece, and what a step of any shape costs by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gptfit.config import recipe
from gptfit.estimate import Estimate
from gptfit.gpus import GPU
from gptfit.measured import MeasuredDevice, Measurements
from gptfit.plan import memory
from gptfit.plan.grid import Grid, grid_from_json
from gptfit.plan.resolve import Place, on_card
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
from gptfit.units import GIB

WEIGHT_FLOPS = 6  # a token meets each weight of a block three times, two FLOPs each
# What the second edition of the recipe adds to a block is known from its parts: products and look-ups of their size,
# and multiplications per channel that take this share of what a block's small operations take (docs/formulas.md).
EDITION_SHARE = 0.1


@dataclass(frozen=True)
class Heap:
    """Bytes of a CPU process per byte that lives; from 24 trials of other shapes than bench/calibration.py has."""

    activations: float
    logits: float
    passing: float  # float32 tensors of the residual stream's size that live for a moment
    head_copies: float  # of the head's gradient


HEAP = {"eager": Heap(1.5, 1.26, 18.4, 2.1), "compiled": Heap(1.23, 1.27, 2.0, 1.6)}
MEMORY_ERROR = 0.13  # nine of ten shapes that were never run (docs/accuracy.md)
PER_UPDATE = ("update", "host")  # parts of a step that do not repeat with its micro-steps
PASSES = 3  # one forward, two backward


@dataclass(frozen=True)
class Calibration:
    """What was timed on one device. Each grid is a cost per unit of work, by the sizes it depends on.

    `products`   seconds per FLOP of a block's matrix products, by (tokens, width), for each number format
    `attention`  seconds per token, channel and position, forward and backward, by (positions, head size)
    `rest`       seconds per token and channel of everything else in a block, by their number; for each way to run
    `head`       seconds per token, vocabulary entry and channel of the loss, by (tokens, width, vocabulary); whole and chunked
    `weights`    seconds per weight and micro-step to copy it and to add to its gradient, by their number
    `lookup`     seconds per embedding weight and micro-step, by their number
    `update`     seconds per weight and update, by their number, for AdamW
    `orthogonal` seconds per matrix weight and update that Muon takes, by width
    """

    device: str  # as torch names it, which is how measurements are keyed
    torch: str
    grids: Mapping[str, Grid]
    kind: str = "cpu"  # cpu | cuda | mps
    saved_bytes: Mapping[str, float] = field(default_factory=dict)  # per token, channel and block, by way to run
    context_bytes: Mapping[str, float] = field(default_factory=dict)  # of a process without a model: eager, compiled
    micro_step_s: float = 0.0
    update_s: float = 0.0
    total_bytes: float = 0.0
    time: float = 0.0

    def knows(self, setting: Setting) -> bool:
        """Whether every piece of such a step was timed; norms, positions and activations that are no default were not."""
        return (
            uncounted(setting.shape) == _usual(setting.shape)
            and not setting.writes_scores
            and all(name in self.grids for name in _grids_of(setting))
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "torch": self.torch,
            "grids": {name: grid.as_json() for name, grid in self.grids.items()},
            "kind": self.kind,
            "saved_bytes": dict(self.saved_bytes),
            "context_bytes": dict(self.context_bytes),
            "micro_step_s": self.micro_step_s,
            "update_s": self.update_s,
            "total_bytes": self.total_bytes,
            "time": self.time,
        }


def uncounted(shape: ModelShape) -> ModelShape:
    """Without the second edition's ingredients, whose cost is known from their size."""
    names = (name for name in recipe.second_edition(shape) if hasattr(shape, name))
    return replace(shape, **{name: getattr(ModelShape, name) for name in names})


def _usual(shape: ModelShape) -> ModelShape:
    """Every ingredient at its default."""
    return ModelShape(
        shape.n_layer, shape.n_head, shape.n_embd, shape.block_size, shape.vocab_size, shape.bias, shape.arch
    )


def calibration_from_json(values: Mapping[str, Any]) -> Calibration:
    """ValueError, KeyError or TypeError where it is none."""
    return Calibration(
        device=str(values["device"]),
        torch=str(values["torch"]),
        grids={str(name): grid_from_json(grid) for name, grid in values["grids"].items()},
        kind=str(values["kind"]),
        saved_bytes={str(name): float(size) for name, size in values["saved_bytes"].items()},
        micro_step_s=float(values["micro_step_s"]),
        update_s=float(values["update_s"]),
        context_bytes={str(name): float(size) for name, size in values["context_bytes"].items()},
        total_bytes=float(values["total_bytes"]),
        time=float(values["time"]),
    )


def newest(measurements: Measurements, device_name: str | None) -> Calibration | None:
    """What was last calibrated of the device torch calls so, or of this machine's CPU where that is None."""
    found = []
    for record in measurements.devices:
        try:
            calibration = calibration_from_json(record.values)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # another version's
        if calibration.device == device_name or (device_name is None and calibration.kind == "cpu"):
            found.append(calibration)
    return max(found, key=lambda calibration: calibration.time, default=None)


def record_of(calibration: Calibration) -> MeasuredDevice:
    return MeasuredDevice(calibration.device, calibration.torch, calibration.as_json(), calibration.time)


def place_of(calibration: Calibration) -> Place:
    """Where a run on this device is: 'auto' is the faster format, which was timed last."""
    dtype = "bfloat16" if "products bfloat16" in calibration.grids else "float32"
    return Place(calibration.kind, dtype, can_compile="compiled" in calibration.context_bytes)


def place_for(gpu: GPU | None, used_bytes: float | None, calibrated: Calibration | None) -> Place:
    """A card of the table; without one this machine's CPU as it was calibrated, or any card that has enough."""
    return place_of(calibrated) if calibrated is not None and gpu is None else on_card(gpu, used_bytes)


def as_gpu(calibration: Calibration) -> GPU:
    """This device in the form of a row of the table, for what asks for one; its speed comes from the calibration."""
    return GPU(
        name=calibration.device,
        compute_capability=calibration.kind,
        vram_gib=calibration.total_bytes / GIB,
        bandwidth_gbs=1.0,
        bf16_tflops=None,
        fp32_tflops=None,
        tf32_tflops=None,
        has_bf16="products bfloat16" in calibration.grids,
        source="gptfit doctor --card",
        confidence="high",
        measured_low_tflops=None,
        measured_high_tflops=None,
        measured_dtype="",
        measured_source="",
    )


def way(setting: Setting) -> str:
    """What the cost of a block's small operations depends on besides their number."""
    return f"{setting.shape.arch} {setting.dtype} {'compiled' if setting.compile else 'eager'}"


def _grids_of(setting: Setting) -> Iterator[str]:
    dtype = setting.dtype
    yield from (f"products {dtype}", f"attention {dtype}", f"weights {dtype}", "lookup", "update")
    yield f"rest {way(setting)}"
    yield f"head {dtype} {'chunked' if setting.chunked_loss else 'whole'}"
    if setting.optimizer == "muon":
        yield f"orthogonal {dtype}"


def step_parts(setting: Setting, calibration: Calibration) -> dict[str, float]:
    """Seconds of one whole step by cause, on one device."""
    grids, shape, dtype = calibration.grids, setting.shape, setting.dtype
    n, c = setting.micro_tokens, shape.n_embd
    again = 1 + 1 / PASSES if setting.checkpoint_activations else 1.0  # blocks run forward twice
    in_blocks, embedded = block_weights(shape), looked_up(shape)
    matmul = WEIGHT_FLOPS * n * in_blocks * grids[f"products {dtype}"].at(n, c) * again
    attention = n * c * shape.block_size * shape.n_layer * again * attention_cost(setting, calibration)
    more = EDITION_SHARE if uncounted(shape) != shape else 0.0
    rest = n * c * grids[f"rest {way(setting)}"].at(n * c) * shape.n_layer * again * (1 + more)
    weights = in_blocks * grids[f"weights {dtype}"].at(in_blocks) + embedded * grids["lookup"].at(embedded)
    kind = "chunked" if setting.chunked_loss else "whole"
    head = n * c * shape.vocab_size * grids[f"head {dtype} {kind}"].at(n, c, shape.vocab_size)
    micro_steps = setting.accumulation
    return {
        "matmul": matmul * micro_steps,
        "attention": attention * micro_steps,
        "head and loss": head * micro_steps,
        "memory traffic": (rest + weights) * micro_steps,
        "launches": calibration.micro_step_s * micro_steps,
        "update": update_seconds(setting, calibration),
        "host": calibration.update_s,
    }


def attention_cost(setting: Setting, calibration: Calibration) -> float:
    shape = setting.shape
    return calibration.grids[f"attention {setting.dtype}"].at(shape.block_size, shape.n_embd / shape.n_head)


def block_weights(shape: ModelShape) -> int:
    return shape.sizes["matrix"]


def looked_up(shape: ModelShape) -> int:
    """Weights of the embedding and of every table beside it."""
    return shape.sizes["embedding"] + shape.sizes["table"]


def update_seconds(setting: Setting, calibration: Calibration) -> float:
    """AdamW walks over every weight; Muon makes each matrix of the blocks orthogonal instead."""
    grids, shape = calibration.grids, setting.shape
    total, matrices = shape.n_weights, block_weights(shape)
    if setting.optimizer != "muon":
        return total * grids["update"].at(total)
    others = total - matrices
    orthogonal = matrices * grids[f"orthogonal {setting.dtype}"].at(shape.n_embd)
    return orthogonal + (others * grids["update"].at(others) if others else 0.0)


def process_bytes(setting: Setting, calibration: Calibration) -> float:
    """Peak of the whole process."""
    return sum(memory_parts(setting, calibration).values())


def memory_parts(setting: Setting, calibration: Calibration) -> dict[str, float]:
    """What is alive at the loss, or in the update where that is more; the process itself is the workspace."""
    context = calibration.context_bytes["compiled" if setting.compile else "eager"]
    if calibration.kind != "cpu":
        parts = memory.predict(setting).parts
        return {**parts, "workspace": parts["workspace"] - memory.FITTED.context_bytes + context}
    shape = setting.shape
    casts = 0.0 if setting.dtype == "float32" else 2.0 * (block_weights(shape) + shape.vocab_size * shape.n_embd)
    activations, logits = _in_heap(setting, activation_bytes(setting, calibration), cpu_logit_bytes(setting))
    # Muon gathers the largest group of equal matrices, a third of them, and needs it three times.
    in_update = 4.0 * block_weights(shape) if setting.optimizer == "muon" else 0.0
    return {
        "weights": 4.0 * shape.n_weights + casts,
        "gradients": 4.0 * shape.n_weights,
        "optimizer": memory.state_bytes(setting) + max(0.0, in_update - activations - logits - casts),
        "activations": activations,
        "logits": logits,
        "workspace": context,
    }


def memory_of(setting: Setting, calibration: Calibration) -> memory.Memory:
    parts = memory_parts(setting, calibration)
    total = sum(parts.values())
    allocated = total - parts["workspace"] if calibration.kind == "cpu" else memory.predict(setting).allocated.value
    return memory.Memory(
        parts,
        Estimate.within(allocated, MEMORY_ERROR, "calibrated"),
        Estimate.within(total, MEMORY_ERROR, "calibrated"),
    )


def _in_heap(setting: Setting, activations: float, logits: float) -> tuple[float, float]:
    """What the C library's heap holds for them: gaps between blocks, and what lives for a moment in backward."""
    shape, heap = setting.shape, HEAP["compiled" if setting.compile else "eager"]
    passing = 4.0 * setting.micro_tokens * shape.n_embd * heap.passing
    head = 4.0 * shape.vocab_size * shape.n_embd * heap.head_copies
    return activations * heap.activations + passing, logits * heap.logits + head


def activation_bytes(setting: Setting, calibration: Calibration) -> float:
    shape = setting.shape
    channels = setting.micro_tokens * shape.n_embd
    per_block = calibration.saved_bytes[way(setting)] * channels
    if setting.checkpoint_activations:
        return 4.0 * channels * shape.n_layer + per_block
    return per_block * shape.n_layer


def cpu_logit_bytes(setting: Setting) -> float:
    """A CPU's softmax works on a few rows at a time in chunks; whole logits are there three times."""
    shape, n, width = setting.shape, setting.micro_tokens, setting.element_bytes
    head = shape.vocab_size * shape.n_embd
    if setting.chunked_loss:
        chunk = min(memory.FITTED.chunk_tokens, n) * shape.vocab_size * width
        return chunk + (4.0 + width) * n * shape.n_embd + (4.0 + (2.0 if width == 2 else 0.0)) * head
    return n * shape.vocab_size * (12.0 if width == 4 else 14.0) + 4.0 * head
