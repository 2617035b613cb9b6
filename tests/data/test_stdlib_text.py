"""The quickstart's text: the same installation gives the same file, and a second run does not touch it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptfit.data import stdlib_text


def test_a_second_quickstart_finds_its_text_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new date would make `prepare` refuse the folder it made the first time."""
    documents = [("manual/a", "some text " * 50), ("os.py", "other text " * 50)]
    monkeypatch.setattr(stdlib_text, "stdlib_documents", lambda: iter(documents))
    path = tmp_path / "docs.parquet"
    assert stdlib_text.write_stdlib_parquet(path) == 2
    first = path.stat()
    assert stdlib_text.write_stdlib_parquet(path) == 2
    second = path.stat()
    assert (second.st_mtime_ns, second.st_ino) == (first.st_mtime_ns, first.st_ino)
    documents.append(("re.py", "new text " * 50))
    assert stdlib_text.write_stdlib_parquet(path) == 3
    assert path.stat().st_ino != first.st_ino
    assert [file.name for file in tmp_path.iterdir()] == ["docs.parquet"]
