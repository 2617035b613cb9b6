"""Encode: a batch of documents to the tokens of train and of val, end-of-text tokens in place."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gptfit.data.documents import Batch, slices
from gptfit.data.lines import SAFE_CUT
from gptfit.data.tokenizer import Tokenizer

Tokens = NDArray[np.unsignedinteger]

LONG_CHARS = 2**20  # a longer document is encoded in fragments, to bound the encoder's memory
CALL_CHARS = 4 * 2**20  # text per call of the encoder
# One "word" of this length is no language; encoding it would take gigabytes (about 50 bytes a character).
MOST_UNBROKEN_CHARS = 16 * 2**20


@dataclass(frozen=True)
class Piece:
    """The tokens of one batch, in order, and what to count. Arrays hold one entry per document."""

    train: Tokens
    val: Tokens
    lengths: NDArray[np.int64]  # tokens, with the end-of-text
    is_val: NDArray[np.bool_]
    text_bytes: NDArray[np.int64]
    rows: int
    source_bytes: int
    continues: bool  # the last document is not finished
    skipped: Counter[str]
    replaced: Counter[str]
    problems: list[str]


def encode_documents(batch: Batch, tokenizer: Tokenizer, separator: int | None) -> Piece:
    """Each document's tokens followed by `separator`, if there is one and the document is finished."""
    dtype = np.dtype(tokenizer.dtype)
    ids, ends = _encode_texts(batch, tokenizer, dtype)
    n_ended = len(ends) - batch.continues if separator is not None else 0
    lengths = np.diff(ends, prepend=0)
    if n_ended > 0:
        ids = np.insert(ids, ends[:n_ended], dtype.type(separator))
        lengths[:n_ended] += 1
    train, val = _divide(ids, lengths, batch.val)
    return Piece(
        train=train,
        val=val,
        lengths=lengths,
        is_val=batch.val,
        text_bytes=np.array([_utf8_length(text) for text in batch.texts], np.int64),
        rows=batch.rows,
        source_bytes=batch.source_bytes,
        continues=batch.continues,
        skipped=batch.skipped,
        replaced=batch.replaced,
        problems=batch.problems,
    )


def _encode_texts(
    batch: Batch, tokenizer: Tokenizer, dtype: np.dtype[np.unsignedinteger]
) -> tuple[Tokens, NDArray[np.int64]]:
    """All texts as one array and each text's end in it. Texts that cannot be encoded leave the batch."""
    fragments: list[str] = []
    last_fragment: list[int] = []  # of each text
    refused = []
    for i, text in enumerate(batch.texts):
        cut = [text] if len(text) <= LONG_CHARS else _fragments(text, tokenizer)
        if cut is None:
            refused.append(i)
            continue
        fragments += cut
        last_fragment.append(len(fragments) - 1)
    _drop(batch, refused)
    arrays, ends, total = [], [], 0
    for start, stop in slices([len(fragment) for fragment in fragments], CALL_CHARS):
        ids, call_ends = tokenizer.encoder.encode_batch(fragments[start:stop])
        arrays.append(ids.astype(dtype))
        ends.append(call_ends + total)
        total += len(ids)
    if not arrays:
        return np.empty(0, dtype), np.empty(0, np.int64)
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0], np.concatenate(ends)[last_fragment]


def _fragments(text: str, tokenizer: Tokenizer) -> list[str] | None:
    """The text cut where no token spans; None when a part that may not be cut is too long to encode."""
    if tokenizer.cut == "anywhere":
        return [text[start : start + LONG_CHARS] for start in range(0, len(text), LONG_CHARS)]
    found, start = [], 0
    while tokenizer.cut == "blanks" and len(text) - start > LONG_CHARS:
        place = SAFE_CUT.search(text, start + LONG_CHARS)
        if place is None:
            break
        found.append(text[start : place.end()])
        start = place.end()
    found.append(text[start:])
    return found if max(map(len, found)) <= MOST_UNBROKEN_CHARS else None


def _drop(batch: Batch, refused: list[int]) -> None:
    if not refused:
        return
    batch.skipped["unbroken run over 16 MiB"] += len(refused)
    batch.problems.append(f"{len(refused)} document(s) with an unbroken run of over 16 MiB skipped")
    if batch.continues and refused[-1] == len(batch.texts) - 1:
        batch.continues = False
    batch.texts = [text for i, text in enumerate(batch.texts) if i not in set(refused)]
    batch.val = np.delete(batch.val, refused)


def _divide(ids: Tokens, lengths: NDArray[np.int64], is_val: NDArray[np.bool_]) -> tuple[Tokens, Tokens]:
    """The train tokens and the val tokens. Most batches hold no validation document and are passed through."""
    if not is_val.any():
        return ids, ids[:0]
    if is_val.all():
        return ids[:0], ids
    in_val = np.repeat(is_val, lengths)
    return ids[~in_val], ids[in_val]


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8"))
