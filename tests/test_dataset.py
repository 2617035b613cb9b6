"""Prepared folders and bare nanoGPT folders describe themselves; damaged ones say what is wrong."""

from __future__ import annotations

import json
import pickle
from array import array
from pathlib import Path

import pytest

from gptfit.dataset import read_dataset
from gptfit.errors import DataError


def bins(folder: Path, train: int = 100, val: int = 10) -> Path:
    (folder / "train.bin").write_bytes(array("H", range(train)).tobytes())
    (folder / "val.bin").write_bytes(array("H", range(val)).tobytes())
    return folder


def manifest(folder: Path, **changes: object) -> None:
    content = {
        "format": "gptfit-dataset",
        "version": 1,
        "tokenizer": {"name": "gpt2", "sha256": "0", "vocab_size": 50257, "end_of_text": 50256, "file": None},
        "dtype": "uint16",
        "splits": {
            "train": {"tokens": 100, "documents": 3, "bytes": 420, "files": ["train.bin"]},
            "val": {"tokens": 10, "documents": 1, "bytes": 40, "files": ["val.bin"]},
        },
    }
    (folder / "manifest.json").write_text(json.dumps(content | changes))


def test_a_bare_nanogpt_folder_has_counts_and_no_tokenizer(tmp_path: Path) -> None:
    info = read_dataset(bins(tmp_path))
    assert info.train is not None
    assert (info.train.tokens, info.tokenizer, info.vocab_size) == (100, None, None)


def test_a_manifest_gives_tokenizer_and_bytes_per_token(tmp_path: Path) -> None:
    manifest(bins(tmp_path))
    info = read_dataset(tmp_path)
    assert (info.tokenizer, info.vocab_size, info.end_of_text, info.bytes_per_token) == ("gpt2", 50257, 50256, 4.2)


def test_nanogpt_meta_gives_the_vocabulary(tmp_path: Path) -> None:
    (bins(tmp_path) / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65, "itos": {0: "a"}, "stoi": {"a": 0}}))
    info = read_dataset(tmp_path)
    assert (info.vocab_size, info.tokenizer) == (65, "chars")


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("open('exploded', 'w')",)


def test_code_in_meta_pkl_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (bins(tmp_path) / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": Bomb()}))
    with pytest.raises(DataError, match=r"meta\.pkl.*it was not run"):
        read_dataset(tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_odd_bytes_missing_folder_and_wrong_counts_are_one_line_each(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such data folder"):
        read_dataset(tmp_path / "nope")
    with pytest.raises(DataError, match=r"no train\.bin"):
        read_dataset(tmp_path)
    manifest(bins(tmp_path, train=99))
    with pytest.raises(DataError, match="99 tokens where the manifest says 100"):
        read_dataset(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="damaged manifest"):
        read_dataset(tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "train.bin").write_bytes(b"123")
    with pytest.raises(DataError, match="odd"):
        read_dataset(tmp_path)
