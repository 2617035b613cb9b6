"""Prepare: known token counts, nanoGPT's files, one split and one order for any number of workers."""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from gptfit.data import work
from gptfit.data.options import PrepareOptions
from gptfit.data.prepare import forecast, prepare
from gptfit.data.tokenizer import load_tokenizer
from gptfit.dataset import read_dataset
from gptfit.errors import DataError, UsageError

from .conftest import Kept, WriteParquet, digest, ids, stories

END = 50256


def split_documents(tokens: list[int]) -> list[tuple[int, ...]]:
    found, current = [], []
    for token in tokens:
        if token == END:
            found.append(tuple(current))
            current = []
        else:
            current.append(token)
    assert not current, "the last document has no end-of-text"
    return found


@pytest.mark.parametrize(("name", "tokens"), [("web_usgov", 3_040_131), ("web_mdn", 14_698_118)])
def test_the_web_files_have_their_known_number_of_tokens(shared: Path, tmp_path: Path, name: str, tokens: int) -> None:
    source = shared / "data" / f"{name}.parquet"
    info = prepare(PrepareOptions((str(source),), tmp_path / "out"))
    assert info.train is not None
    assert info.val is not None
    assert info.train.tokens + info.val.tokens == tokens
    assert info.val.tokens >= 64 * 1024


def test_tinyshakespeare_splits_as_nanogpts_does(shared: Path, tmp_path: Path) -> None:
    source = shared / "data" / "tinyshakespeare.txt"
    info = prepare(PrepareOptions((str(source),), tmp_path / "bpe"))
    assert info.train is not None
    assert info.val is not None
    assert (info.train.tokens, info.val.tokens) == (301_966, 36_059)
    chars = prepare(PrepareOptions((str(source),), tmp_path / "chars", tokenizer="chars"))
    assert chars.train is not None
    assert chars.val is not None
    assert (chars.train.tokens, chars.val.tokens, chars.vocab_size) == (1_003_854, 111_540, 65)


def test_char_files_are_byte_for_byte_nanogpts(shared: Path, tmp_path: Path) -> None:
    """The recipe of nanoGPT's data/shakespeare_char/prepare.py, written out here."""
    text = (shared / "data" / "tinyshakespeare.txt").read_text()
    stoi = {character: i for i, character in enumerate(sorted(set(text)))}
    expected = np.array([stoi[character] for character in text[: int(len(text) * 0.9)]], np.uint16)
    out = tmp_path / "out"
    prepare(PrepareOptions((str(shared / "data" / "tinyshakespeare.txt"),), out, tokenizer="chars"))
    assert (out / "train.bin").read_bytes() == expected.tobytes()
    meta = pickle.loads((out / "meta.pkl").read_bytes())
    assert meta == {"vocab_size": 65, "stoi": stoi, "itos": {i: character for character, i in stoi.items()}}


def test_every_document_is_there_once_in_order_with_one_end_of_text(parquet: WriteParquet, tmp_path: Path) -> None:
    texts = stories(400)
    prepare(PrepareOptions((str(parquet("a.parquet", texts)),), tmp_path / "out"))
    encode = load_tokenizer("gpt2").encode
    train = split_documents(ids(tmp_path / "out" / "train.bin"))
    val = split_documents(ids(tmp_path / "out" / "val.bin"))
    expected = [tuple(encode(text)) for text in texts]
    assert Counter(train + val) == Counter(expected)
    assert train == [document for document in expected if document not in set(val)]


def test_the_manifest_counts_what_is_in_the_files(parquet: WriteParquet, tmp_path: Path, kept: Kept) -> None:
    texts = [*stories(30), None, "", b"broken \xff\xfe text".decode("latin-1")]
    raw = [text.encode() if text is not None else None for text in texts]
    raw[-1] = b"broken \xff\xfe text"
    source = parquet("a.parquet", raw, kind=pa.binary())
    out = tmp_path / "out"
    prepare(PrepareOptions((str(source),), out), kept)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["skipped"] == {"empty": 1, "null": 1}
    assert manifest["replaced"] == {"invalid UTF-8": 1}
    splits = manifest["splits"]
    assert splits["train"]["documents"] + splits["val"]["documents"] == 31
    sizes = {name: (out / f"{name}.bin").stat().st_size // 2 for name in ("train", "val")}
    assert sizes == {name: splits[name]["tokens"] for name in ("train", "val")}
    in_bytes = sum(len(text.encode()) for text in texts[:30]) + len("broken \ufffd\ufffd text".encode())
    assert splits["train"]["bytes"] + splits["val"]["bytes"] == in_bytes
    assert manifest["sources"] == [
        {"path": str(source), "size": source.stat().st_size, "stamp": str(source.stat().st_mtime_ns), "rows": 33}
    ]
    assert manifest["tokenizer"]["sha256"].startswith("1ce16647")
    assert f"{source}: row 30: null text skipped" in kept.notes
    assert f"{source}: row 32: invalid UTF-8 replaced" in kept.notes
    assert read_dataset(out).bytes_per_token == splits["train"]["bytes"] / splits["train"]["tokens"]


def test_the_bytes_are_the_same_for_any_number_of_workers(
    parquet: WriteParquet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "BATCH_BYTES", 3000)
    sources = tuple(str(parquet(f"{i}.parquet", stories(150, i), rows=20 + 40 * i)) for i in range(3))
    for shuffle in (False, True):
        found = []
        for workers in (1, 2, 7):
            out = tmp_path / f"{shuffle} {workers}"
            prepare(PrepareOptions(sources, out, shuffle=shuffle, workers=workers))
            found.append(digest(out))
        assert found[0] == found[1] == found[2]


def test_shuffle_is_a_seeded_permutation_of_the_same_documents(parquet: WriteParquet, tmp_path: Path) -> None:
    sources = tuple(str(parquet(f"{i}.parquet", stories(100, i), rows=20)) for i in range(2))

    def documents_of(name: str, **options: object) -> list[tuple[int, ...]]:
        prepare(PrepareOptions(sources, tmp_path / name, **options))  # type: ignore[arg-type]
        return split_documents(ids(tmp_path / name / "train.bin"))

    plain, mixed, again = documents_of("a"), documents_of("b", shuffle=True), documents_of("c", shuffle=True)
    assert mixed == again
    assert mixed != plain
    assert Counter(mixed) == Counter(plain)
    places = [mixed.index(document) for document in plain]
    from_first_file = [place for place in places[:90] if place >= 90]
    assert len(from_first_file) > 20, "documents of the two files are not mixed with each other"


def test_a_document_keeps_its_split_when_files_are_added(parquet: WriteParquet, tmp_path: Path) -> None:
    first, second = (parquet(f"{i}.parquet", stories(200, i)) for i in range(2))
    prepare(PrepareOptions((str(first),), tmp_path / "one", val_fraction=0.2))
    prepare(PrepareOptions((str(first), str(second)), tmp_path / "two", val_fraction=0.2))
    alone = set(split_documents(ids(tmp_path / "one" / "val.bin")))
    both = set(split_documents(ids(tmp_path / "two" / "val.bin")))
    train_both = set(split_documents(ids(tmp_path / "two" / "train.bin")))
    assert 20 < len(alone) < 60
    assert alone < both
    assert not alone & train_both


def test_a_small_data_set_gets_a_tenth_for_validation_and_two_rows_get_one(
    parquet: WriteParquet, tmp_path: Path
) -> None:
    prepare(PrepareOptions((str(parquet("a.parquet", stories(200))),), tmp_path / "a"))
    assert json.loads((tmp_path / "a" / "manifest.json").read_text())["splits"]["val"]["documents"] == 20
    info = prepare(PrepareOptions((str(parquet("b.parquet", stories(2))),), tmp_path / "b"))
    assert info.val is not None
    assert info.val.documents == 1


def test_limits_stop_after_the_document_that_reaches_them(parquet: WriteParquet, tmp_path: Path) -> None:
    texts = stories(300)
    source = str(parquet("a.parquet", texts))
    few = prepare(PrepareOptions((source,), tmp_path / "documents", limit_documents=77))
    assert few.train is not None
    assert few.val is not None
    assert (few.train.documents or 0) + (few.val.documents or 0) == 77
    lengths = [len(load_tokenizer("gpt2").encode(text)) + 1 for text in texts]
    cut = prepare(PrepareOptions((source,), tmp_path / "tokens", limit_tokens=2000))
    assert cut.train is not None
    assert cut.val is not None
    expected = next(sum(lengths[: i + 1]) for i in range(300) if sum(lengths[: i + 1]) >= 2000)
    assert cut.train.tokens + cut.val.tokens == expected


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.string())]
)
def test_every_kind_of_text_column_gives_the_same_bytes(
    parquet: WriteParquet, tmp_path: Path, kind: pa.DataType
) -> None:
    prepare(PrepareOptions((str(parquet("a/x.parquet", stories(60))),), tmp_path / "plain"))
    texts = stories(60) if pa.types.is_dictionary(kind) or "string" in str(kind) else [t.encode() for t in stories(60)]
    array = pa.array(texts).dictionary_encode() if pa.types.is_dictionary(kind) else texts
    prepare(
        PrepareOptions(
            (str(parquet("b/x.parquet", array, kind=None if array is not texts else kind)),), tmp_path / "other"
        )
    )
    assert digest(tmp_path / "plain") == digest(tmp_path / "other")


def test_a_vocabulary_over_65536_is_written_as_uint32(parquet: WriteParquet, tmp_path: Path) -> None:
    from gptfit.data import gpt2_vocabulary

    spec = json.loads(gpt2_vocabulary.tokenizer_json())
    spec["model"]["vocab"] |= {f"filler{i}": 50256 + i for i in range(20_000)}
    path = tmp_path / "big.json"
    path.write_text(json.dumps(spec))
    info = prepare(
        PrepareOptions((str(parquet("a.parquet", stories(20))),), tmp_path / "out", tokenizer=str(path), val_fraction=0)
    )
    assert (info.dtype, info.vocab_size, info.tokenizer) == ("uint32", 70_256, "tokenizer.json")
    assert ids(tmp_path / "out" / "train.bin", "uint32")[:3] == load_tokenizer("gpt2").encode(stories(20)[0])[:3]
    assert load_tokenizer(info).decode(ids(tmp_path / "out" / "train.bin", "uint32")).startswith("0/0 ")


def test_bytes_and_chars_read_back_through_their_folder(parquet: WriteParquet, tmp_path: Path) -> None:
    texts = stories(20)
    for name, end in (("bytes", "<|endoftext|>"), ("chars", "\n")):
        info = prepare(
            PrepareOptions((str(parquet("a.parquet", texts)),), tmp_path / name, tokenizer=name, val_fraction=0)
        )
        text = load_tokenizer(info).decode(ids(tmp_path / name / "train.bin"))
        assert text.startswith(texts[0] + end + texts[1] + end)


def test_a_forecast_of_long_documents_brackets_the_truth(parquet: WriteParquet, tmp_path: Path) -> None:
    words = random.Random(0).choices(
        ["the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "on", "by"], k=2_000_000
    )
    source = parquet("books.parquet", [" ".join(words[i : i + 200_000]) for i in range(0, 2_000_000, 200_000)])
    options = PrepareOptions((str(source),), tmp_path / "out")
    found = forecast(options).tokens
    info = prepare(options)
    assert info.train is not None
    assert info.val is not None
    total = info.train.tokens + info.val.tokens
    assert found.low <= total <= found.high


def test_a_forecast_writes_nothing_and_brackets_the_truth(shared: Path, tmp_path: Path) -> None:
    options = PrepareOptions((str(shared / "data" / "web_mdn.parquet"),), tmp_path / "out")
    found = forecast(options)
    assert not options.out.exists()
    assert found.rows == 14_585
    assert found.tokens.low <= 14_698_118 <= found.tokens.high
    assert abs(found.text_bytes / 48_970_731 - 1) < 0.01


def test_progress_ends_at_its_denominator(parquet: WriteParquet, tmp_path: Path, kept: Kept) -> None:
    prepare(PrepareOptions((str(parquet("a.parquet", stories(300))),), tmp_path / "out"), kept)
    assert kept.steps[-1].source_bytes == kept.forecasts[0].source_bytes
    assert kept.steps[-1].documents == 300


def test_a_prepared_folder_is_left_alone_the_second_time(parquet: WriteParquet, tmp_path: Path, kept: Kept) -> None:
    options = PrepareOptions((str(parquet("a.parquet", stories(30))),), tmp_path / "out")
    prepare(options)
    before = (tmp_path / "out" / "train.bin").stat().st_mtime_ns
    prepare(options, kept)
    assert (tmp_path / "out" / "train.bin").stat().st_mtime_ns == before
    assert "already prepared" in kept.notes[0]
    with pytest.raises(DataError, match="--restart to replace it"):
        prepare(PrepareOptions(options.sources, options.out, seed=1))
    prepare(PrepareOptions(options.sources, options.out, seed=1, restart=True))


def test_a_folder_of_someone_elses_is_not_overwritten(parquet: WriteParquet, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.bin").write_bytes(b"ab")
    with pytest.raises(DataError, match=r"already holds train\.bin"):
        prepare(PrepareOptions((str(parquet("a.parquet", stories(3))),), tmp_path / "out"))
    assert (tmp_path / "out" / "train.bin").read_bytes() == b"ab"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_fraction": 1.5}, "val-fraction"),
        ({"limit_tokens": 0}, "less than one"),
        ({"engine": "ray", "limit_tokens": 5}, "order"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PrepareOptions(("x",), Path("out"), **options)  # type: ignore[arg-type]
