"""Encode: a batch of documents to the tokens of train and of val, end-of-text tokens in place."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gptfit.data import work
from gptfit.data.documents import DocumentBatch, RowAccount
from gptfit.data.lines import SAFE_CUT
from gptfit.data.tokenizer import Tokenizer

Tokens = NDArray[np.unsignedinteger]

LONG_CHARS = 2**20  # a longer document is encoded in fragments, to bound the encoder's memory
# One "word" of this length is no language; encoding it would take gigabytes (about 50 bytes a character).
MOST_UNBROKEN_CHARS = 16 * 2**20


@dataclass(frozen=True)
class EncodedBatch:
    """The tokens of one batch, in order, and what became of their rows. Arrays named in the plural hold one entry per document."""

    train: tuple[Tokens, ...]
    val: tuple[Tokens, ...]
    lengths: NDArray[np.int64]  # tokens, with the end-of-text
    is_val: NDArray[np.bool_]
    text_bytes: NDArray[np.int64]
    account: RowAccount
    is_masked: bool = False

    @property
    def counted(self) -> tuple[int, int] | None:
        """Tokens of train and of val that a loss is about, where some are not: they have bit 31."""
        if not self.is_masked:
            return None
        train, val = (sum(int((tokens >> 31).sum()) for tokens in side) for side in (self.train, self.val))
        return train, val


def encode_documents(batch: DocumentBatch, tokenizer: Tokenizer, separator: int | None) -> EncodedBatch:
    """Each document's tokens followed by `separator`, if there is one and the document is finished."""
    cuts = _cuts_of_long_texts(batch, tokenizer)
    lengths = np.zeros(len(batch.texts), np.int64)
    unfinished = len(batch.texts) - 1 if batch.account.continues else -1
    train, val = [], []
    for owner, texts, is_last in _calls(batch, cuts) if cuts else [_one_call(batch)]:
        closes = is_last & (owner != unfinished) if separator is not None else np.zeros(len(owner), np.bool_)
        ids, counts = _encode_call(texts, closes, tokenizer, separator)
        np.add.at(lengths, owner, counts)
        for_train, for_val = divide(ids, counts, batch.is_val[owner])
        train.append(for_train)
        val.append(for_val)
    return EncodedBatch(
        train=tuple(train),
        val=tuple(val),
        lengths=lengths,
        is_val=batch.is_val,
        text_bytes=_utf8_lengths(batch.texts) if batch.text_bytes is None else batch.text_bytes,
        account=batch.account,
    )


def _cuts_of_long_texts(batch: DocumentBatch, tokenizer: Tokenizer) -> dict[int, list[int]]:
    """Where the fragments of each long text stop. Texts that cannot be encoded leave the batch."""
    long = [i for i, text in enumerate(batch.texts) if len(text) > LONG_CHARS]
    refused = [i for i in long if _cuts(batch.texts[i], tokenizer) is None]
    if refused:
        _drop(batch, refused)
        return _cuts_of_long_texts(batch, tokenizer)
    return {i: _cuts(batch.texts[i], tokenizer) or [] for i in long}


def _cuts(text: str, tokenizer: Tokenizer) -> list[int] | None:
    """Where to cut so that no token is; None when a part that may not be cut is too long to encode."""
    if tokenizer.cut == "anywhere":
        return [*range(LONG_CHARS, len(text), LONG_CHARS), len(text)]
    found = [0]
    while tokenizer.cut == "blanks" and len(text) - found[-1] > LONG_CHARS:
        place = SAFE_CUT.search(text, found[-1] + LONG_CHARS)
        if place is None:
            break
        found.append(place.end())
    if found[-1] < len(text):
        found.append(len(text))
    return found[1:] if max(map(operator.sub, found[1:], found)) <= MOST_UNBROKEN_CHARS else None


def _drop(batch: DocumentBatch, refused: list[int]) -> None:
    batch.account.skipped["unbroken run over 16 MiB"] += len(refused)
    batch.account.problems.append(f"{batch.origin}: {len(refused)} with an unbroken run of over 16 MiB skipped")
    if batch.account.continues and refused[-1] == len(batch.texts) - 1:
        batch.account.continues = False
    batch.texts = [text for i, text in enumerate(batch.texts) if i not in set(refused)]
    batch.is_val = np.delete(batch.is_val, refused)
    batch.text_bytes = None


# Which of the batch's texts each fragment belongs to, the fragments, and whether each ends its text.
_Call = tuple[NDArray[np.int64], Sequence[str], NDArray[np.bool_]]


def _one_call(batch: DocumentBatch) -> _Call:
    """Nearly every batch: no long text, so each is one fragment and all go to the encoder at once."""
    return np.arange(len(batch.texts)), batch.texts, np.ones(len(batch.texts), np.bool_)


def _calls(batch: DocumentBatch, cuts: dict[int, list[int]]) -> Iterator[_Call]:
    """Fragments in order, about a batch's worth at a time; a long text is sliced only when its turn comes."""
    owners: list[int] = []
    texts: list[str] = []
    are_last: list[bool] = []
    size = 0
    for owner, text in enumerate(batch.texts):
        stops = cuts.get(owner, [len(text)])
        for start, stop in itertools.pairwise([0, *stops]):
            owners.append(owner)
            texts.append(text[start:stop])
            are_last.append(stop == stops[-1])
            size += stop - start
            if size >= work.BATCH_BYTES:
                yield np.array(owners), texts, np.array(are_last)
                owners, texts, are_last, size = [], [], [], 0
    if texts:
        yield np.array(owners), texts, np.array(are_last)


def _encode_call(
    texts: Sequence[str], closes: NDArray[np.bool_], tokenizer: Tokenizer, separator: int | None
) -> tuple[Tokens, NDArray[np.int64]]:
    """The tokens of some fragments, a separator after those that close a document, and how many each has."""
    raw, ends = tokenizer.encoder.encode_batch(texts)
    counts = np.diff(ends, prepend=0)
    if separator is None:
        return raw.astype(tokenizer.dtype), counts
    written = counts + closes
    ids: Tokens = np.empty(int(written.sum()), tokenizer.dtype)
    begin = place = 0
    # Text by text, which also narrows the type: a mask over all tokens costs more than this loop.
    for end, is_closed in zip(ends.tolist(), closes.tolist(), strict=True):
        stop = place + end - begin
        ids[place:stop] = raw[begin:end]
        if is_closed:
            ids[stop] = separator
        begin, place = end, stop + is_closed
    return ids, written


def divide(ids: Tokens, counts: NDArray[np.int64], is_val: NDArray[np.bool_]) -> tuple[Tokens, Tokens]:
    """The train tokens and the val tokens. Most calls hold no validation document and are passed through."""
    if not is_val.any():
        return ids, ids[:0]
    # Neighbours that go to the same file are copied as one stretch; picking token by token costs ten times as much.
    begins = np.flatnonzero(np.diff(is_val, prepend=~is_val[:1]))
    stretches = np.split(ids, np.cumsum(counts)[begins[1:] - 1])
    sides: tuple[list[Tokens], list[Tokens]] = ([ids[:0]], [ids[:0]])
    for goes_to_val, stretch in zip(is_val[begins].tolist(), stretches, strict=True):
        sides[goes_to_val].append(stretch)
    return np.concatenate(sides[0]), np.concatenate(sides[1])


def _utf8_lengths(texts: Sequence[str]) -> NDArray[np.int64]:
    return np.array([len(text) if text.isascii() else len(text.encode("utf-8")) for text in texts], np.int64)
