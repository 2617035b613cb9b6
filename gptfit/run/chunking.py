"""When to compute the loss in chunks of tokens, and how large a chunk is."""

from __future__ import annotations

from gptfit.config import TrainConfig
from gptfit.run.device import Device
from gptfit.shape import ModelShape

CHUNK_TOKENS = 2048
# Logits below this are cheaper whole: bytes of one micro-batch's logits in float32.
WHOLE_LOGITS_BYTES = 256 * 1024**2


def loss_chunk_tokens(config: TrainConfig, shape: ModelShape, device: Device) -> int:
    """Tokens per chunk, or 0 to compute all logits at once."""
    if config.chunked_loss is False:
        return 0
    logits_bytes = config.batch_size * config.block_size * shape.vocab_size * 4
    if config.chunked_loss == "auto" and logits_bytes < WHOLE_LOGITS_BYTES:
        return 0
    return CHUNK_TOKENS
