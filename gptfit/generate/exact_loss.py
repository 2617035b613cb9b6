"""The exact loss of a split: every token of the file predicted once, with perplexity and bits per byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gptfit.checkpoint.loaded_model import LoadedModel
from gptfit.data.token_files import TokenFile, open_split
from gptfit.data.tokenizer import Tokenizer
from gptfit.dataset import DatasetInfo
from gptfit.device.device import exact_products
from gptfit.errors import DataError, UsageError
from gptfit.units import perplexity

# Tokens per forward pass and per block of logits: 1,024 x 50,304 floats are 200 MB.
TOKENS_PER_PASS = 8192
TOKENS_PER_LOGITS = 1024

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class SplitLoss:
    """Over `tokens` predictions: every token of the file but its first, which nothing precedes; of a masked file those
    that count."""

    split: str
    tokens: int
    loss: float  # nats per token
    text_bytes: int | None
    block_size: int
    stride: int

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable between tokenizers; None when the tokens' text is unknown."""
        return self.loss * self.tokens / math.log(2) / self.text_bytes if self.text_bytes else None


def split_loss(
    opened: LoadedModel,
    info: DatasetInfo,
    split: str = "val",
    stride: int | None = None,
    progress: OnProgress | None = None,
) -> SplitLoss:
    """Windows of block_size side by side, or every `stride` tokens with only what is new in each counted."""
    shape = opened.shape
    stride = shape.block_size if stride is None else stride
    if not 1 <= stride <= shape.block_size:
        raise UsageError(f"--stride {stride} must be from 1 to the model's block_size, {shape.block_size}")
    file = open_split(info, split, 1, shape.vocab_size)
    sizes = _piece_bytes(opened.tokenizer)
    total, n_bytes, done, counted, n_tokens = 0.0, 0, 0, 0, file.n_tokens - 1
    for rows, counts, new in _batches(file, shape.block_size, stride):
        with exact_products():
            losses, targets = _losses(opened, rows, counts, new)
        total += losses
        n_bytes += int(sizes[np.minimum(targets, len(sizes) - 1)].sum())
        counted += targets.size
        done += len(rows) * new
        if progress:
            progress(done, n_tokens)
    assert done == n_tokens, "every token is predicted once"
    if not counted:
        raise DataError(f"{file.files[0]}: no token of it counts", fix="prepare more conversations")
    if not math.isfinite(total):
        raise DataError(
            f"{opened.path}: the loss is not finite", fix="the weights are damaged, use an earlier checkpoint"
        )
    return SplitLoss(split, counted, total / counted, n_bytes or None, shape.block_size, stride)


def _batches(file: TokenFile, block_size: int, stride: int) -> Iterator[tuple[np.ndarray, np.ndarray | None, int]]:
    """(windows one token longer than what the model reads, which of their tokens count, how many predictions at the end
    of each are new)."""
    last = file.n_tokens - 1  # predictions in all
    first = min(block_size, last)
    yield *file.marked_windows(np.zeros(1, dtype=np.int64), first + 1), first
    ends = np.arange(first + stride, last + 1, stride, dtype=np.int64)
    per_pass = max(1, TOKENS_PER_PASS // block_size)
    for i in range(0, len(ends), per_pass):
        yield *file.marked_windows(ends[i : i + per_pass] - block_size, block_size + 1), stride
    rest = last - (int(ends[-1]) if len(ends) else first)
    if rest:
        # Side by side means a short last window, too; a sliding one looks back as far as the others.
        length = rest if stride == block_size else block_size
        yield *file.marked_windows(np.array([last - length], dtype=np.int64), length + 1), rest


@torch.inference_mode()
def _losses(opened: LoadedModel, rows: np.ndarray, counts: np.ndarray | None, new: int) -> tuple[float, np.ndarray]:
    """The sum of the losses of those new predictions that count, and the tokens they were about."""
    tokens = opened.device.put(torch.from_numpy(rows))
    hidden = opened.model.hidden(tokens[:, :-1])[:, -new:].flatten(0, 1)
    targets: Tensor = tokens[:, -new:].flatten()
    asked = rows[:, -new:].ravel()
    if counts is not None:
        chosen = counts[:, -new:].ravel()
        place = opened.device.put(torch.from_numpy(chosen))
        hidden, targets, asked = hidden[place], targets[place], asked[chosen]
    total = 0.0
    for start in range(0, len(targets), TOKENS_PER_LOGITS):
        part = slice(start, start + TOKENS_PER_LOGITS)
        logits = opened.model.head(hidden[part]).float()
        total += float(F.cross_entropy(logits, targets[part], reduction="sum"))
    return total, asked


def _piece_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of text each token stands for; end-of-text, and anything beyond the vocabulary, stands for none."""
    sizes = np.array([len(piece) for piece in tokenizer.pieces] + [0], dtype=np.int64)
    if tokenizer.end_of_text is not None:
        sizes[tokenizer.end_of_text] = 0
    return sizes
