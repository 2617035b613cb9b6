"""The verbs prepare, inspect and tokenizer as a person runs them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from gptfit.cli import main
from gptfit.data.describe import describe_folder
from gptfit.data.tokenizer import load_tokenizer
from gptfit.dataset import default_name
from gptfit.errors import UsageError
from gptfit.verbs.prepare import parse_limit

from .conftest import WriteParquet, ids, stories


def test_prepare_says_what_it_will_do_and_what_it_did(
    parquet: WriteParquet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = str(parquet("a.parquet", stories(200))), tmp_path / "out"
    assert main(["prepare", source, "--out", str(out), "--dry-run"]) == 0
    dry = capsys.readouterr().out
    assert "1 file, 200 rows" in dry
    assert not out.exists()
    assert main(["prepare", source, "--out", str(out), "--limit", "150", "--workers", "1"]) == 0
    shown = capsys.readouterr().out
    tokens = len(ids(out / "train.bin"))
    assert f"{tokens:,} tokens" in shown
    assert "bytes of text per token" in shown
    assert re.search(rf"^next: gptfit propose .*--data {re.escape(str(out))} --hours 12$", shown, re.M)


def test_a_bad_file_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    assert main(["prepare", str(tmp_path / "a.parquet"), "--out", str(tmp_path / "out")]) == 1
    assert (
        capsys.readouterr().err
        == f"gptfit: {tmp_path}/a.parquet: is empty (0 bytes); it was not written or downloaded whole\n"
    )
    assert main(["prepare", str(tmp_path / "a.parquet"), "--limit", "many"]) == 1
    assert "--limit many" in capsys.readouterr().err


def test_inspect_shows_a_file_and_a_folder(
    parquet: WriteParquet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = str(parquet("a.parquet", ["first document", "second", None, "fourth"])), str(tmp_path / "out")
    assert main(["inspect", source]) == 0
    shown = capsys.readouterr().out
    assert "text  string" in shown
    assert "document 2:\n  second\ndocument 3:\n  fourth" in shown
    main(["prepare", source, "--out", out, "--val-fraction", "0"])
    capsys.readouterr()
    assert main(["inspect", out]) == 0
    shown = capsys.readouterr().out
    assert "skipped: 1 null" in shown
    assert "first document<|endoftext|>second<|endoftext|>fourth<|endoftext|>" in shown
    (tmp_path / "out" / "manifest.json").unlink()
    assert main(["inspect", out]) == 0
    assert "no manifest: read as nanoGPT does" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "none")]) == 1


def test_a_trained_tokenizer_is_the_size_asked_for_and_repeatable(
    parquet: WriteParquet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    source = str(parquet("a.parquet", stories(3000), rows=100))
    for name in ("one", "two"):
        words = ["tokenizer", "train", source, "--vocab-size", "300", "--out", str(tmp_path / f"{name}.json")]
        assert main(words) == 0
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert "bytes per token on held-out text" in capsys.readouterr().out
    assert main(words) == 1, "it would replace the vocabulary of data made before"
    assert "already there" in capsys.readouterr().err
    found = load_tokenizer(tmp_path / "one.json")
    assert found.vocab_size == 300
    text = "héllo 漢字 <|endoftext|>"
    assert found.decode(found.encode(text)) == text
    assert found.end_of_text not in found.encode(text)
    out = tmp_path / "out"
    assert main(["prepare", source, "--tokenizer", str(tmp_path / "one.json"), "--out", str(out)]) == 0
    assert describe_folder(out).starts[0].text.startswith("0/")
    assert json.loads((out / "manifest.json").read_text())["tokenizer"]["file"] == "tokenizer.json"


def test_too_little_text_for_a_vocabulary_says_how_many_entries_it_gives(
    parquet: WriteParquet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    source = str(parquet("a.parquet", ["tiny"] * 3))
    assert main(["tokenizer", "train", source, "--vocab-size", "9000", "--out", str(tmp_path / "t.json")]) == 1
    assert "entries can be learned from this much text" in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()
    assert main(["tokenizer", "train", source, "--sample-mib", "0", "--out", str(tmp_path / "t.json")]) == 1
    assert "--sample-mib 0 leaves nothing to learn from; give 1 or more" in capsys.readouterr().err
    assert main(["tokenizer", "train", source, "--vocab-size", "100", "--out", str(tmp_path / "t.json")]) == 1


def test_limits_are_documents_or_tokens() -> None:
    assert parse_limit("20k") == (20_000, None)
    assert parse_limit("1.5M tokens") == (None, 1_500_000)
    assert parse_limit("1_000documents") == (1000, None)
    with pytest.raises(UsageError, match="--limit ten"):
        parse_limit("ten")


def test_a_folder_is_named_after_its_first_source() -> None:
    assert default_name("x/000_00000.parquet") == "000_00000"
    assert default_name("https://example.org/a/texts.jsonl.gz?download=1") == "texts"
    assert default_name("folder/") == "folder"
    assert default_name("data/*.parquet") == "prepared"


def test_prepare_and_inspect_speak_json_and_count_one_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "notes.jsonl"
    source.write_text("".join(json.dumps({"text": f"document number {i}, a little longer"}) + "\n" for i in range(3)))
    words = ["prepare", str(source), "--out", str(tmp_path / "data"), "--tokenizer", "bytes", "--val-fraction", "0.4"]
    assert main([*words, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == 1
    assert main([*words, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["tokenizer"] == "bytes"
    assert made["train"]["documents"] + made["val"]["documents"] == 3
    assert main(["inspect", str(tmp_path / "data"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {key: found[key] for key in made} == made
    assert found["starts"]["train"]["text"].startswith("document number")
    assert main(["inspect", str(source), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["samples"]) == 3
    assert main(["inspect", str(tmp_path / "data")]) == 0
    said = capsys.readouterr().out
    assert "1 documents" not in said
    assert "in 1 document," in said


def test_a_tokenizer_without_its_extra_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "notes.txt"
    source.write_text("some text " * 100)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert main(["tokenizer", "train", str(source), "--vocab-size", "300", "--out", str(tmp_path / "t.json")]) == 1
    assert "pip install 'gptfit[hf]'" in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()
