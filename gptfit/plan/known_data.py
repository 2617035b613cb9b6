"""Public data sets a config may name without having prepared them."""

from __future__ import annotations

from gptfit.estimate import Estimate
from gptfit.plan.result import DataFacts


def _published(tokens: int) -> Estimate:
    return Estimate(float(tokens), float(tokens), float(tokens), "published")


# Tokens of the training split as the readme.md files in nanoGPT's data folders state them.
KNOWN_DATA = {
    "openwebtext": DataFacts("openwebtext", _published(9_035_582_198), tokenizer="gpt2"),
    "shakespeare": DataFacts("shakespeare", _published(301_966), tokenizer="gpt2"),
    "shakespeare_char": DataFacts("shakespeare_char", _published(1_003_854), 65, "chars", 1.0),
}
