"""Memory of a training step by part: what torch allocates, what nvidia-smi shows, and what fits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gptfit.config.optimizer_facts import facts_of
from gptfit.estimate import Estimate
from gptfit.gpus import GPU
from gptfit.plan.holding import holding
from gptfit.plan.setting import Setting
from gptfit.units import GIB, MIB

STATE_BYTES = {"float32": 4.0, "8bit": 1 + 4 / 256}  # per number; 8 bits and one float32 scale for 256 numbers

# Weights whose float32 state is on the device at once where it is kept in 8 bits or in host memory; about 256 MiB.
WEIGHTS_AT_ONCE = 32 * 1024**2

# Largest micro-batch worth naming; beyond it no published curve still rises.
MICRO_BATCH_LIMIT = 1024


@dataclass(frozen=True)
class MemoryConstants:
    """Every number of the model that is not arithmetic. Derivations and errors: docs/formulas.md."""

    # Saved for backward per token, layer and channel with autocast; tensors counted one by one in formulas.md.
    block_bytes_eager: float = 38.0
    # What torch.compile's partitioner keeps of the same block, counted from its forward graph (formulas.md).
    block_bytes_compiled: float = 36.0
    # Besides, turned queries and keys, and a copy of attention's result; the norms' inputs are the stream itself.
    block_bytes_modern: float = 42.0
    # Outside the blocks at the peak of compiled code: the embedding, the last norm and the gradient before it.
    outside_bytes: float = 8.0
    # With checkpoint_activations='wide': the block's float32 input (4) and, in 16 bits, the results of its products:
    # queries, keys and values (6), attention (2), its projection (2), the MLP's wide layer (8) and its projection (2).
    wide_bytes: float = 24.0
    # Input of each block, kept in float32 when activations are checkpointed; the blocks are recomputed one by one.
    checkpoint_bytes: float = 4.0
    # Per logit: 16-bit logits (2), float32 log-softmax (4) and its two gradients (4 + 4).
    logit_bytes_eager: float = 14.0
    # Reserved but not in use: what splitting and rounding leave over.
    spare_bytes: float = 64.0 * MIB
    spare_share: float = 0.02  # of the activations
    # Eager code was not replayed: a float32 block of logits that stays reserved, and how softly state and gradients share
    # it, as the out-of-memory history of one RTX 4070 gave them.
    eager_logit_bytes_cached: float = 4.15
    eager_sharing_bytes: float = 0.94 * GIB
    # CUDA context, cuBLAS and cuDNN handles, the only constant fitted here: 0.3 GiB on small Ampere cards to 0.9 on a B200.
    context_bytes: float = 426.0 * MIB
    # Tokens whose logits exist at once with chunked_loss.
    chunk_tokens: int = 2048


FITTED = MemoryConstants()
# Tensors of the logits' size that live at once in compiled code, which fuses the softmax away (Setting.logits): the
# logits, which become their gradient; beside their gradient; or beside that and zeros, which autograd makes for a result
# that no loss came from.
LOGIT_TENSORS = {"replaced": 1, "kept": 2, "returned": 3}
# Rows of a chunk whose softmax exists in float32 where it is not compiled; model/head.py.
SOFTMAX_ROWS = 512
ALLOCATED_ERROR = 0.10
DEVICE_ERROR = 0.08

# What a driver, a desktop and fragmentation take before training starts. Published picks fill 48 and 96 GB cards
# without a desktop to 97 %, while 12 GB GeForce cards in desktops run out above 91 %.
DESKTOP_BYTES = 0.98 * GIB
DESKTOP_SHARE = 0.082  # of cards under 12 GB, which would otherwise lose an eighth
HEADLESS_BYTES = 0.25 * GIB


@dataclass(frozen=True)
class Memory:
    """Bytes by part, and the two totals people read: max_memory_allocated and nvidia-smi."""

    parts: dict[str, float]  # weights, gradients, optimizer, activations, logits, workspace
    allocated: Estimate  # bytes torch allocates at the peak
    device: Estimate  # bytes nvidia-smi shows for the process


def predict(setting: Setting, constants: MemoryConstants = FITTED) -> Memory:
    """Peak memory of one device. The peak is at the loss, where activations and logits are alive together."""
    held = holding(setting, state_bytes(setting))
    activations = activation_bytes(setting, constants)
    logits = logit_bytes(setting, constants)
    at_loss = held.weights + held.state + held.early_gradients + activations + logits
    # At the end of backward the activations are gone and every gradient exists.
    at_update = held.weights + held.state + held.gradients
    allocated = max(at_loss, at_update)
    cached = _cached_bytes(setting, held.state + held.gradients, constants)
    device = allocated + cached + constants.context_bytes
    parts = {
        "weights": held.weights,
        "gradients": held.gradients if at_update >= at_loss else held.early_gradients,
        "optimizer": held.state,
        "activations": activations if at_loss > at_update else 0.0,
        "logits": logits if at_loss > at_update else 0.0,
        "workspace": device - allocated,
    }
    return Memory(
        parts,
        Estimate.within(allocated, ALLOCATED_ERROR, "fit"),
        Estimate.within(device, DEVICE_ERROR, "fit"),
    )


def activation_bytes(setting: Setting, constants: MemoryConstants = FITTED) -> float:
    """What the blocks keep for the backward pass."""
    shape = setting.shape
    per_block = _block_bytes(setting, constants) * shape.n_embd * setting.micro_tokens
    if setting.writes_scores:
        # Scores before and after softmax in 16 bits, the float32 softmax, and the mask's copy.
        per_block += 12.0 * shape.n_head * shape.block_size * setting.micro_tokens
    if setting.checkpoint_activations:
        is_wide = setting.checkpoint_activations == "wide"
        kept = (constants.wide_bytes if is_wide else constants.checkpoint_bytes) * shape.n_embd * setting.micro_tokens
        if is_wide and setting.dtype == "float32":
            kept *= 44 / 24  # twenty of those bytes are 16-bit numbers
        # The block whose turn it is in backward is there whole.
        return kept * shape.n_layer + per_block - (kept if is_wide else 0.0)
    outside = constants.outside_bytes * shape.n_embd * setting.micro_tokens if setting.compile else 0.0
    return per_block * shape.n_layer + outside


def logit_bytes(setting: Setting, constants: MemoryConstants = FITTED) -> float:
    """Logits, their softmax and gradients: for a small model with a 50k vocabulary the largest term."""
    shape, tokens = setting.shape, setting.micro_tokens
    if setting.chunked_loss:
        chunk = min(constants.chunk_tokens, tokens)
        # One chunk's logits, which become their gradient; where that is not one kernel, float32 copies of a few rows.
        # Then the gradients that are ready in forward: float32 for the hidden states and for the head, plus the head's
        # 16-bit partial product.
        chunk_bytes = float(chunk * shape.vocab_size * setting.element_bytes)
        if not (setting.compile and setting.fused_loss):
            chunk_bytes += 12.0 * min(SOFTMAX_ROWS, chunk) * shape.vocab_size
        return chunk_bytes + 6.0 * tokens * shape.n_embd + 6.0 * shape.vocab_size * shape.n_embd
    if setting.compile:
        # With them the head's gradient, before it is widened.
        one = setting.element_bytes * tokens * shape.vocab_size
        return LOGIT_TENSORS[setting.way_of_logits] * one + setting.element_bytes * shape.vocab_size * shape.n_embd
    # In float32 the logits themselves are twice as wide.
    per_logit = constants.logit_bytes_eager + (2 if setting.dtype == "float32" else 0)
    return per_logit * tokens * shape.vocab_size


def state_bytes(setting: Setting) -> float:
    """Optimizer state on the device, with what an update brings there for a moment where it is kept otherwise."""
    plain, packed = kept_state_bytes(setting, "float32"), kept_state_bytes(setting, setting.optimizer_state)
    if setting.optimizer_state == "float32" and setting.optimizer_device != "cpu":
        return plain + copied_bytes(setting)
    at_once = plain * min(1.0, WEIGHTS_AT_ONCE / setting.shape.n_weights)
    return at_once + (0.0 if setting.optimizer_device == "cpu" else packed) + copied_bytes(setting)


def copied_bytes(setting: Setting) -> float:
    """Weights that are there again: averaged over the tail; where they were and how they move, of what looks ahead."""
    averaged = 4.0 * setting.shape.n_weights if setting.average_tail else 0.0
    matrices = setting.shape.sizes["matrix"]
    return averaged + (8.0 * matrices if setting.lookahead and setting.optimizer == "muon" else 0.0)


def kept_state_bytes(setting: Setting, number_format: str | None = None) -> float:
    """Optimizer state of all weights between updates, wherever it is."""
    per_number = STATE_BYTES[number_format or setting.optimizer_state]
    facts = facts_of(setting.optimizer)
    return per_number * sum(size * facts.numbers(kind) for kind, size in setting.shape.sizes.items())


def usable_bytes(gpu: GPU, used_bytes: float | None = None) -> float:
    """What a training process can have: the card less what others hold, measured when it is this machine's card."""
    total = gpu.vram_gib * GIB
    if used_bytes is not None:
        return total - max(used_bytes, HEADLESS_BYTES)
    return total - (min(DESKTOP_BYTES, DESKTOP_SHARE * total) if gpu.is_geforce else HEADLESS_BYTES)


def fits(setting: Setting, gpu: GPU, used_bytes: float | None = None) -> bool:
    return predict(setting).device.value <= usable_bytes(gpu, used_bytes)


def largest_micro_batch(setting: Setting, gpu: GPU, used_bytes: float | None = None) -> int:
    """The largest micro-batch that fits, 0 if not even one row does. Device memory only grows with it."""
    low, high = 0, MICRO_BATCH_LIMIT + 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(replace(setting, micro_batch=middle), gpu, used_bytes):
            low = middle
        else:
            high = middle
    return low


def _block_bytes(setting: Setting, constants: MemoryConstants) -> float:
    if setting.compile:
        base = constants.block_bytes_modern if setting.shape.arch == "modern" else constants.block_bytes_compiled
    else:
        base = constants.block_bytes_eager
    if setting.dtype == "float32":
        # Two thirds of what is kept is 16 bits wide under autocast (formulas.md), so all-float32 keeps 1.75 times.
        base *= 1.75
    return base


def _cached_bytes(setting: Setting, state_and_gradients: float, constants: MemoryConstants) -> float:
    """Reserved but not allocated; the allocator's rules replayed over the tensors of a step say so (bench/replay.py).

    Gradients and optimizer state that are made in the first step are put where its logits were, which therefore need
    another place; what does not fill the first is lost. Training here makes them before (`Engine.settle`).
    """
    spare = constants.spare_bytes + constants.spare_share * activation_bytes(setting, constants)
    is_settled = setting.way_of_logits == "replaced" and setting.accumulation > 1
    if setting.chunked_loss or (setting.compile and is_settled):
        return spare
    logits = setting.micro_tokens * setting.shape.vocab_size
    if not setting.compile:
        excess = constants.eager_logit_bytes_cached * logits - state_and_gradients
        return (excess + math.hypot(excess, min(constants.eager_sharing_bytes, 1.05 * state_and_gradients))) / 2
    return spare + max(0.0, setting.element_bytes * logits - state_and_gradients)
