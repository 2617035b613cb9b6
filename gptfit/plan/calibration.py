"""Calibration: this device's own costs, measured piece by piece, and what a step of any shape costs by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gptfit import sane
from gptfit.config import recipe
from gptfit.estimate import Estimate
from gptfit.gpus import GPU
from gptfit.measured import MOST, MeasuredDevice, Measurements
from gptfit.plan import memory
from gptfit.plan.grid import Grid, grid_from_json
from gptfit.plan.resolve import Place, on_card
from gptfit.plan.setting import DTYPE_BYTES, Setting
from gptfit.shape import ModelShape
from gptfit.units import GIB


@dataclass(frozen=True)
class Heap:
    """Bytes that the C library's heap holds for a byte that lives: it never gives back, and holes are left where
    tensors of other sizes were. Fitted on 28 trials, the loss on 41 others (docs/formulas.md)."""

    eager_activations: float = 1.34
    compiled_activations: float = 1.25
    passing: float = 19.8  # float32 tensors of the residual stream's size that live for a moment in eager backward
    # Copies of whole float32 logits. Three live. A head that is the embedding too has a gradient that waits for the end of
    # backward, and keeps the holes on its two sides apart.
    logits: float = 4.5
    logits_tied: float = 7.0
    # Copies of the head's gradient beside three of the logits, where that is more: few tokens, a wide model.
    head: float = 1.5
    head_tied: float = 4.7
    logits_16_bit: float = 4.9  # of float32 logits
    head_16_bit: float = 1.3
    chunk: float = 1.4
    muon: float = 2.7  # copies of the blocks' weights, in the format that Muon's momentum is made orthogonal in


HEAP = Heap()
MEMORY_ERROR = 0.13  # nine of ten shapes that were never run (docs/accuracy.md)
# How many sizes each kind of grid depends on.
AXES = {"blocks": 2, "attention": 2, "outside": 1, "head": 3, "lookup": 1, "update": 1, "orthogonal": 1}
KINDS = ("cpu", "cuda", "mps")
PER_UPDATE = ("update", "host")  # parts of a step that do not repeat with its micro-steps
LIVING_LOGITS = 3  # the softmax, its gradient and that of the logits
PASSES = 3  # one forward, two backward


@dataclass(frozen=True)
class Calibration:
    """What was timed on one device. Each grid is a cost per unit of work, by the sizes it depends on.

    `blocks`     seconds per token and weight of a block without its attention, by (tokens, width); for each way to run
    `attention`  seconds per token, channel and position, forward and backward, by (positions, head size)
    `outside`    seconds per token and channel of what is in no block, by their number; for each architecture
    `head`       seconds per token, vocabulary entry and channel of the loss, by (tokens, width, vocabulary); whole and chunked
    `lookup`     seconds per embedding weight and micro-step, by their number
    `update`     seconds per weight and update, by their number, for AdamW
    `orthogonal` seconds per matrix weight, channel and update that Muon takes, by width
    """

    device: str  # as torch names it, which is how measurements are keyed
    torch: str
    grids: Mapping[str, Grid]
    kind: str = "cpu"  # one of KINDS
    dtype: str = "float32"  # what 'auto' means there
    saved_bytes: Mapping[str, float] = field(default_factory=dict)  # for backward per token, channel and block, by way
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
            and way(setting) in self.saved_bytes
            and (setting.matmul, setting.residual_dtype) == ("plain", "float32")
            and all(name in self.grids for name in _grids_of(setting))
            and ("compiled" if setting.compile else "eager") in self.context_bytes
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "torch": self.torch,
            "grids": {name: grid.as_json() for name, grid in self.grids.items()},
            "kind": self.kind,
            "dtype": self.dtype,
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
    """ValueError or KeyError where it is none, or its numbers can be nobody's: the file may have been sent."""
    found = sane.mapping(values, "a calibration")
    grids = sane.mapping(found["grids"], "grids")
    return Calibration(
        device=sane.text(found["device"], "device", 300),
        torch=sane.text(found["torch"], "torch", 300),
        grids={name: _grid(name, grid) for name, grid in grids.items()},
        kind=sane.choice(found["kind"], "kind", KINDS),
        dtype=sane.choice(found["dtype"], "dtype", DTYPE_BYTES),
        saved_bytes=_amounts(found, "saved_bytes"),
        micro_step_s=_amount(found, "micro_step_s"),
        update_s=_amount(found, "update_s"),
        context_bytes=_amounts(found, "context_bytes"),
        total_bytes=_amount(found, "total_bytes"),
        time=_amount(found, "time"),
    )


def _grid(name: str, values: Any) -> Grid:
    """One that can be asked with as many sizes as its kind depends on."""
    found = grid_from_json(sane.mapping(values, name))
    wanted = AXES.get(name.partition(" ")[0], len(found.axes))
    if len(found.axes) != wanted:
        raise ValueError(f"{name} has {len(found.axes)} axes, not {wanted}")
    return found


def _amount(values: Mapping[str, Any], name: str) -> float:
    return sane.number(values[name], name, 0, MOST)


def _amounts(values: Mapping[str, Any], name: str) -> dict[str, float]:
    found = sane.mapping(values[name], name)
    return {key: _amount(found, key) for key in found}


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
    return Place(calibration.kind, calibration.dtype, can_compile="compiled" in calibration.context_bytes)


def place_for(gpu: GPU | None, used_bytes: float | None, calibrated: Calibration | None) -> Place:
    """A card of the table; without one this machine's CPU as it was calibrated, or as any is."""
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
        has_bf16=calibration.dtype == "bfloat16",
        source="gptfit doctor --card",
        confidence="high",
        measured_low_tflops=None,
        measured_high_tflops=None,
        measured_dtype="",
        measured_source="",
    )


def way(setting: Setting) -> str:
    """What the cost of a block depends on besides its size."""
    return f"{setting.shape.arch} {setting.dtype} {'compiled' if setting.compile else 'eager'}"


def _grids_of(setting: Setting) -> Iterator[str]:
    dtype = setting.dtype
    yield from (f"blocks {way(setting)}", f"attention {dtype}", "lookup", "update")
    yield f"outside {setting.shape.arch} {dtype}"
    yield f"head {dtype} {'chunked' if setting.chunked_loss else 'whole'}"
    if setting.optimizer == "muon":
        yield f"orthogonal {dtype}"


def step_parts(setting: Setting, calibration: Calibration) -> dict[str, float]:
    """Seconds of one whole step by cause, on one device."""
    grids, shape, dtype = calibration.grids, setting.shape, setting.dtype
    n, c = setting.micro_tokens, shape.n_embd
    again = 1 + 1 / PASSES if setting.checkpoint_activations else 1.0  # blocks run forward twice
    blocks = n * block_weights(shape) * grids[f"blocks {way(setting)}"].at(n, c) * again
    attention = n * c * shape.block_size * shape.n_layer * again * attention_cost(setting, calibration)
    embedded = looked_up(shape)
    outside = n * c * grids[f"outside {shape.arch} {dtype}"].at(n * c) + embedded * grids["lookup"].at(embedded)
    head = n * shape.vocab_size * head_cost(setting, calibration)
    micro_steps = setting.accumulation
    return {
        "blocks": blocks * micro_steps,
        "attention": attention * micro_steps,
        "head and loss": head * micro_steps,
        "outside": outside * micro_steps,
        "launches": calibration.micro_step_s * micro_steps,
        "update": update_seconds(setting, calibration),
        "host": calibration.update_s,
    }


def micro_seconds(setting: Setting, calibration: Calibration) -> float:
    """Of one micro-step."""
    parts = step_parts(setting, calibration)
    return sum(seconds for name, seconds in parts.items() if name not in PER_UPDATE) / setting.accumulation


def head_cost(setting: Setting, calibration: Calibration) -> float:
    """Seconds per logit: the softmax costs the same at any width, the products in proportion to it."""
    shape, n = setting.shape, setting.micro_tokens
    grid = calibration.grids[f"head {setting.dtype} {'chunked' if setting.chunked_loss else 'whole'}"]
    narrow, wide = grid.axes[1][0], grid.axes[1][-1]
    of_narrow, of_wide = (width * grid.at(n, width, shape.vocab_size) for width in (narrow, wide))
    per_channel = max(0.0, of_wide - of_narrow) / (wide - narrow)
    return max(0.0, of_narrow + (shape.n_embd - narrow) * per_channel)


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
    orthogonal = matrices * shape.n_embd * grids[f"orthogonal {setting.dtype}"].at(shape.n_embd)
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
    activations, logits = _activations_in_heap(setting, calibration), _loss_in_heap(setting)
    muon_bytes = 2 if "bfloat16" == setting.dtype == calibration.dtype else 4  # the device has units for it
    in_update = HEAP.muon * muon_bytes * block_weights(shape) if setting.optimizer == "muon" else 0.0
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


def _activations_in_heap(setting: Setting, calibration: Calibration) -> float:
    """What the heap holds for them, and for what lives for a moment in backward."""
    passing = 0.0 if setting.compile else 4.0 * setting.micro_tokens * setting.shape.n_embd * HEAP.passing
    per_byte = HEAP.compiled_activations if setting.compile else HEAP.eager_activations
    return activation_bytes(setting, calibration) * per_byte + passing


def _loss_in_heap(setting: Setting) -> float:
    """Logits and the head's gradient; the loss is never compiled here."""
    shape, tokens = setting.shape, setting.micro_tokens
    head = 4.0 * shape.vocab_size * shape.n_embd
    if setting.chunked_loss:  # a CPU's softmax works on a few rows at a time in chunks
        rows = min(memory.FITTED.chunk_tokens, tokens)
        copies = HEAP.head_tied if setting.dtype == "float32" else HEAP.head_16_bit
        return rows * shape.vocab_size * setting.element_bytes * HEAP.chunk + head * copies
    logits = 4.0 * tokens * shape.vocab_size
    if setting.dtype != "float32":
        return logits * HEAP.logits_16_bit + head * HEAP.head_16_bit
    held, copies = (HEAP.logits_tied, HEAP.head_tied) if shape.is_tied else (HEAP.logits, HEAP.head)
    return max(logits * held, LIVING_LOGITS * logits + head * copies)


def activation_bytes(setting: Setting, calibration: Calibration) -> float:
    shape = setting.shape
    channels = setting.micro_tokens * shape.n_embd
    per_block = calibration.saved_bytes[way(setting)] * channels
    if setting.checkpoint_activations:
        return 4.0 * channels * shape.n_layer + per_block
    return per_block * shape.n_layer
