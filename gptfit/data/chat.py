"""Chat: conversations to tokens, each with a mark whether it counts; which is bit 31 until the files are written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gptfit.conversation import Turn, unpack
from gptfit.data.documents import DocumentBatch
from gptfit.data.encode import EncodedBatch, divide
from gptfit.data.tokenizer import Tokenizer
from gptfit.errors import DataError

COUNTS = np.uint32(1 << 31)  # no vocabulary reaches it
# Beginnings of what somebody says. Other programs encode mark and text in one go, which must give the same tokens.
PROBES = (
    "Hello",
    "5 of them",
    "(yes)",
    "\N{LATIN SMALL LETTER E WITH ACUTE}t\N{LATIN SMALL LETTER E WITH ACUTE}",
    "**",
)


def check_chat_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """One that can mark where a turn ends, and cuts between a mark and what follows it."""
    if tokenizer is None or tokenizer.end_of_text is None:
        raise DataError(
            "--chat needs a tokenizer with an end-of-text token", fix="use gpt2, bytes or a tokenizer.json that has one"
        )
    for turn in (Turn("assistant", probe) for probe in PROBES):
        if tokenizer.encode(turn.mark) + tokenizer.encode(turn.said) != tokenizer.encode(turn.mark + turn.said):
            raise DataError(
                f"{tokenizer.name}: joins {turn.mark!r} with what follows, so --chat cannot say which tokens count",
                fix="use gpt2, or a tokenizer of `gptfit tokenizer train`",
            )
    return tokenizer


def encode_conversations(batch: DocumentBatch, tokenizer: Tokenizer) -> EncodedBatch:
    """As `encode_documents`, of packed conversations; tokens that count have bit 31."""
    conversations = [unpack(text) for text in batch.texts]
    pieces = [piece for turns in conversations for turn in turns for piece in (turn.mark, turn.said)]
    raw, ends = tokenizer.encoder.encode_batch(pieces)
    cuts = iter(np.split(raw, ends[:-1]) if pieces else [])
    tokens = [_join([(turn, next(cuts), next(cuts)) for turn in turns], tokenizer) for turns in conversations]
    lengths = np.array([len(one) for one in tokens], np.int64)
    joined = np.concatenate(tokens) if tokens else np.zeros(0, np.uint32)
    train, val = divide(joined, lengths, batch.is_val)
    return EncodedBatch(
        train=(train,),
        val=(val,),
        lengths=lengths,
        is_val=batch.is_val,
        text_bytes=np.array([sum(len(t.text.encode()) for t in turns) for turns in conversations], np.int64),
        account=batch.account,
        is_masked=True,
    )


def conversation_tokens(turns: Sequence[Turn], tokenizer: Tokenizer) -> list[int]:
    """Of a conversation so far, without what counts: what a model is asked with."""
    assert tokenizer.end_of_text is not None
    ids = [tokenizer.end_of_text]
    for turn in turns:
        ids += [*tokenizer.encode(turn.mark), *tokenizer.encode(turn.said), tokenizer.end_of_text]
    return ids


def _join(parts: list[tuple[Turn, NDArray[np.uint32], NDArray[np.uint32]]], tokenizer: Tokenizer) -> NDArray[np.uint32]:
    assert tokenizer.end_of_text is not None
    end = np.array([tokenizer.end_of_text], np.uint32)
    found = [end]
    for turn, mark, said in parts:
        spoken = np.concatenate([said, end])
        found += [mark, spoken | COUNTS if turn.counts else spoken]
    return np.concatenate(found)
