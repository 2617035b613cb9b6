"""The loss to expect after tuning OpenAI's released weights on one's own text: published figures, a wide range."""

from __future__ import annotations

import math

from gptfit.estimate import Estimate
from gptfit.plan.loss import GPT2_BYTES_PER_TOKEN, Loss
from gptfit.plan.result import DataFacts

# Validation loss on OpenWebText as released (nanoGPT's README, its table of baselines), nats per token.
AS_RELEASED = {"gpt2": 3.12, "gpt2-medium": 2.84, "gpt2-large": 2.67, "gpt2-xl": 2.54}
TUNING = 0.27  # what tuning on the same text takes off: 3.12 to 2.85 for the smallest (the same README)
# Other text, per byte: manuals with repeated phrases below web pages, verse above them.
LOWEST, USUAL, HIGHEST = 0.65, 1.05, 1.7


def tuned_loss(init_from: str, data: DataFacts | None) -> Loss | None:
    """None for weights nobody published a figure of, and for data in another vocabulary than theirs."""
    released = AS_RELEASED.get(init_from)
    if released is None or (data and not data.is_gpt2):
        return None
    bytes_per_token = (data.bytes_per_token if data else None) or GPT2_BYTES_PER_TOKEN
    web = (released - TUNING) / GPT2_BYTES_PER_TOKEN  # nats per byte
    found = Estimate(web * USUAL, web * LOWEST, web * HIGHEST, "published").map(bytes_per_token)
    sentence = f"{init_from}'s published loss on web pages, tuned; other text lies around it"
    bits = found.map(1 / (bytes_per_token * math.log(2)))
    return Loss(found, 0.0, sentence, bits)
