"""Tokenizers: GPT-2's, bytes, characters or a tokenizer.json; text to ids, ids to text, and what the manifest records."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from gptfit import sane
from gptfit.data import gpt2_vocabulary, selftest
from gptfit.data.encoders import ByteEncoder, CharEncoder, Encoder, FastokensEncoder, TiktokenEncoder, TokenizersEncoder
from gptfit.dataset import DatasetInfo, read_meta
from gptfit.errors import DataError
from gptfit.files import read_plain, reason_of

END_OF_TEXT = "<|endoftext|>"
# blanks: before a blank that follows a non-blank, which no match of GPT-2's pattern spans.
Cut = Literal["anywhere", "blanks", "nowhere"]
SURROGATE = re.compile("[\ud800-\udfff]")
BYTE_END_OF_TEXT = 256  # the first id after the 256 bytes
# Names in use for the token after a document: GPT-2, Llama 3, Llama 2 and T5, Gemma, Qwen chat, DeepSeek.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<｜end▁of▁sentence｜>")
NO_TEXT = "\U0010ffff"  # a code point that is reserved as no character


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
        raise DataError("a character tokenizer belongs to its data folder", fix="prepare one with --tokenizer chars")
    path = Path(which)
    if path.suffix != ".json":
        raise DataError(f"{which}: is not a tokenizer", fix="use gpt2, bytes, chars or a path to a tokenizer.json")
    return read_tokenizer_json(path)


def _of_dataset(info: DatasetInfo) -> Tokenizer:
    if info.tokenizer in (None, "gpt2"):  # nanoGPT's rule: without a meta.pkl it is GPT-2
        return gpt2_tokenizer()
    if info.tokenizer == "bytes":
        return byte_tokenizer()
    if info.tokenizer_file is None:
        raise DataError(f"{info.folder}: its manifest names no tokenizer file", fix="prepare the folder again")
    found = _of_meta(info.tokenizer_file) if info.tokenizer == "chars" else load_tokenizer(info.tokenizer_file)
    if info.tokenizer_sha256 not in (None, found.sha256):
        raise DataError(
            f"{info.tokenizer_file}: is not the tokenizer this data was made with", fix="prepare the folder again"
        )
    return found


def _of_meta(path: Path) -> Tokenizer:
    meta = read_meta(path)
    itos = meta.get("itos") if meta else None
    if not isinstance(itos, Mapping) or not all(isinstance(text, str) for text in itos.values()):
        raise DataError(f"{path}: has no itos table of characters", fix="make it again")
    try:  # a vocabulary cannot have more entries than its file has bytes
        return char_tokenizer(
            {text: sane.integer(token, "itos", 0, path.stat().st_size) for token, text in itos.items()}
        )
    except ValueError as error:
        raise DataError(f"{path}: {error}", fix="make it again") from None


@cache
def gpt2_tokenizer(engine: str | None = None) -> Tokenizer:
    """GPT-2's BPE on the fastest engine that passes the self-test; `engine` insists on one."""
    failures = []
    for name in [engine] if engine else ["fastokens", "tiktoken"]:
        try:
            encoder: Encoder = (
                FastokensEncoder(gpt2_vocabulary.tokenizer_json()) if name == "fastokens" else TiktokenEncoder()
            )
            selftest.check_gpt2(encoder)
        except (ImportError, DataError) as error:
            failures.append(f"{name}: {error}")
            continue
        pieces = (*gpt2_vocabulary.token_bytes(), END_OF_TEXT.encode())
        return Tokenizer(
            "gpt2",
            gpt2_vocabulary.VOCAB_SIZE,
            gpt2_vocabulary.END_OF_TEXT,
            gpt2_vocabulary.VOCAB_BPE_SHA256,
            encoder,
            pieces,
            "blanks",
        )
    raise DataError(
        f"no working GPT-2 tokenizer ({'; '.join(failures)})", fix="pip install --force-reinstall fastokens"
    )


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


def read_tokenizer_json(path: Path) -> Tokenizer:
    """The file's vocabulary with the fastest engine that is right about it."""
    try:
        return _read(path, read_plain(path))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", fix="give the path of a tokenizer.json") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise DataError(f"{path}: is not a tokenizer.json ({reason_of(error)})", fix="check the file") from None


def _read(path: Path, raw: bytes) -> Tokenizer:
    spec = sane.mapping(json.loads(raw), "its content")
    ids = _all_ids(spec)
    for token, number in ids.items():  # a vocabulary cannot have more entries than its file has bytes
        sane.integer(number, f"the number of {sane.short(token)}", 0, len(raw))
    if not ids:
        raise DataError(f"{path}: has an empty vocabulary", fix="train it again with `gptfit tokenizer train`")
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
        raise DataError(f"{name}: no engine can use it ({'; '.join(problems)})", fix="pip install 'gptfit[hf]'")
    hashes = {selftest.sample_hash(encoder) for encoder in found}
    chosen = found[0] if len(hashes) == 1 else found[-1]
    ids, _ = chosen.encode_batch(END_NAMES)
    if end is not None and end in ids:
        raise DataError(
            f"{name}: its end-of-text token can be spelled in text, so documents would run together", fix="use another"
        )
    return chosen


def _pieces(spec: dict[str, Any], ids: dict[str, int], vocab_size: int) -> Sequence[bytes]:
    """Each id's bytes: exact for a byte-level vocabulary; others mark blanks (U+2581, ##) and spell a byte <0x0A>."""
    byte_of = {character: byte for byte, character in gpt2_vocabulary.byte_spelling().items()}
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
