"""Encoders: a batch of texts in, one flat array of token ids and each text's end out."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gptfit.data import gpt2_vocabulary
from gptfit.errors import DataError
from gptfit.files import reason_of

Ids = NDArray[np.uint32]
Ends = NDArray[np.int64]  # Ends[i] is where text i stops in Ids; text 0 starts at 0


class Encoder(Protocol):
    """One engine with one vocabulary. Special tokens never come out of text."""

    engine: str

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Ends]: ...


class FastokensEncoder:
    """fastokens, built from a tokenizer.json in memory; it encodes a batch without the GIL."""

    engine = "fastokens"

    def __init__(self, tokenizer_json: str) -> None:
        # gptfit calls it from threads of its own; helper threads on top cost 5 % more CPU time and no less wall time.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        import fastokens

        try:
            self._tokenizer = fastokens.Tokenizer.from_json_str(tokenizer_json)
        except ValueError as error:
            raise DataError(f"fastokens cannot use this tokenizer.json: {error}") from None

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Ends]:
        ids, offsets = self._tokenizer.encode_batch_flat(list(texts), split_special_tokens=True)
        return np.frombuffer(ids, dtype="<u4"), np.frombuffer(offsets, dtype="<i8")[1:]


class TiktokenEncoder:
    """tiktoken fed with the GPT-2 ranks: the oracle in tests, and the engine where fastokens has no wheel."""

    engine = "tiktoken"
    # The published pattern in the possessive form tiktoken ships, which backtracks less.
    PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    # tiktoken's regex engine panics (a BaseException) on about a million spaces, so long runs are cut out first.
    LONG_BLANK = re.compile("[\t\n\v\f\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]{10000,}")

    def __init__(self) -> None:
        import tiktoken

        self._encoding = tiktoken.Encoding(
            "gpt2", pat_str=self.PATTERN, mergeable_ranks=gpt2_vocabulary.ranks(), special_tokens={}
        )

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Ends]:
        lists = [self._encode(text) for text in texts]
        return join(lists)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for blank in self.LONG_BLANK.finditer(text):
            # A run of blanks is one word up to its last character, which belongs to what follows, if anything does.
            stop = blank.end() if blank.end() == len(text) else blank.end() - 1
            ids += self._encoding.encode_ordinary(text[start : blank.start()])
            ids += self._encoding._encode_single_piece(text[blank.start() : stop])
            start = stop
        return ids + self._encoding.encode_ordinary(text[start:])


class TokenizersEncoder:
    """The Hugging Face tokenizers library, for a tokenizer.json that fastokens cannot run."""

    engine = "tokenizers"

    def __init__(self, tokenizer_json: str) -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # noqa: BLE001 - the library raises a bare Exception, there is nothing narrower
            raise DataError(f"tokenizers cannot use this tokenizer.json: {str(error).splitlines()[0]}") from None

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Ends]:
        try:
            found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # noqa: BLE001 - a bare Exception, as above
            raise DataError(f"tokenizers cannot encode with this tokenizer.json: {reason_of(error)}") from None
        return join([encoding.ids for encoding in found])


class ByteEncoder:
    """A token per UTF-8 byte: ids 0 to 255."""

    engine = "bytes"

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Ends]:
        encoded = [text.encode("utf-8") for text in texts]
        ends = np.cumsum([len(raw) for raw in encoded], dtype=np.int64)
        return np.frombuffer(b"".join(encoded), dtype=np.uint8).astype(np.uint32), ends


class CharEncoder:
    """A token per character, by a fixed table such as nanoGPT's stoi."""

    engine = "chars"

    def __init__(self, id_of: Mapping[str, int]) -> None:
        self._id_of = np.full(0x110000, -1, dtype=np.int64)
        for character, token in id_of.items():
            if len(character) == 1:
                self._id_of[ord(character)] = token

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Ends]:
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        points = np.frombuffer("".join(texts).encode("utf-32-le"), dtype="<u4")
        ids = self._id_of[points]
        if len(ids) and ids.min() < 0:
            unknown = chr(int(points[int(np.argmin(ids))]))
            raise DataError(f"the character {unknown!r} is not in this data set's alphabet", fix="leave it out")
        return ids.astype(np.uint32), ends


def join(lists: Sequence[Sequence[int]]) -> tuple[Ids, Ends]:
    """Lists of ids as one flat array and the end of each."""
    ends = np.cumsum([len(ids) for ids in lists], dtype=np.int64)
    flat = np.concatenate([np.asarray(ids, dtype=np.uint32) for ids in lists]) if lists else np.empty(0, np.uint32)
    return flat, ends
