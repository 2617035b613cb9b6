"""When to compute the loss in chunks of tokens, and how large a chunk is."""

from __future__ import annotations

from gptfit.config import TrainConfig
from gptfit.plan.memory import FITTED
from gptfit.run.device import Device
from gptfit.shape import ModelShape

CHUNK_TOKENS = FITTED.chunk_tokens
# On a CPU chunks of more than this were faster than whole logits (bench/train.py), as they stay in place.
WHOLE_LOGITS_BYTES = 256 * 1024**2
# On a card whole logits compile into one graph, so chunks pay only when logits would take this much of what is free.
SHARE_OF_FREE_MEMORY = 0.5
BYTES_PER_LOGIT = 10  # 16-bit logits, float32 copy, float32 gradient


def loss_chunk_tokens(config: TrainConfig, shape: ModelShape, device: Device) -> int:
    """Tokens per chunk, or 0 to compute all logits at once."""
    if config.chunked_loss == "auto":
        return CHUNK_TOKENS if _pays(config.batch_size * config.block_size * shape.vocab_size, device) else 0
    return CHUNK_TOKENS if config.chunked_loss else 0


def _pays(logits: int, device: Device) -> bool:
    if device.kind == "cpu":
        return 4 * logits > WHOLE_LOGITS_BYTES
    return BYTES_PER_LOGIT * logits > SHARE_OF_FREE_MEMORY * device.free_memory_bytes()
