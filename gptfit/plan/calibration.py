"""Calibration: this device's own cost of every kind of work, and what a step of any shape costs by them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gptfit import sane
from gptfit.config import recipe
from gptfit.estimate import Estimate
from gptfit.gpus import GPU
from gptfit.measured import MOST, MeasuredDevice, Measurements
from gptfit.plan import memory
from gptfit.plan.resolve import Place, on_card
from gptfit.plan.setting import DTYPE_BYTES, Setting
from gptfit.plan.step_work import block_weights, kinds_of_work, micro_work, update_work
from gptfit.shape import ModelShape
from gptfit.units import GIB


@dataclass(frozen=True)
class Heap:
    """Bytes that the C library's heap holds for a byte that lives: it never gives back, and holes are left where
    tensors of other sizes were. Fitted on 28 trials, the loss on 41 others (docs/formulas.md)."""

    eager_activations: float = 1.34
    compiled_activations: float = 1.25
    passing: float = 19.8  # float32 tensors of the residual stream's size that live for a moment in eager backward
    passing_compiled: float = (
        25.0  # in that of compiled modern blocks in float32; other compiled ones have none to speak of
    )
    # Copies of whole float32 logits. Three live. A head that is the embedding too has a gradient that waits for the end of
    # backward, and keeps the holes on its two sides apart.
    logits: float = 5.8
    logits_tied: float = 7.4
    # Copies of the head's gradient beside three of the logits, where that is more: few tokens, a wide model.
    head: float = 4.0
    head_tied: float = 4.7
    logits_16_bit: float = 4.9  # of float32 logits
    head_16_bit: float = 1.3
    chunk: float = 1.25  # of a chunk's logits
    chunk_16_bit: float = 2.0
    head_chunked: float = (
        2.0  # copies of the head's gradient beside them; as many as above where it is the embedding too
    )
    muon: float = 2.7  # copies of the blocks' weights, in the format that Muon's momentum is made orthogonal in


HEAP = Heap()
MEMORY_ERROR = 0.10  # nine of ten shapes that were never run (docs/accuracy.md)
KINDS = ("cpu", "cuda", "mps")
UPDATE = "update"  # the part of a step that does not repeat with its micro-steps
LEAST_SHARE = 0.2  # of what eager blocks take that compiled ones take at least
LIVING_LOGITS = 3  # the softmax, its gradient and that of the logits

Costs = Mapping[str, float]


@dataclass(frozen=True)
class Calibration:
    """What was timed on one device.

    `costs`    seconds per unit of each kind of work in a micro-step, by number format; `update_costs` the same of an update
    `saved_by_compiling`  seconds per token and channel of a block, by architecture, at the widths where both ways were timed
    """

    device: str  # as torch names it, which is how measurements are keyed
    torch: str
    costs: Mapping[str, Costs]
    update_costs: Mapping[str, Costs]
    saved_by_compiling: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    kind: str = "cpu"  # one of KINDS
    dtype: str = "float32"  # what 'auto' means there
    saved_bytes: Mapping[str, float] = field(default_factory=dict)  # for backward per token, channel and block, by way
    context_bytes: Mapping[str, float] = field(default_factory=dict)  # of a process without a model: eager, compiled
    total_bytes: float = 0.0
    time: float = 0.0

    def knows(self, setting: Setting) -> bool:
        """Whether every part of such a step was timed; norms, positions and activations that are no default were not, nor
        was anything that is kept in another format or another place."""
        return (
            uncounted(setting.shape) == _usual(setting.shape)
            and not setting.writes_scores
            and way(setting) in self.saved_bytes
            and setting == _as_timed(setting)
            and setting.dtype in self.costs
            and setting.dtype in self.update_costs
            and (not setting.compile or setting.shape.arch in self.saved_by_compiling)
            and ("compiled" if setting.compile else "eager") in self.context_bytes
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "torch": self.torch,
            "costs": {dtype: dict(costs) for dtype, costs in self.costs.items()},
            "update_costs": {dtype: dict(costs) for dtype, costs in self.update_costs.items()},
            "saved_by_compiling": {arch: list(map(list, saved)) for arch, saved in self.saved_by_compiling.items()},
            "kind": self.kind,
            "dtype": self.dtype,
            "saved_bytes": dict(self.saved_bytes),
            "context_bytes": dict(self.context_bytes),
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


def _as_timed(setting: Setting) -> Setting:
    """What no model of a calibration has, at its default."""
    return replace(
        setting,
        matmul=Setting.matmul,
        residual_dtype=Setting.residual_dtype,
        gradient_dtype=Setting.gradient_dtype,
        optimizer_state=Setting.optimizer_state,
        optimizer_device=Setting.optimizer_device,
        embedding_device=Setting.embedding_device,
        attention=Setting.attention,
        parallel=Setting.parallel,
    )


def calibration_from_json(values: Mapping[str, Any]) -> Calibration:
    """ValueError or KeyError where it is none, or its numbers can be nobody's: the file may have been sent."""
    found = sane.mapping(values, "a calibration")
    micro_kinds, update_kinds = kinds_of_work()
    return Calibration(
        device=sane.text(found["device"], "device", 300),
        torch=sane.text(found["torch"], "torch", 300),
        costs=_costs(found, "costs", micro_kinds),
        update_costs=_costs(found, "update_costs", update_kinds),
        saved_by_compiling=_saved(found),
        kind=sane.choice(found["kind"], "kind", KINDS),
        dtype=sane.choice(found["dtype"], "dtype", DTYPE_BYTES),
        saved_bytes=_amounts(found, "saved_bytes"),
        context_bytes=_amounts(found, "context_bytes"),
        total_bytes=_amount(found, "total_bytes"),
        time=_amount(found, "time"),
    )


def _costs(values: Mapping[str, Any], name: str, kinds: frozenset[str]) -> dict[str, dict[str, float]]:
    """A cost of every kind of work and of nothing else: another version knows others."""
    found = sane.mapping(values[name], name)
    costs = {sane.choice(dtype, name, DTYPE_BYTES): _amounts(found, dtype) for dtype in found}
    if any(each.keys() != kinds for each in costs.values()):
        raise ValueError(f"{name} has not a cost of every kind of work")
    return costs


def _saved(values: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Seconds may be below zero: not everything is quicker compiled."""
    found = {}
    for arch, points in sane.mapping(values["saved_by_compiling"], "saved_by_compiling").items():
        pairs = [sane.sequence(pair, arch, 2) for pair in sane.sequence(points, arch, 100)]
        if not pairs or any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"saved_by_compiling of {arch} is not widths with seconds")
        widths = [sane.number(pair[0], "a width", 1, sane.MOST_WIDTH) for pair in pairs]
        if widths != sorted(set(widths)):
            raise ValueError(f"the widths of saved_by_compiling of {arch} must ascend")
        found[arch] = [
            (width, sane.number(pair[1], "seconds", -1.0, 1.0)) for width, pair in zip(widths, pairs, strict=True)
        ]
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


def step_parts(setting: Setting, calibration: Calibration) -> dict[str, float]:
    """Seconds of one whole step by cause, on one device."""
    costs, update_costs = calibration.costs[setting.dtype], calibration.update_costs[setting.dtype]
    parts = {cause: _seconds(work, costs) for cause, work in micro_work(setting).items()}
    if setting.compile:
        parts["blocks"] -= min(_saved_seconds(setting, calibration), (1 - LEAST_SHARE) * parts["blocks"])
    repeated = {cause: seconds * setting.accumulation for cause, seconds in parts.items()}
    return {**repeated, UPDATE: _seconds(update_work(setting), update_costs)}


def _seconds(work: Mapping[str, float], costs: Costs) -> float:
    return sum(amount * costs[kind] for kind, amount in work.items())


def _saved_seconds(setting: Setting, calibration: Calibration) -> float:
    """By compiling: between two widths along a straight line over the width's logarithm, outside as at the edge."""
    shape = setting.shape
    each = between(calibration.saved_by_compiling[shape.arch], shape.n_embd)
    return each * setting.micro_tokens * shape.n_embd * shape.n_layer


def between(points: Sequence[tuple[float, float]], where: float) -> float:
    """
    >>> between([(1, 0.0), (100, 2.0)], 10), between([(1, 0.0), (100, 2.0)], 1000)
    (1.0, 2.0)
    """
    for (low, at_low), (high, at_high) in itertools.pairwise(points):
        if low <= where <= high:
            return at_low + (at_high - at_low) * math.log(where / low) / math.log(high / low)
    return points[0][1] if where < points[0][0] else points[-1][1]


def micro_seconds(setting: Setting, calibration: Calibration) -> float:
    """Of one micro-step."""
    parts = step_parts(setting, calibration)
    return (sum(parts.values()) - parts[UPDATE]) / setting.accumulation


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
    shape, passing = setting.shape, HEAP.passing
    if setting.compile:
        passing = HEAP.passing_compiled if (shape.arch, setting.dtype) == ("modern", "float32") else 0.0
    per_byte = HEAP.compiled_activations if setting.compile else HEAP.eager_activations
    return activation_bytes(setting, calibration) * per_byte + 4.0 * setting.micro_tokens * shape.n_embd * passing


def _loss_in_heap(setting: Setting) -> float:
    """Logits and the head's gradient; the loss is never compiled here."""
    shape, tokens = setting.shape, setting.micro_tokens
    head = 4.0 * shape.vocab_size * shape.n_embd
    if setting.chunked_loss:  # a CPU's softmax works on a few rows at a time in chunks
        chunk = min(memory.FITTED.chunk_tokens, tokens) * shape.vocab_size * setting.element_bytes
        if setting.dtype != "float32":
            return chunk * HEAP.chunk_16_bit + head * HEAP.head_16_bit
        return chunk * HEAP.chunk + head * (HEAP.head_tied if shape.is_tied else HEAP.head_chunked)
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
