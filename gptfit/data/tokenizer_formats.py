"""A Tokenizer for other programs: as a tokenizer.json, and as the token and merge lists llama.cpp reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from gptfit.data import gpt2_vocabulary
from gptfit.data.tokenizer import END_OF_TEXT, Tokenizer
from gptfit.errors import DataError

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
UNKNOWN = "<unk>"


@dataclass(frozen=True)
class BpeTables:
    """Byte-level BPE: each id's spelling in GPT-2's printable bytes, the merges in order, ids that are no text."""

    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    special: frozenset[int]


def to_tokenizer_json(tokenizer: Tokenizer) -> str:
    """The same ids from the same text, with end-of-text as a special token."""
    if tokenizer.source is not None:
        return tokenizer.source.read_text(encoding="utf-8")
    if tokenizer.name == "gpt2":
        spec = json.loads(gpt2_vocabulary.tokenizer_json())
    elif tokenizer.name == "bytes":
        spec = _empty_spec(_byte_model(), BYTE_LEVEL, BYTE_LEVEL)
    else:
        spec = _empty_spec(_char_model(tokenizer), _one_by_one(), {"type": "Fuse"})
    if tokenizer.end_of_text is not None:
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        spec["added_tokens"] = [{"id": tokenizer.end_of_text, "content": END_OF_TEXT, **plain}]
    return json.dumps(spec, ensure_ascii=False)


def to_bpe_tables(tokenizer: Tokenizer) -> BpeTables:
    """For llama.cpp, which splits words by GPT-2's pattern and knows byte-level BPE only."""
    if tokenizer.cut == "nowhere":
        raise DataError("llama.cpp knows this kind of tokenizer under no name", fix="export with --to hf")
    if tokenizer.name == "chars":
        return _char_tables(tokenizer)
    spec = json.loads(to_tokenizer_json(tokenizer))
    if spec["model"]["type"] != "BPE":
        raise DataError(f"a {spec['model']['type']} tokenizer is no byte-level BPE", fix="export with --to hf")
    ids = {token: int(index) for token, index in spec["model"]["vocab"].items()}
    special = {int(added["id"]): str(added["content"]) for added in spec.get("added_tokens") or ()}
    spelled = {index: token for token, index in ids.items()} | special
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    tokens = tuple(spelled.get(index, f"[UNUSED{index}]") for index in range(tokenizer.vocab_size))
    return BpeTables(tokens, tuple(merges) or _harmless_merge(), frozenset(special))


def _empty_spec(model: dict[str, Any], pre_tokenizer: dict[str, Any], decoder: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def _byte_model() -> dict[str, Any]:
    """BPE that never merges: every byte is its own token."""
    vocab = {character: byte for byte, character in sorted(gpt2_vocabulary.byte_spelling().items())}
    return {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocab, "merges": []}


def _char_model(tokenizer: Tokenizer) -> dict[str, Any]:
    vocab = {piece.decode("utf-8"): token for token, piece in enumerate(tokenizer.pieces)}
    return {"type": "WordLevel", "vocab": vocab, "unk_token": UNKNOWN}


def _one_by_one() -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}


def _char_tables(tokenizer: Tokenizer) -> BpeTables:
    """A character of several bytes is put together by merges, byte after byte."""
    spelling = gpt2_vocabulary.byte_spelling()
    tokens = tuple("".join(spelling[byte] for byte in piece) for piece in tokenizer.pieces)
    merges = {f"{token[:end]} {token[end]}": None for token in tokens for end in range(1, len(token))}
    return BpeTables(tokens, tuple(merges) or _harmless_merge(), frozenset())


def _harmless_merge() -> tuple[str, ...]:
    """llama.cpp refuses a file without merges; the bytes FE FF follow each other in no UTF-8 text."""
    spelling = gpt2_vocabulary.byte_spelling()
    return (f"{spelling[0xFE]} {spelling[0xFF]}",)
