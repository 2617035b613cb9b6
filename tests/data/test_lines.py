"""JSON lines, CSV and text files give the same tokens as the same documents in Parquet."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest

from gptfit.data import lines
from gptfit.data.options import PrepareOptions
from gptfit.data.prepare import prepare
from gptfit.data.sources import find_sources
from gptfit.data.tokenizer import load_tokenizer
from gptfit.errors import DataError

from .conftest import Kept, WriteParquet, ids, stories

TEXTS = [*stories(120), 'a "quoted", text\nwith a newline', "tabs\tand\r\nreturns"]


def write(path: Path, texts: list[str]) -> Path:
    if path.suffix == ".csv":
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["id", "text"], *([i, text] for i, text in enumerate(texts))])
        return path
    raw = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()
    if path.suffix == ".gz":
        raw = gzip.compress(raw)
    if path.suffix == ".zst":
        raw = pa.compress(raw, "zstd", asbytes=True)
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.jsonl.zst", "x.csv"])
def test_line_files_give_the_tokens_of_parquet(
    parquet: WriteParquet, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "CHUNK", 1000)  # many chunks that end inside a line
    prepare(PrepareOptions((str(parquet("x.parquet", TEXTS)),), tmp_path / "parquet", val_fraction=0))
    prepare(PrepareOptions((str(write(tmp_path / name, TEXTS)),), tmp_path / "lines", val_fraction=0))
    assert ids(tmp_path / "lines" / "train.bin") == ids(tmp_path / "parquet" / "train.bin")


def test_json_lines_take_nulls_blanks_and_lone_surrogates(tmp_path: Path, kept: Kept) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "one"}\n\n{"text": null}\n{"text": ""}\n{"text": "half \\ud83d pair"}\n{"text": "last"}'
    )
    info = prepare(PrepareOptions((str(path),), tmp_path / "out", val_fraction=0), kept)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["skipped"] == {"empty": 1, "null": 1}
    assert manifest["replaced"] == {"lone surrogate": 1}
    text = load_tokenizer(info).decode(ids(tmp_path / "out" / "train.bin"))
    assert text == "one<|endoftext|>half \ufffd pair<|endoftext|>last<|endoftext|>"


def test_bad_json_lines_are_skipped_and_counted_one_by_one_when_asked(tmp_path: Path, kept: Kept) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": \n{"body": "x"}\n{"text": 7}\n{"text": "last"}\n')
    info = prepare(PrepareOptions((str(path),), tmp_path / "out", val_fraction=0, skip_bad=True), kept)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["skipped"] == {"no text column": 1, "not JSON": 1, "not text": 1}
    assert load_tokenizer(info).decode(ids(tmp_path / "out" / "train.bin")) == "one<|endoftext|>last<|endoftext|>"
    assert f"{path}:3: has no 'text'; it has body (use --text-column) (skipped)" in kept.notes


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
def test_bytes_that_are_not_utf8_are_replaced_and_counted_as_in_parquet(
    parquet: WriteParquet, tmp_path: Path, name: str
) -> None:
    raw = b"good \xff\xfe\xe6\xbc bad \xed\xa0\x80"
    content = {"a.jsonl": b'{"text": "' + raw + b'"}\n', "a.csv": b"text\n" + raw + b"\n", "a.txt": raw}[name]
    (tmp_path / name).write_bytes(content)
    options = PrepareOptions((str(tmp_path / name),), tmp_path / "out", val_fraction=0, split="hash")
    prepare(options)
    prepare(PrepareOptions((str(parquet("a.parquet", [raw], kind="binary")),), tmp_path / "parquet", val_fraction=0))
    assert ids(tmp_path / "out" / "train.bin") == ids(tmp_path / "parquet" / "train.bin")
    for folder in ("out", "parquet"):
        manifest = json.loads((tmp_path / folder / "manifest.json").read_text())
        assert manifest["replaced"] == {"invalid UTF-8": 1}


def test_a_long_text_stays_whole_when_shuffled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptfit.data.work.BATCH_BYTES", 3000)
    monkeypatch.setattr(lines, "CHUNK", 1000)
    texts = ["\n\n".join(stories(30, seed)) for seed in range(3)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
    info = prepare(PrepareOptions((str(tmp_path),), tmp_path / "out", val_fraction=0, shuffle=True))
    decoded = load_tokenizer(info).decode(ids(tmp_path / "out" / "train.bin")).split("<|endoftext|>")
    assert sorted(decoded) == sorted([*texts, ""])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "ok"}\n{"text": ', r"a\.jsonl:2: is not JSON"),
        ("a.jsonl", b'{"text": "ok"}\n{"body": "x", "n": 1}\n', r"a\.jsonl:2: has no 'text'; it has body, n"),
        ("a.jsonl", b'{"text": 7}\n', r"a\.jsonl:1: 'text' holds int, not text"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl:1: has no 'text'; it has list"),
        ("a.jsonl.gz", b"not gzip at all", r"a\.jsonl\.gz: cannot be read"),
        ("a.csv", b"id,body\n1,x\n", r"a\.csv: has no column 'text'; it has id, body"),
        ("a.csv", b"", r"a\.csv: is empty"),
        ("a.doc", b"x", r"a\.doc: is none of"),
    ],
)
def test_bad_line_files_name_the_file_and_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare(PrepareOptions((str(tmp_path / name),), tmp_path / "out"))


def test_a_text_file_is_one_document_cut_where_no_token_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "CHUNK", 1000)
    monkeypatch.setattr("gptfit.data.work.BATCH_BYTES", 3000)
    text = "\n\n".join(stories(60)) + "   "
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.txt").write_text("second", encoding="utf-8")
    info = prepare(PrepareOptions((str(tmp_path),), tmp_path / "out", val_fraction=0))
    expected = [*load_tokenizer().encode(text), 50256, *load_tokenizer().encode("second"), 50256]
    assert ids(tmp_path / "out" / "train.bin") == expected
    assert info.train is not None
    assert info.train.documents == 2


def test_the_tail_of_a_single_text_is_validation_to_the_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "CHUNK", 1000)
    monkeypatch.setattr("gptfit.data.work.BATCH_BYTES", 3000)
    text = "\n\n".join(stories(60))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    cut = int(len(text) * (1 - 0.25))
    for tokenizer in ("gpt2", "bytes"):
        out = tmp_path / tokenizer
        info = prepare(PrepareOptions((str(tmp_path / "a.txt"),), out, val_fraction=0.25, tokenizer=tokenizer))
        assert load_tokenizer(info).decode(ids(out / "train.bin")) == text[:cut]
        assert load_tokenizer(info).decode(ids(out / "val.bin")) == text[cut:]
    (tmp_path / "b.txt").write_text("x")
    with pytest.raises(DataError, match="--split tail cuts one text"):
        prepare(PrepareOptions((str(tmp_path / "?.txt"),), tmp_path / "two", split="tail"))


def test_sources_are_files_folders_and_globs_each_once_in_order(tmp_path: Path, parquet: WriteParquet) -> None:
    for name in ("b/2.parquet", "b/1.parquet", "a [x].parquet"):
        parquet(name, ["t"])
    (tmp_path / "b" / "notes.md").write_text("not a source")
    found = [Path(s.location).name for s in find_sources([str(tmp_path / "b"), str(tmp_path / "b" / "*.parquet")])]
    assert found == ["1.parquet", "2.parquet"]
    assert len(find_sources([str(tmp_path / "a [x].parquet")])) == 1
    for missing in ("c.parquet", "*.jsonl"):
        with pytest.raises(DataError, match="no such file"):
            find_sources([str(tmp_path / missing)])
    (tmp_path / "void").mkdir()
    with pytest.raises(DataError, match="this folder holds no"):
        find_sources([str(tmp_path / "void")])


def test_a_truncated_or_joined_gzip_is_noticed_or_read_whole(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in stories(400)))
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz"):
        prepare(PrepareOptions((str(tmp_path / "cut.jsonl.gz"),), tmp_path / "cut"))
    (tmp_path / "joined.jsonl.gz").write_bytes(whole + whole)
    info = prepare(PrepareOptions((str(tmp_path / "joined.jsonl.gz"),), tmp_path / "joined", val_fraction=0))
    assert info.train is not None
    assert info.train.documents == 800
