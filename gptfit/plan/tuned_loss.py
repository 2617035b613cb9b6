"""The loss to expect after tuning OpenAI's released weights on one's own text: published figures, a wide range."""

from __future__ import annotations

import math

from gptfit.estimate import Estimate
from gptfit.plan.loss import GPT2_BYTES_PER_TOKEN, Loss, dataset_kind
from gptfit.plan.result import DataFacts

# Validation loss on OpenWebText as released (nanoGPT's README, its table of baselines), nats per token.
AS_RELEASED = {"gpt2": 3.12, "gpt2-medium": 2.84, "gpt2-large": 2.67, "gpt2-xl": 2.54}
TUNING = 0.27  # what tuning on the same text takes off: 3.12 to 2.85 for the smallest (the same README)
# Per byte, against web pages: low end, value, high end. Published for other text is the smallest on Shakespeare, 4.52
# nats per token as released and 3.52 after an epoch (llm.c's README of April 2024; its validation text has 3.30 bytes per
# token), 1.74 times web pages; nanoGPT's validation text is easier (4.03 as released, its issue 210). Manuals with
# repeated phrases lie below web pages, by how much nobody published. The value is the middle of the two that are known.
WEB_PAGES, OTHER_TEXT = (0.9, 1.0, 1.15), (0.65, 1.3, 1.9)


def tuned_loss(init_from: str, data: DataFacts | None) -> Loss | None:
    """None for weights nobody published a figure of, and for data in another vocabulary than theirs."""
    released = AS_RELEASED.get(init_from)
    if released is None or (data and not data.is_gpt2):
        return None
    bytes_per_token = (data.bytes_per_token if data else None) or GPT2_BYTES_PER_TOKEN
    web = (released - TUNING) / GPT2_BYTES_PER_TOKEN  # nats per byte
    is_web = data is None or dataset_kind(data.name) is not None
    low, usual, high = WEB_PAGES if is_web else OTHER_TEXT
    found = Estimate(web * usual, web * low, web * high, "published").map(bytes_per_token)
    sentence = f"{init_from}'s published loss, tuned, on web pages"
    sentence += "" if is_web else " and on Shakespeare; other text may lie anywhere near"
    bits = found.map(1 / (bytes_per_token * math.log(2)))
    return Loss(found, 0.0, sentence, bits)
