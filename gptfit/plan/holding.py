"""What one process holds of weights, gradients and optimizer state: all of it, or with parallel='fsdp' its part."""

from __future__ import annotations

from dataclasses import dataclass

from gptfit.plan.setting import Setting

WEIGHT_BYTES = 4  # float32 master weights, as nanoGPT keeps them
GRADIENT_BYTES = 4
GATHERED_UNITS = 2  # weights of the block at work and of the next one, fetched ahead
HOST_KINDS = ("embedding", "position", "table", "head")  # what embedding_device = 'cpu' keeps away


@dataclass(frozen=True)
class Holding:
    """Bytes of one process that do not depend on the micro-batch."""

    weights: float  # with the gathered blocks of a divided model
    state: float
    gradients: float  # when all exist
    early_gradients: float  # those that exist already at the first loss of a step
    copies: float = 0.0  # of weights, in the format they are multiplied in
    copies_at_loss: float = 0.0  # those that exist there


def holding(setting: Setting, state_bytes: float) -> Holding:
    weights, n = setting.shape.n_weights, setting.processes
    if setting.is_sharded:
        return _of_part(setting, state_bytes)
    away = host_weights(setting)
    copies = _copies(setting)
    gradients: float = GRADIENT_BYTES * (weights - away)
    if setting.gradient_dtype == "bfloat16":
        gradients -= 2.0 * setting.shape.sizes["matrix"]
    # Gradients are set to None after an update: with a single micro-step none exist yet when the loss peaks. (On a CPU those of
    # tables do, which its own plan counts: plan/calibration.py.)
    # With several processes they live in DDP's buckets (gradient_as_bucket_view), which stay.
    is_early = setting.accumulation > 1 or n > 1
    return Holding(
        WEIGHT_BYTES * (weights - away),
        state_bytes,
        gradients,
        early_gradients=gradients if is_early else 0.0,
        copies=copies,
        copies_at_loss=copies - _given_back(setting),
    )


def _copies(setting: Setting) -> float:
    """Autocast's 16-bit weights, of all that is multiplied and not looked up; in float32 a head in host memory's for the loss."""
    if setting.dtype != "float32":
        return 2.0 * setting.shape.matmul_weights
    return float(WEIGHT_BYTES * head_weights(setting)) if host_weights(setting) else 0.0


def _given_back(setting: Setting) -> float:
    """Copies of what an eagerly checkpointed block multiplies, which it makes again in backward."""
    is_eager = setting.checkpoint_activations and not setting.compile and setting.dtype != "float32"
    return 2.0 * setting.shape.sizes["matrix"] if is_eager else 0.0


def host_weights(setting: Setting) -> int:
    """Weights that are in host memory."""
    return sum(size for kind, size in setting.shape.sizes.items() if is_on_host(setting, kind))


def is_on_host(setting: Setting, kind: str) -> bool:
    """Whether weights of this kind are."""
    return setting.embedding_device == "cpu" and kind in HOST_KINDS


def head_weights(setting: Setting) -> int:
    return setting.shape.vocab_size * setting.shape.n_embd


def _of_part(setting: Setting, state_bytes: float) -> Holding:
    """Of a divided model: an n-th of everything, and what is whole for a while."""
    weights, n = setting.shape.n_weights, setting.processes
    units = unit_sizes(setting)
    largest, outside = max(units), weights - sum(units)
    gathered = WEIGHT_BYTES * outside + setting.element_bytes * GATHERED_UNITS * largest
    # A unit's gradient is whole until it is summed; those outside the units until the end of backward.
    gradients = early = GRADIENT_BYTES * weights / n
    if setting.accumulation == 1:
        early = 0.0
    elif setting.sums_late:
        early = GRADIENT_BYTES * weights
        gradients += early
    if not setting.sums_late or setting.accumulation == 1:
        gradients += GRADIENT_BYTES * (outside + largest)
    return Holding(WEIGHT_BYTES * weights / n + gathered, state_bytes / n, gradients, early)


def unit_sizes(setting: Setting) -> list[int]:
    """Weights of what is gathered by itself: blocks and tables (`units` of the model). The rest is whole for a micro-step."""
    sizes: dict[str, int] = {}
    for weight in setting.shape.weights():
        if weight.name.startswith(("transformer.h.", "values.", "bigram.")):
            unit = ".".join(
                weight.name.split(".")[:3] if weight.name.startswith("transformer") else weight.name.split(".")[:2]
            )
            sizes[unit] = sizes.get(unit, 0) + weight.size
    return list(sizes.values())
