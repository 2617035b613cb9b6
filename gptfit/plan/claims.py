"""Sizes a config claims in names and comments ("125M") that its shape does not have."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator, Sequence

from gptfit.config.keys import DEFAULTS, TrainConfig
from gptfit.shape import ModelShape
from gptfit.units import si

# A number of parameters: 124M, 1.5B; not 0.5M tokens, 10BT, fineweb10B or 300B tokens.
CLAIM = re.compile(r"(?<![\w.])(\d{1,4}(?:\.\d+)?)\s?([MmBb])(?:illion)?(?![\w.]\w)(?!\w)")
ABOUT_DATA = re.compile(r"tok|byte|word|doc|row|step|iter|web|edu|data|corpus|batch", re.IGNORECASE)
TOLERANCE = 0.15  # people say 125M for 124.4M and 350M for 354M
OF_A_VOCABULARY = re.compile(r"vocabulary ([\d,]+)")  # as our own comments have it
NAMES = ("wandb_run_name", "out_dir")


def wrong_claims(config: TrainConfig, shape: ModelShape, texts: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(key, message, fix) for each name or comment that claims another size."""
    seen = set()
    for key in NAMES:
        name = str(getattr(config, key))
        if name != DEFAULTS[key]:
            # Words of a name are joined by - and _: look at each with its neighbours' meaning in mind.
            for claim, size in _claims(name.replace("_", "-"), around=9):
                if _differs(size, shape) and claim not in seen:
                    seen.add(claim)
                    yield key, _message(f"{key} {name!r} says {claim}", shape), "rename it or change the shape"
    for text in texts:
        for comment in _comments(text):
            said = OF_A_VOCABULARY.search(comment)
            if said and said[1].rstrip(",") != f"{shape.vocab_size:,}":
                continue  # true of the vocabulary it names, and the data has another
            for claim, size in _claims(comment, around=24):
                if _differs(size, shape) and claim not in seen:
                    seen.add(claim)
                    yield (
                        "n_embd",
                        _message(f"a comment says {claim}", shape),
                        "correct the comment or change the shape",
                    )


def _claims(text: str, around: int) -> Iterator[tuple[str, float]]:
    for found in CLAIM.finditer(text):
        nearby = text[max(0, found.start() - around) : found.end() + around]
        if not ABOUT_DATA.search(nearby):
            yield found[0], float(found[1]) * (1e6 if found[2] in "Mm" else 1e9)


def _differs(size: float, shape: ModelShape) -> bool:
    """Against the weights and nanoGPT's count, which differ by the position embedding."""
    near = [
        abs(size / actual - 1) <= TOLERANCE for actual in (shape.n_weights, shape.parameters, shape.tied_parameters)
    ]
    return size >= 1e6 and not any(near)


def _message(claim: str, shape: ModelShape) -> str:
    return f"{claim}, the shape has {si(shape.parameters)} parameters"


def _comments(text: str) -> Iterator[str]:
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.string
    except (tokenize.TokenError, SyntaxError):
        return  # the config reader has its own words for such a file
