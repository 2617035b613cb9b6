"""Tokenizers: GPT-2's exact tokens on every engine, ids back to text, and no way for text to end a document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptfit.data import encode, gpt2_vocabulary, selftest
from gptfit.data.documents import DocumentBatch
from gptfit.data.encode import encode_documents
from gptfit.data.encoders import Ends, FastokensEncoder, Ids, TiktokenEncoder
from gptfit.data.tokenizer import alphabet_table, char_tokenizer, gpt2_tokenizer, load_tokenizer
from gptfit.dataset import DatasetInfo
from gptfit.errors import DataError

# Text that reaches every branch of GPT-2's pattern more often than random text would.
TEXTS = st.lists(
    st.sampled_from(
        ["'s", "'ll", " ", "  ", "\n", "\t", "\u00a0", "\u3000", "a", "Word", "é", "漢", "42", "½", "!", "🙂", "\x1c"]
    )
    | st.text(max_size=5),
    max_size=30,
).map("".join)


def tokens(text: str, engine: str) -> list[int]:
    return gpt2_tokenizer(engine).encode(text)


def test_hello_world_is_15496_995() -> None:
    assert load_tokenizer().encode("Hello world") == [15496, 995]
    assert load_tokenizer("gpt2").vocab_size == 50257
    assert load_tokenizer("gpt2").end_of_text == 50256


def test_the_spelling_of_end_of_text_is_ordinary_text() -> None:
    for engine in ("fastokens", "tiktoken"):
        ids = tokens("<|endoftext|>", engine)
        assert ids == [27, 91, 437, 1659, 5239, 91, 29]


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_the_two_engines_agree_and_decode_gives_the_text_back(text: str) -> None:
    ids = tokens(text, "fastokens")
    assert ids == tokens(text, "tiktoken")
    assert gpt2_tokenizer().decode(ids) == text


@pytest.mark.parametrize(
    "text", [" " * 1_200_000 + "x", " " * 1_200_000, "\n" * 50_000 + "a b", "x" + "\u3000" * 20_000 + "y"]
)
def test_long_blanks_do_not_panic_tiktoken_and_keep_their_tokens(text: str) -> None:
    assert tokens(text, "tiktoken") == tokens(text, "fastokens")


@pytest.mark.parametrize(
    ("name", "stride", "expected"),
    [
        ("web_usgov", 1, 3_037_067),
        ("web_mdn", 8, None),
        pytest.param("web_mdn", 1, 14_683_533, marks=pytest.mark.slow),
    ],
)
def test_tiktoken_agrees_on_every_token_of_the_web_files(
    shared: Path, name: str, stride: int, expected: int | None
) -> None:
    texts = pq.read_table(shared / "data" / f"{name}.parquet", columns=["text"]).column("text").to_pylist()[::stride]
    ids, ends = gpt2_tokenizer("fastokens").encoder.encode_batch(texts)
    oracle_ids, oracle_ends = gpt2_tokenizer("tiktoken").encoder.encode_batch(texts)
    np.testing.assert_array_equal(ids, oracle_ids)
    np.testing.assert_array_equal(ends, oracle_ends)
    assert len(ids) == expected if expected else len(ids) > 10**6


def test_edge_rows_have_their_known_lengths(shared: Path) -> None:
    column = pq.read_table(shared / "data" / "edge.parquet", columns=["text"]).column("text")
    raw = column.cast("binary").to_pylist()
    texts = [(value or b"").decode("utf-8", "replace") for value in raw]
    lengths = [2, 0, 0, 9, 6, 5, 10, 25000, 1200000, 2500, 1, 2]
    for engine in ("fastokens", "tiktoken"):
        assert [len(tokens(text, engine)) for text in texts] == lengths


def test_the_vocabulary_has_the_published_ranks(shared: Path) -> None:
    import base64

    lines = (shared / "data" / "r50k_base.tiktoken").read_text().splitlines()
    published = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    assert gpt2_vocabulary.ranks() == published


class Off:
    """An engine that is wrong about one token."""

    engine = "off"

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Ends]:
        ids, ends = TiktokenEncoder().encode_batch(texts)
        return np.where(ids == 995, 996, ids).astype(np.uint32), ends


def test_a_broken_engine_fails_its_self_test() -> None:
    selftest.check_gpt2(TiktokenEncoder())
    selftest.check_gpt2(FastokensEncoder(gpt2_vocabulary.tokenizer_json()))
    with pytest.raises(DataError, match="off failed its self-test"):
        selftest.check_gpt2(Off())


def test_when_fastokens_is_broken_tiktoken_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptfit.data.tokenizer.FastokensEncoder", lambda _: Off())
    gpt2_tokenizer.cache_clear()
    try:
        assert gpt2_tokenizer().encoder.engine == "tiktoken"
        monkeypatch.setattr("gptfit.data.tokenizer.TiktokenEncoder", Off)
        gpt2_tokenizer.cache_clear()
        with pytest.raises(DataError, match="no working GPT-2 tokenizer"):
            gpt2_tokenizer()
    finally:
        gpt2_tokenizer.cache_clear()


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(1, 12))
def test_cutting_a_long_text_changes_no_token(text: str, long_chars: int) -> None:
    before, encode.LONG_CHARS = encode.LONG_CHARS, long_chars
    try:
        piece = encode_documents(DocumentBatch([text], np.array([False])), gpt2_tokenizer(), None)
    finally:
        encode.LONG_CHARS = before
    assert np.concatenate(piece.train or [[]]).tolist() == tokens(text, "tiktoken")


def test_a_document_without_a_place_to_cut_is_skipped_only_when_enormous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "LONG_CHARS", 100)
    monkeypatch.setattr(encode, "MOST_UNBROKEN_CHARS", 1000)
    batch = DocumentBatch(["short", "a" * 1001, "b" * 1000], np.zeros(3, np.bool_), "x.parquet: rows 0 to 2")
    piece = encode_documents(batch, gpt2_tokenizer(), 50256)
    assert piece.account.skipped == {"unbroken run over 16 MiB": 1}
    assert piece.account.problems == ["x.parquet: rows 0 to 2: 1 with an unbroken run of over 16 MiB skipped"]
    assert np.concatenate(piece.train or [[]]).tolist() == [
        *tokens("short", "tiktoken"),
        50256,
        *tokens("b" * 1000, "tiktoken"),
        50256,
    ]


@given(st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_a_stream_shows_whole_characters_only_and_all_of_them(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    stream = tokenizer.stream()
    shown = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(shown) + stream.finish() == text
    assert all(part == "" or text.find(part) >= 0 for part in shown)


def test_half_a_character_and_unknown_ids_decode_to_the_replacement_character() -> None:
    tokenizer = load_tokenizer("gpt2")
    smile = tokenizer.encode("🙂")
    assert tokenizer.decode(smile[:-1]).endswith("\ufffd")
    assert tokenizer.decode([50300]) == "\ufffd"  # nanoGPT pads the vocabulary to 50304
    assert tokenizer.decode([50256]) == "<|endoftext|>"


def test_lone_surrogates_become_replacement_characters() -> None:
    assert load_tokenizer("gpt2").encode("a\ud800b") == load_tokenizer("gpt2").encode("a\ufffdb")


def test_bytes_have_257_tokens_and_chars_are_numbered_as_nanogpt_does() -> None:
    assert load_tokenizer("bytes").encode("hé") == [104, 195, 169]
    assert load_tokenizer("bytes").vocab_size == 257
    chars = char_tokenizer(alphabet_table(set("banana")))
    assert chars.encode("nab") == [2, 0, 1]
    assert chars.end_of_text is None
    with pytest.raises(DataError, match="'x' is not in"):
        chars.encode("x")


def small_tokenizer_json(**changes: object) -> str:
    spec = json.loads(gpt2_vocabulary.tokenizer_json())
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spec["added_tokens"] = [{"id": 50256, "content": "<|endoftext|>"} | special]
    return json.dumps(spec | changes)


def test_any_tokenizer_json_works_and_its_specials_stay_out_of_text(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(small_tokenizer_json())
    found = load_tokenizer(path)
    assert (found.vocab_size, found.end_of_text, found.dtype) == (50257, 50256, "uint16")
    assert found.encode("Hello <|endoftext|>") == load_tokenizer("gpt2").encode("Hello <|endoftext|>")
    assert found.decode(found.encode("naïve 漢字")) == "naïve 漢字"
    info = DatasetInfo(tmp_path, None, None, tokenizer="tokenizer.json", tokenizer_sha256="0", tokenizer_file=path)
    with pytest.raises(DataError, match="is not the tokenizer this data was made with"):
        load_tokenizer(info)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": {"vocab": {}}}', '{"model": {"vocab": 3}}'])
def test_a_file_that_is_no_tokenizer_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_tokenizer(path)


def test_a_name_that_is_no_tokenizer_says_which_there_are() -> None:
    with pytest.raises(DataError, match="use gpt2, bytes, chars or a path"):
        load_tokenizer("gpt3")


@pytest.mark.parametrize("kind", ["unigram", "wordpiece", "bpe"])
def test_tokenizers_of_other_kinds_encode_as_their_library_does(tmp_path: Path, kind: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    texts = ["the quick brown fox jumps over the lazy dog again and again", "a naïve café </s> sat"] * 20
    special = ["<unk>", "</s>"]
    if kind == "unigram":
        model, trainer = (
            models.Unigram(),
            trainers.UnigramTrainer(vocab_size=80, special_tokens=special, unk_token="<unk>", show_progress=False),
        )
        before, after = pre_tokenizers.Metaspace(), decoders.Metaspace()
    elif kind == "wordpiece":
        model, trainer = (
            models.WordPiece(unk_token="<unk>"),
            trainers.WordPieceTrainer(vocab_size=120, special_tokens=special, show_progress=False),
        )
        before, after = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    else:
        model, trainer = models.BPE(), trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
        before, after = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    trained = tokenizers.Tokenizer(model)
    trained.pre_tokenizer, trained.decoder = before, after
    trained.train_from_iterator(texts, trainer)
    trained.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(tmp_path / "tokenizer.json")
    text = "the lazy fox sat again"
    assert found.encode(text) == trained.encode(text, add_special_tokens=False).ids
    assert found.decode(found.encode(text)).strip() == text
    assert found.end_of_text == trained.token_to_id("</s>")
    assert found.end_of_text not in found.encode("over </s> the")


def test_a_word_list_without_an_unknown_token_encodes_its_own_words(tmp_path: Path) -> None:
    """As a character model is exported: the self-test's sample has characters it does not know."""
    pytest.importorskip("tokenizers")
    words = {character: index for index, character in enumerate("abc ")}
    isolated = {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False}
    spec = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": isolated, "post_processor": None, "decoder": None,
            "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}}  # fmt: skip
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    assert load_tokenizer(path).encode("cab a") == [2, 0, 1, 3, 0]
