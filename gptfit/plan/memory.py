"""Memory of a training step by part: what torch allocates, what nvidia-smi shows, and what fits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gptfit.config.optimizer_facts import facts_of
from gptfit.estimate import Estimate
from gptfit.gpus import GPU
from gptfit.plan.holding import GRADIENT_BYTES, WEIGHT_BYTES, holding, host_weights, is_on_host
from gptfit.plan.setting import Setting
from gptfit.shape import Kind
from gptfit.units import GIB, MIB

STATE_BYTES = {"float32": 4.0, "8bit": 1 + 4 / 256}  # per number; 8 bits and one float32 scale for 256 numbers

STREAM_BYTES_SPARED = 2.0  # per channel and kept copy of the residual stream, in 16 bits instead of 32

# Weights whose float32 state is on the device at once where it is kept in 8 bits or in host memory; about 256 MiB.
WEIGHTS_AT_ONCE = 32 * 1024**2

# Largest micro-batch worth naming; beyond it no published curve still rises.
MICRO_BATCH_LIMIT = 1024


@dataclass(frozen=True)
class MemoryConstants:
    """Every number of the model that is not arithmetic. Derivations and errors: docs/formulas.md."""

    # Saved for backward per token, layer and channel with autocast: tensors counted one by one eagerly, and of what
    # torch.compile's partitioner keeps from its forward graph (formulas.md).
    block_bytes: float = 36.0
    # Besides, turned queries and keys, and a copy of attention's result; the norms' inputs are the stream itself.
    block_bytes_modern: float = 42.0
    # Outside the blocks at the peak: the embedding, the last norm and the gradient before it.
    outside_bytes: float = 8.0
    # The same block eagerly, counted by torch's tracker (bench/memory.py) at 24 layers: norms and rotary keep their own.
    block_bytes_modern_eager: float = 50.0
    outside_bytes_modern_eager: float = 16.0
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
    """Peak memory of one device, which is at one of three moments of a step."""
    held = holding(setting, state_bytes(setting))
    kept, logits = activation_bytes(setting, constants), logit_bytes(setting, constants)
    whole, at_loss = held.weights + held.copies, held.weights + held.copies_at_loss
    moments: list[dict[str, float]] = [
        # The loss: activations and logits are alive together.
        {"weights": at_loss, "gradients": held.early_gradients, "activations": kept, "logits": logits},
        # Backward through a block whose activations are computed again, beside the gradient of its output.
        {
            "weights": at_loss,
            "gradients": held.early_gradients,
            "activations": kept + computed_again_bytes(setting, constants),
        },
        # The update: the activations are gone, every gradient exists, and state that is kept elsewhere comes by.
        {"weights": whole, "gradients": held.gradients, "optimizer": held.state + passing_state_bytes(setting)},
    ]
    parts = max(({"optimizer": held.state, **moment} for moment in moments), key=lambda moment: sum(moment.values()))
    allocated = sum(parts.values())
    cached = _cached_bytes(setting, held.state + held.gradients, constants)
    device = allocated + cached + constants.context_bytes
    names = ("weights", "gradients", "optimizer", "activations", "logits")
    return Memory(
        {**{name: parts.get(name, 0.0) for name in names}, "workspace": device - allocated},
        Estimate.within(allocated, ALLOCATED_ERROR, "fit"),
        Estimate.within(device, DEVICE_ERROR, "fit"),
    )


def activation_bytes(setting: Setting, constants: MemoryConstants = FITTED) -> float:
    """What the blocks keep for the backward pass."""
    is_kept = not setting.checkpoint_activations
    per_block = _whole_block(setting, constants) if is_kept else _checkpointed_block(setting, constants)
    is_modern_eager = setting.shape.arch == "modern" and not setting.compile
    per_channel = constants.outside_bytes_modern_eager if is_modern_eager else constants.outside_bytes
    outside = per_channel * setting.shape.n_embd * setting.micro_tokens if is_kept or not setting.compile else 0.0
    return per_block * setting.shape.n_layer + outside


def computed_again_bytes(setting: Setting, constants: MemoryConstants = FITTED) -> float:
    """What a checkpointed block adds while it is its turn in backward; nothing where all is kept."""
    if not setting.checkpoint_activations:
        return 0.0
    kept = _checkpointed_block(setting, constants) if setting.checkpoint_activations == "wide" else 0.0
    output_gradient = 4.0 * setting.shape.n_embd * setting.micro_tokens
    return _whole_block(setting, constants) - kept + output_gradient


def _whole_block(setting: Setting, constants: MemoryConstants) -> float:
    shape = setting.shape
    per_block = _block_bytes(setting, constants) * shape.n_embd * setting.micro_tokens
    if setting.writes_scores:
        # Scores before and after softmax in 16 bits, the float32 softmax, and the mask's copy.
        per_block += 12.0 * shape.n_head * shape.block_size * setting.micro_tokens
    return per_block


def _checkpointed_block(setting: Setting, constants: MemoryConstants) -> float:
    is_wide = setting.checkpoint_activations == "wide"
    per_channel = constants.wide_bytes if is_wide else constants.checkpoint_bytes
    if setting.residual_dtype == "bfloat16":
        per_channel -= STREAM_BYTES_SPARED
    if is_wide and setting.dtype == "float32":
        per_channel *= 44 / 24  # twenty of those bytes are 16-bit numbers
    return per_channel * setting.shape.n_embd * setting.micro_tokens


def logit_bytes(setting: Setting, constants: MemoryConstants = FITTED) -> float:
    """Logits, their softmax and gradients: for a small model with a 50k vocabulary the largest term."""
    shape, tokens = setting.shape, setting.micro_tokens
    if setting.chunked_loss:
        chunk = min(constants.chunk_tokens, tokens)
        # One chunk's logits, which become their gradient; where that is not one kernel, float32 copies of a few rows, twice
        # as many where a cap bends them. Then the gradients that are ready in forward: float32 for the hidden states, beside
        # which these are in 16 bits, and for the head.
        chunk_bytes = float(chunk * shape.vocab_size * setting.element_bytes)
        if not (setting.compile and setting.fused_loss):
            chunk_bytes += (16.0 if shape.logit_softcap else 8.0) * min(SOFTMAX_ROWS, chunk) * shape.vocab_size
        return chunk_bytes + 6.0 * tokens * shape.n_embd + 4.0 * shape.vocab_size * shape.n_embd
    if setting.compile:
        # With them the head's gradient, before it is widened.
        one = setting.element_bytes * tokens * shape.vocab_size
        return LOGIT_TENSORS[setting.logits] * one + setting.element_bytes * shape.vocab_size * shape.n_embd
    # In float32 the logits themselves are twice as wide.
    per_logit = constants.logit_bytes_eager + (2 if setting.dtype == "float32" else 0)
    if setting.logits == "replaced":  # a model that returns a loss does not keep them beside their gradient
        per_logit -= setting.element_bytes
    return per_logit * tokens * shape.vocab_size


def state_bytes(setting: Setting) -> float:
    """Optimizer state on the device between updates."""
    is_away = setting.optimizer_device == "cpu"
    kept = 0.0 if is_away else _kept_bytes(setting, _here(setting), setting.optimizer_state)
    return kept + copied_bytes(setting)


def passing_state_bytes(setting: Setting) -> float:
    """What an update brings to the device for a moment, in float32, where state is kept in 8 bits or in host memory."""
    if setting.optimizer_state == "float32" and setting.optimizer_device != "cpu":
        return 0.0
    largest = max((w.size for w in setting.shape.weights() if not is_on_host(setting, w.kind)), default=0)
    here = _here(setting)  # the largest tensor comes whole, however large it is
    share = min(1.0, max(WEIGHTS_AT_ONCE, largest) / max(1, sum(here.values())))
    return _kept_bytes(setting, here, "float32") * share


def _here(setting: Setting) -> dict[Kind, int]:
    """Weights on the device by kind."""
    return {kind: size for kind, size in setting.shape.sizes.items() if not is_on_host(setting, kind)}


def copied_bytes(setting: Setting) -> float:
    """Weights that are there again: averaged over the tail; where they were and how they move, of what looks ahead."""
    averaged = 4.0 * setting.shape.n_weights if setting.average_tail else 0.0
    matrices = setting.shape.sizes["matrix"]
    return averaged + (8.0 * matrices if setting.lookahead and setting.optimizer == "muon" else 0.0)


def kept_state_bytes(setting: Setting, number_format: str | None = None) -> float:
    """Optimizer state of all weights between updates, wherever it is."""
    return _kept_bytes(setting, setting.shape.sizes, number_format or setting.optimizer_state)


def host_bytes(setting: Setting) -> float:
    """What the ladder's last rungs keep in host memory between updates: state, and weights with their gradients.

    Of one process; a divided model's is divided, too.
    """
    away = {kind: size for kind, size in setting.shape.sizes.items() if is_on_host(setting, kind)}
    streamed = setting.shape.sizes if setting.optimizer_device == "cpu" else away
    tables = (WEIGHT_BYTES + GRADIENT_BYTES) * float(host_weights(setting))
    whole = tables + _kept_bytes(setting, streamed, setting.optimizer_state)
    return whole / setting.processes if setting.is_sharded else whole


def machine_host_bytes(setting: Setting) -> float:
    """That of all processes of one machine, which share its main memory."""
    return host_bytes(setting) * setting.processes_per_machine


def _kept_bytes(setting: Setting, sizes: Mapping[Kind, int], number_format: str) -> float:
    facts = facts_of(setting.optimizer)
    return STATE_BYTES[number_format] * sum(size * facts.numbers(kind) for kind, size in sizes.items())


def usable_bytes(gpu: GPU, used_bytes: float | None = None) -> float:
    """What a training process can have: the card less what others hold, measured when it is this machine's card."""
    total = gpu.vram_gib * GIB
    if used_bytes is not None:
        return total - max(used_bytes, HEADLESS_BYTES)
    return total - (min(DESKTOP_BYTES, DESKTOP_SHARE * total) if gpu.is_geforce else HEADLESS_BYTES)


def fit_chance(needs: Estimate, usable_bytes: float) -> float:
    """How likely the memory is enough: its range holds nine of ten cases, so its ends are 1.645 sigma away."""
    sigma = max(1.0, (needs.high - needs.low) / (2 * 1.645))
    return 0.5 * (1 + math.erf((usable_bytes - needs.value) / (sigma * math.sqrt(2))))  # the normal distribution


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
    base = constants.block_bytes
    if setting.shape.arch == "modern":
        base = constants.block_bytes_modern if setting.compile else constants.block_bytes_modern_eager
    if setting.residual_dtype == "bfloat16":
        base -= 2 * STREAM_BYTES_SPARED  # the inputs of both norms
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
    is_settled = setting.logits == "replaced" and setting.accumulation > 1
    if setting.chunked_loss or (setting.compile and is_settled):
        return spare
    logits = setting.micro_tokens * setting.shape.vocab_size
    if not setting.compile:
        excess = constants.eager_logit_bytes_cached * logits - state_and_gradients
        return (excess + math.hypot(excess, min(constants.eager_sharing_bytes, 1.05 * state_and_gradients))) / 2
    return spare + max(0.0, setting.element_bytes * logits - state_and_gradients)
