"""Speed of a training step: a roofline of matmul FLOPs, bytes moved by everything else, and fixed costs per step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gptfit.estimate import Basis, Estimate
from gptfit.gpus import GPU, NANOGPT_PEAK_TFLOPS
from gptfit.measured import MeasuredSpeed
from gptfit.plan import formats, link, matmul_rate
from gptfit.plan.holding import head_weights, host_weights
from gptfit.plan.memory import host_bytes, kept_state_bytes
from gptfit.plan.setting import Setting

if TYPE_CHECKING:
    from gptfit.plan.calibration import Calibration

A100_TFLOPS = NANOGPT_PEAK_TFLOPS
CALIBRATED_ERROR = 0.15  # all of 71 shapes that were never timed, of three seeds (docs/accuracy.md has the last 24)
MEASURED_ERROR = 0.03  # three logs of one RTX 4070 over five months agree to 0.13 %; other machines drift more

MATMUL_TILE = 64  # tensor-core kernels compute whole tiles; a width of 504 costs as much as 512
HEAD_TILE = 32  # flash attention kernels exist for head sizes 32, 64, 96, 128, ...
PCIE_GBS = 12.0  # what pinned copies reach on 4.0 x8, the narrowest link of current GeForce cards; x16 has twice that
HOST_GBS = 20.0  # what one program's passes over main memory reach; two channels of DDR4-3200 are 51 on the data sheet
HOST_ADD_BYTES = 12  # per weight of the head: read twice, written once
HOST_UPDATE_BYTES = 28  # per weight in host memory, whose AdamW step the processor does
PACKING_PASSES = 8  # over the float32 state: shares, roots and codes one after another, not fused
# Of a block's traffic per channel, with a 16-bit residual stream: two sums and norms read and write it (8 bytes each in
# float32), and backward reads it, reads its gradient and writes that (12 each); half of those 40.
STREAM_BYTES_SPARED = 20.0
MUON_ROUND_FLOPS = 6  # per matrix weight, unit of its smaller side and round: three products of two FLOPs each


@dataclass(frozen=True)
class Constants:
    """Byte counts and fixed costs, fitted by bench/fit_speed.py. Meaning and error of each: docs/formulas.md."""

    block_bytes: float = 136.0  # per token, layer and channel, compiled: norms, GELU, residuals, matmul operands
    block_bytes_eager: float = 282.0
    logit_bytes: float = 12.0  # per token and vocabulary entry, compiled: logits, softmax, gradient
    logit_bytes_eager: float = 21.8
    score_bytes: float = 40.6  # per attention score when it is written to memory, compiled
    score_bytes_eager: float = 122.0
    micro_step_weight_bytes: float = 20.3  # per weight and micro-step: 16-bit copy, gradient, accumulation
    update_weight_bytes: float = 32.0  # per weight and update: AdamW reads 4 and writes 3 floats, clipping reads 1
    micro_step_ms: float = 0.5  # host work that the device waits for
    launch_ms_eager: float = 0.45  # host time to launch one block's kernels, forward and backward
    flash_rate: float = 0.586  # flash attention's FLOPs run at this share of the matmuls' rate
    update_ms: float = 3.0  # logging, batches, clipping: once per step
    unaligned_head: float = 1.25  # a vocabulary that is no multiple of 8 costs the head's matmuls this much more


FITTED = Constants()


@dataclass(frozen=True)
class Speed:
    """What a step costs. `shares` says where the time goes and sums to one; it is empty where time was measured."""

    tokens_per_s: Estimate  # all processes together, evals excluded
    ms_per_step: Estimate
    ms_per_micro_step: Estimate
    tflops: float  # achieved per device, as nanoGPT counts FLOPs
    mfu: float | None  # of this card's own peak
    mfu_a100: float  # nanoGPT's figure: of an A100's 312 TFLOPS
    shares: dict[str, float]


def predict(
    setting: Setting,
    gpu: GPU,
    measured: MeasuredSpeed | None = None,
    constants: Constants = FITTED,
    rate_constants: matmul_rate.RateConstants = matmul_rate.FITTED,
    link_constants: link.LinkConstants = link.FITTED,
    calibrated: Calibration | None = None,
) -> Speed | None:
    """Tokens per second on this card, or None when no figure of the card's arithmetic rate exists."""
    if measured is None and calibrated is not None and calibrated.knows(setting):
        return from_calibration(setting, calibrated, gpu, link_constants)
    rate = matmul_rate.matmul_tflops(gpu, setting.dtype, rate_constants)
    if rate is None:
        return from_measurement(setting, measured, gpu) if measured else None
    parts = step_parts(setting, gpu, rate.value, constants)
    one_micro_s = measured.ms_per_micro_step / 1e3 if measured else _micro_seconds(parts, setting)
    parts["network"] = link.traffic(setting, gpu, one_micro_s, link_constants).exposed_seconds
    if measured is not None:
        # The trial timed micro-steps; what it did not time (the update, the network) keeps its estimate.
        untimed_s = parts["network"] + (parts["update"] + parts["host"] if measured.ms_per_update is None else 0.0)
        return from_measurement(setting, measured, gpu, untimed_s)
    step_s = sum(parts.values())
    micro_s = _micro_seconds(parts, setting)
    down, up = (
        a + b
        for a, b in zip(
            matmul_rate.relative_error(gpu, setting.compile), formats.EXTRA_RANGE[setting.matmul], strict=True
        )
    )
    return speed_of_step(setting, gpu, step_s, micro_s, parts, down, up, "fit")


def from_measurement(
    setting: Setting, measured: MeasuredSpeed, gpu: GPU | None = None, untimed_s: float = 0.0
) -> Speed:
    """What `tune` or a run timed on this machine; runs repeat within a few per cent."""
    micro_s = measured.ms_per_micro_step / 1e3
    step_s = micro_s * setting.accumulation + (measured.ms_per_update or 0.0) / 1e3 + untimed_s
    return speed_of_step(setting, gpu, step_s, micro_s, {}, MEASURED_ERROR, MEASURED_ERROR, "measured")


def from_calibration(
    setting: Setting, found: Calibration, gpu: GPU | None = None, link_constants: link.LinkConstants = link.FITTED
) -> Speed:
    """The sum of its work at the costs that `doctor --card` found on this machine."""
    from gptfit.plan import calibration  # late: few machines have been calibrated

    parts = calibration.step_parts(setting, found)
    micro_s = (sum(parts.values()) - parts[calibration.UPDATE]) / setting.accumulation
    if gpu is not None:
        parts["network"] = link.traffic(setting, gpu, micro_s, link_constants).exposed_seconds
    error = CALIBRATED_ERROR
    return speed_of_step(setting, gpu, sum(parts.values()), micro_s, parts, error, error, "calibrated")


MICRO_STEP_PARTS = ("matmul", "attention", "memory traffic", "launches", "host tables")


def step_parts(setting: Setting, gpu: GPU, matmul_tflops: float, constants: Constants = FITTED) -> dict[str, float]:
    """Seconds of one whole step by cause, per device, without the exchange among several."""
    shape, tokens = setting.shape, setting.micro_tokens
    flops_per_s = matmul_tflops * 1e12
    bytes_per_s = gpu.bandwidth_gbs * 1e9
    passes = 4 / 3 if setting.checkpoint_activations is True else 1.0  # blocks run forward twice
    # Norms, activations and sums run forward twice: a third of the blocks' traffic, which is all they are.
    moves = 4 / 3 if setting.checkpoint_activations else 1.0
    blocks, head = block_flops(setting) * passes, head_flops(setting, constants)
    matmul = (blocks + head - formats.saved_flops(setting, gpu, blocks, head)) * tokens / flops_per_s
    flash = 1.0 if setting.writes_scores else constants.flash_rate
    attention = attention_flops(setting) * passes * tokens / (flops_per_s * flash)
    traffic = (block_traffic(setting, constants) * moves + logit_traffic(setting, constants)) * tokens
    traffic += constants.micro_step_weight_bytes * shape.n_weights + formats.cast_bytes(setting)
    on_device = matmul + attention + traffic / bytes_per_s
    launching = 0.0 if setting.compile else constants.launch_ms_eager * 1e-3 * shape.n_layer
    # Launches run ahead of the device; only what it has to wait for counts.
    launches = constants.micro_step_ms * 1e-3 + max(0.0, launching - on_device)
    update = constants.update_weight_bytes * shape.n_weights / bytes_per_s
    if setting.optimizer == "muon":
        update += muon_flops(setting) / setting.processes / flops_per_s  # each makes its part orthogonal
    update += kept_state_seconds(setting, bytes_per_s) + HOST_UPDATE_BYTES * host_weights(setting) / (HOST_GBS * 1e9)
    return {
        "matmul": matmul * setting.accumulation,
        "attention": attention * setting.accumulation,
        "memory traffic": traffic / bytes_per_s * setting.accumulation,
        "launches": launches * setting.accumulation,
        "host tables": host_table_seconds(setting) * setting.accumulation,
        "update": update,
        "host": constants.update_ms * 1e-3,
    }


def kept_state_seconds(setting: Setting, bytes_per_s: float) -> float:
    """Once per update: packing and unpacking on the device, and both ways over PCIe where the state is in host memory."""
    seconds = 0.0
    if setting.optimizer_state == "8bit":
        seconds += PACKING_PASSES * kept_state_bytes(setting, "float32") / bytes_per_s
    if setting.optimizer_device == "cpu":
        # The state of weights that are in host memory themselves stays there.
        streamed = host_bytes(setting) - host_bytes(replace(setting, optimizer_device="auto"))
        seconds += 2 * streamed / (PCIE_GBS * 1e9)
    return seconds


def host_table_seconds(setting: Setting) -> float:
    """Of one micro-step: rows and their gradients over PCIe, the head there and its gradient back, added in host memory."""
    if not host_weights(setting):
        return 0.0
    shape, head = setting.shape, head_weights(setting)
    look_ups = sum(w.kind in ("embedding", "position", "table") for w in shape.weights())
    rows = 2 * 4.0 * look_ups * setting.micro_tokens * shape.n_embd
    carried = rows + (setting.element_bytes + 4.0) * head
    return carried / (PCIE_GBS * 1e9) + HOST_ADD_BYTES * head / (HOST_GBS * 1e9)


def block_flops(setting: Setting) -> float:
    """Of all blocks' matrices, per token, forward and backward, in whole tiles."""
    padded = _round_up(setting.shape.n_embd, MATMUL_TILE) / setting.shape.n_embd
    head = setting.shape.vocab_size * setting.shape.n_embd
    return 6.0 * (setting.shape.matmul_weights - head) * padded**2


def head_flops(setting: Setting, constants: Constants = FITTED) -> float:
    shape = setting.shape
    aligned = 1.0 if shape.vocab_size % 8 == 0 else constants.unaligned_head
    return 6.0 * shape.vocab_size * shape.n_embd * aligned


def attention_flops(setting: Setting) -> float:
    """Flash attention does half the scores (causal) but recomputes them in backward: 7*T*C per layer, not 12."""
    shape = setting.shape
    if setting.writes_scores:
        return 12.0 * shape.n_layer * shape.n_embd * shape.block_size
    head_size = shape.n_embd / shape.n_head
    padded = _round_up(math.ceil(head_size), HEAD_TILE) / head_size
    return 7.0 * shape.n_layer * shape.n_embd * shape.block_size * padded


def block_traffic(setting: Setting, constants: Constants = FITTED) -> float:
    """Bytes the blocks move per token."""
    shape = setting.shape
    per_channel = constants.block_bytes if setting.compile else constants.block_bytes_eager
    if setting.residual_dtype == "bfloat16":
        per_channel -= STREAM_BYTES_SPARED
    traffic = per_channel * shape.n_layer * shape.n_embd
    if setting.writes_scores:
        per_score = constants.score_bytes if setting.compile else constants.score_bytes_eager
        traffic += per_score * shape.n_layer * shape.n_head * shape.block_size
    return traffic * _width(setting)


def logit_traffic(setting: Setting, constants: Constants = FITTED) -> float:
    """Bytes of logits, softmax and gradient per token."""
    fused = setting.compile and not setting.chunked_loss
    per_logit = constants.logit_bytes if fused else constants.logit_bytes_eager
    return per_logit * setting.shape.vocab_size * _width(setting)


def muon_flops(setting: Setting) -> float:
    """Once per update every matrix is made orthogonal, in rounds."""
    matrices = [weight for weight in setting.shape.weights() if weight.kind == "matrix"]
    return float(sum(MUON_ROUND_FLOPS * setting.muon_rounds * w.size * min(w.shape) for w in matrices))


def _micro_seconds(parts: dict[str, float], setting: Setting) -> float:
    return sum(parts[name] for name in MICRO_STEP_PARTS) / setting.accumulation


def _width(setting: Setting) -> float:
    """float32 runs move half as many bytes again: autocast already keeps norms, residuals and softmax in float32."""
    return 1.5 if setting.dtype == "float32" else 1.0


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def speed_of_step(
    setting: Setting,
    gpu: GPU | None,
    step_s: float,
    micro_s: float,
    parts: dict[str, float],
    down: float,
    up: float,
    basis: Basis,
) -> Speed:
    tokens_per_s = setting.tokens_per_step / step_s
    tflops = setting.shape.flops_per_token * tokens_per_s / setting.processes / 1e12
    peak = matmul_rate.peak_tflops(gpu) if gpu else None
    total = sum(parts.values())
    return Speed(
        tokens_per_s=Estimate(tokens_per_s, tokens_per_s * (1 - down), tokens_per_s * (1 + up), basis),
        ms_per_step=_time(step_s, down, up, basis),
        ms_per_micro_step=_time(micro_s, down, up, basis),
        tflops=tflops,
        mfu=tflops / peak.value if peak else None,
        mfu_a100=tflops / A100_TFLOPS,
        shares={name: seconds / total for name, seconds in parts.items()},
    )


def _time(seconds: float, down: float, up: float, basis: Basis) -> Estimate:
    """Slower by `down` means longer."""
    return Estimate(seconds * 1e3, seconds * 1e3 / (1 + up), seconds * 1e3 / (1 - down), basis)
