"""Tokenizers by name: text to ids, ids to text, and what the manifest records about them."""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from gptfit.data import gpt2
from gptfit.data.encoders import ByteEncoder, CharEncoder, Encoder, FastokensEncoder, TiktokenEncoder
from gptfit.data.selftest import check_gpt2
from gptfit.dataset import DatasetInfo, read_meta
from gptfit.errors import DataError

END_OF_TEXT = "<|endoftext|>"
# blanks: before a blank that follows a non-blank, which no match of GPT-2's pattern spans.
Cut = Literal["anywhere", "blanks", "nowhere"]
SURROGATE = re.compile("[\ud800-\udfff]")
BYTE_END_OF_TEXT = 256  # the first id after the 256 bytes


@dataclass(frozen=True)
class Tokenizer:
    """One vocabulary with an engine that encodes it. `pieces[id]` is the token's bytes."""

    name: str  # gpt2 | bytes | chars | tokenizer.json
    vocab_size: int
    end_of_text: int | None
    sha256: str | None
    encoder: Encoder
    pieces: Sequence[bytes]
    cut: Cut  # where a long text may be cut without changing a token
    source: Path | None = None  # the tokenizer.json it came from

    def encode(self, text: str) -> list[int]:
        """Ordinary text to ids; a special token's spelling is text like any other."""
        ids, _ = self.encoder.encode_batch([without_surrogates(text)])
        found: list[int] = ids.tolist()
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text; bytes that are not UTF-8 (a cut character) become U+FFFD. For pieces use stream()."""
        stream = self.stream()
        return "".join([stream.push(token) for token in ids]) + stream.finish()

    def stream(self) -> TextStream:
        """A decoder that is fed one id at a time and never shows half a character."""
        return TextStream(self)

    @property
    def dtype(self) -> str:
        """The token file's type: nanoGPT's uint16 while every id fits."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    def manifest_entry(self, file: str | None) -> dict[str, Any]:
        """The manifest's account; `file` is the vocabulary's name inside the data folder."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "vocab_size": self.vocab_size,
            "end_of_text": self.end_of_text,
            "file": file,
        }


def without_surrogates(text: str) -> str:
    """Lone surrogates (half a character, not encodable) as U+FFFD; other text is returned as it is."""
    return SURROGATE.sub("\ufffd", text)


class TextStream:
    """Ids in, text out as soon as it is whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces = tokenizer.pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        known = 0 <= token < len(self._pieces)  # a model's vocabulary may be padded beyond the tokenizer's
        return self._decoder.decode(self._pieces[token] if known else b"\xef\xbf\xbd")

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def load_tokenizer(which: DatasetInfo | str | Path = "gpt2") -> Tokenizer:
    """By name ('gpt2', 'bytes'), by the path of a tokenizer.json, or the one a data folder was prepared with.

    >>> load_tokenizer("gpt2").encode("Hello world")
    [15496, 995]
    """
    if isinstance(which, DatasetInfo):
        return _of_dataset(which)
    if which == "gpt2":
        return gpt2_tokenizer()
    if which == "bytes":
        return byte_tokenizer()
    if which == "chars":
        raise DataError("a character tokenizer belongs to its data folder; prepare one with --tokenizer chars")
    path = Path(which)
    if path.suffix != ".json":
        raise DataError(f"{which}: is not a tokenizer; use gpt2, bytes, chars or a path to a tokenizer.json")
    from gptfit.data.jsontokenizer import read_tokenizer_json

    return read_tokenizer_json(path)


def _of_dataset(info: DatasetInfo) -> Tokenizer:
    if info.tokenizer in (None, "gpt2"):  # nanoGPT's rule: without a meta.pkl it is GPT-2
        return gpt2_tokenizer()
    if info.tokenizer == "bytes":
        return byte_tokenizer()
    if info.tokenizer_file is None:
        raise DataError(f"{info.folder}: its manifest names no tokenizer file; prepare the folder again")
    found = _of_meta(info.tokenizer_file) if info.tokenizer == "chars" else load_tokenizer(info.tokenizer_file)
    if info.tokenizer_sha256 not in (None, found.sha256):
        raise DataError(
            f"{info.tokenizer_file}: is not the tokenizer this data was made with; prepare the folder again"
        )
    return found


def _of_meta(path: Path) -> Tokenizer:
    meta = read_meta(path)
    itos = meta.get("itos") if meta else None
    if not isinstance(itos, Mapping) or not all(isinstance(text, str) for text in itos.values()):
        raise DataError(f"{path}: has no itos table of characters; make it again")
    return char_tokenizer({text: int(token) for token, text in itos.items()})


@cache
def gpt2_tokenizer(engine: str | None = None) -> Tokenizer:
    """GPT-2's BPE on the fastest engine that passes the self-test; `engine` insists on one."""
    failures = []
    for name in [engine] if engine else ["fastokens", "tiktoken"]:
        try:
            encoder: Encoder = FastokensEncoder(gpt2.tokenizer_json()) if name == "fastokens" else TiktokenEncoder()
            check_gpt2(encoder)
        except (ImportError, DataError) as error:
            failures.append(f"{name}: {error}")
            continue
        pieces = (*gpt2.token_bytes(), END_OF_TEXT.encode())
        return Tokenizer("gpt2", gpt2.VOCAB_SIZE, gpt2.END_OF_TEXT, gpt2.VOCAB_BPE_SHA256, encoder, pieces, "blanks")
    raise DataError(f"no working GPT-2 tokenizer ({'; '.join(failures)}); pip install --force-reinstall fastokens")


@cache
def byte_tokenizer() -> Tokenizer:
    """UTF-8 bytes 0 to 255 and an end-of-text token, 257 in all."""
    pieces = (*(bytes([byte]) for byte in range(256)), END_OF_TEXT.encode())
    return Tokenizer("bytes", 257, BYTE_END_OF_TEXT, None, ByteEncoder(), pieces, "anywhere")


def char_tokenizer(id_of: Mapping[str, int]) -> Tokenizer:
    """One token per character, as nanoGPT's shakespeare_char: no end-of-text token."""
    text_of = {token: text for text, token in id_of.items()}
    vocab_size = max(text_of, default=-1) + 1
    pieces = tuple(text_of.get(token, "\ufffd").encode("utf-8", "replace") for token in range(vocab_size))
    digest = hashlib.sha256(b"\0".join(pieces)).hexdigest()
    return Tokenizer("chars", vocab_size, None, digest, CharEncoder(id_of), pieces, "anywhere")


def alphabet_table(characters: set[str]) -> dict[str, int]:
    """nanoGPT's stoi: characters in code point order."""
    return {character: token for token, character in enumerate(sorted(characters))}


def nanogpt_meta(tokenizer: Tokenizer) -> dict[str, Any]:
    """What stock nanoGPT wants in meta.pkl: vocab_size for train.py, stoi and itos for sample.py."""
    itos = {token: piece.decode("utf-8", "replace") for token, piece in enumerate(tokenizer.pieces)}
    if tokenizer.name == "bytes":
        itos |= {byte: chr(byte) for byte in range(256)}  # so that every byte can be told apart
    stoi: dict[str, int] = {}
    for token, text in itos.items():
        stoi.setdefault(text, token)
    return {"vocab_size": tokenizer.vocab_size, "itos": itos, "stoi": stoi}
