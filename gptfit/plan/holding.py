"""What one process holds of weights, gradients and optimizer state: all of it, or with parallel='fsdp' its part."""

from __future__ import annotations

from dataclasses import dataclass

from gptfit.plan.setting import Setting

WEIGHT_BYTES = 4  # float32 master weights, as nanoGPT keeps them
GRADIENT_BYTES = 4
GATHERED_BLOCKS = 2  # weights of the block at work and of the next one, fetched ahead


@dataclass(frozen=True)
class Holding:
    """Bytes of one process that do not depend on the micro-batch."""

    weights: float  # with 16-bit copies, or the gathered blocks
    state: float
    gradients: float  # when all exist
    early_gradients: float  # those that exist already at the first loss of a step


def holding(setting: Setting, state_bytes: float) -> Holding:
    weights, n = setting.shape.n_weights, setting.processes
    if setting.is_sharded:
        outside, block = _outside_blocks(setting), _block(setting)
        gathered = WEIGHT_BYTES * outside + setting.element_bytes * GATHERED_BLOCKS * block
        # A block's gradient is whole until it is scattered; those outside the blocks until the end of backward.
        gradients = GRADIENT_BYTES * (weights / n + outside + block)
        early = GRADIENT_BYTES * weights / n if setting.accumulation > 1 else 0.0
        return Holding(WEIGHT_BYTES * weights / n + gathered, state_bytes / n, gradients, early)
    copies = 2.0 * weights if setting.dtype != "float32" else 0.0  # autocast's 16-bit weights
    gradients = GRADIENT_BYTES * weights
    if setting.gradient_dtype == "bfloat16":
        gradients -= 2.0 * setting.shape.sizes["matrix"]
    # Gradients are set to None after an update: with a single micro-step none exist yet when the loss peaks.
    # With several processes they live in DDP's buckets (gradient_as_bucket_view), which stay.
    is_early = setting.accumulation > 1 or n > 1
    return Holding(WEIGHT_BYTES * weights + copies, state_bytes, gradients, gradients if is_early else 0.0)


def _outside_blocks(setting: Setting) -> int:
    """Embeddings, head and whatever is no block's: gathered for the whole step."""
    weights = setting.shape.weights()
    return sum(weight.size for weight in weights if not weight.name.startswith("transformer.h."))


def _block(setting: Setting) -> float:
    return (setting.shape.n_weights - _outside_blocks(setting)) / setting.shape.n_layer
