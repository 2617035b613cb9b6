"""A tokenizer.json as a Tokenizer: special tokens kept out of text, engine chosen by agreement."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gptfit.data import gpt2, selftest
from gptfit.data.encoders import Encoder, FastokensEncoder, TokenizersEncoder
from gptfit.data.tokenizer import Tokenizer
from gptfit.errors import DataError

# Names in use for the token after a document: GPT-2, Llama 3, Llama 2 and T5, Gemma, Qwen chat, DeepSeek.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<｜end▁of▁sentence｜>")
NO_TEXT = "\U0010ffff"  # a code point that is reserved as no character


def read_tokenizer_json(path: Path) -> Tokenizer:
    """The file's vocabulary with the fastest engine that is right about it."""
    try:
        raw = path.read_bytes()
        spec = json.loads(raw)
        ids = _all_ids(spec)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; give the path of a tokenizer.json") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: is not a tokenizer.json ({error!r}); check the file") from None
    if not ids:
        raise DataError(f"{path}: has an empty vocabulary; train it again with `gptfit tokenizer train`")
    end = next((ids[name] for name in END_NAMES if name in ids), None)
    plain = json.dumps(_without_specials(spec))
    encoder = TokenizersEncoder(plain) if _is_closed(spec) else _agreeing_engine(plain, end, str(path))
    vocab_size = max(ids.values()) + 1
    pieces = _pieces(spec, ids, vocab_size)
    return Tokenizer(
        name="tokenizer.json",
        vocab_size=vocab_size,
        end_of_text=end,
        sha256=hashlib.sha256(raw).hexdigest(),
        encoder=encoder,
        pieces=pieces,
        cut="blanks" if _splits_at_blanks(spec) else "nowhere",
        source=path,
    )


def _all_ids(spec: dict[str, Any]) -> dict[str, int]:
    """Every token's spelling and id: the model's vocabulary (a list for Unigram) and the added tokens."""
    vocab = spec["model"]["vocab"]
    if isinstance(vocab, list):
        ids = {entry[0]: index for index, entry in enumerate(vocab)}
    else:
        ids = {str(token): int(index) for token, index in vocab.items()}
    return ids | {added["content"]: int(added["id"]) for added in spec.get("added_tokens") or ()}


def _without_specials(spec: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer for plain text: nothing added at the ends, nothing cut, special tokens are not looked for."""
    added_tokens = spec.get("added_tokens") or ()
    ordinary = [added for added in added_tokens if not added.get("special")]
    plain = spec | {"added_tokens": ordinary, "post_processor": None, "truncation": None, "padding": None}
    vocab = spec["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram matches every entry in text, so a special one gets a spelling no text has
        special = {added["content"] for added in added_tokens if added.get("special")}
        hidden = [[NO_TEXT + token if token in special else token, score] for token, score in vocab]
        plain["model"] = spec["model"] | {"vocab": hidden}
    return plain


def _is_closed(spec: dict[str, Any]) -> bool:
    """A word list without an unknown token, as characters are exported: it can encode nothing but its own words."""
    return spec["model"].get("type") == "WordLevel" and spec["model"].get("unk_token") not in spec["model"]["vocab"]


def _agreeing_engine(plain: str, end: int | None, name: str) -> Encoder:
    """fastokens if it gives the tokenizers library's ids on the sample; otherwise the library itself."""
    found: list[Encoder] = []
    problems = []
    for make in (FastokensEncoder, TokenizersEncoder):
        try:
            found.append(make(plain))
        except (ImportError, DataError) as error:
            problems.append(str(error))
    if not found:
        raise DataError(f"{name}: no engine can use it ({'; '.join(problems)}); pip install 'gptfit[hf]'")
    hashes = {selftest.sample_hash(encoder) for encoder in found}
    chosen = found[0] if len(hashes) == 1 else found[-1]
    ids, _ = chosen.encode_batch(END_NAMES)
    if end is not None and end in ids:
        raise DataError(
            f"{name}: its end-of-text token can be spelled in text, so documents would run together; use another"
        )
    return chosen


def _pieces(spec: dict[str, Any], ids: dict[str, int], vocab_size: int) -> Sequence[bytes]:
    """Each id's bytes: exact for a byte-level vocabulary; others mark blanks (U+2581, ##) and spell a byte <0x0A>."""
    byte_of = {character: byte for byte, character in gpt2.byte_spelling().items()}
    added = {entry["content"] for entry in spec.get("added_tokens") or ()}
    kinds = {*_types(spec.get("decoder")), str(spec["model"].get("type"))}
    pieces = [b""] * vocab_size
    for token, index in ids.items():
        if "ByteLevel" in kinds and token not in added and all(character in byte_of for character in token):
            pieces[index] = bytes(byte_of[character] for character in token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            pieces[index] = bytes.fromhex(token[3:5])
        elif "WordPiece" in kinds and token not in added:
            pieces[index] = (token[2:] if token.startswith("##") else " " + token).encode("utf-8", "replace")
        else:
            pieces[index] = token.replace("\u2581", " ").encode("utf-8", "replace")
    return tuple(pieces)


def _types(part: Any) -> Iterator[str]:
    """The type of a tokenizer.json component and of those inside it."""
    if isinstance(part, dict):
        yield str(part.get("type"))
        for inner in (*part.get("pretokenizers", ()), *part.get("decoders", ()), *part.get("normalizers", ())):
            yield from _types(inner)


def _splits_at_blanks(spec: dict[str, Any]) -> bool:
    """True when words are cut by GPT-2's own pattern and nothing rewrites the text first."""
    pre = spec.get("pre_tokenizer")
    if not isinstance(pre, dict) or pre.get("type") != "ByteLevel" or pre.get("add_prefix_space"):
        return False
    ordinary_added = any(not added.get("special") for added in spec.get("added_tokens") or ())
    return bool(pre.get("use_regex", True) and not spec.get("normalizer") and not ordinary_added)
