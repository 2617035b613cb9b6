"""Sources that change, lie or ask for too much: one line, never wrong data, never all of the memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gptfit.cli import main
from gptfit.data import lines, work
from gptfit.data.http import HttpFile
from gptfit.data.options import PrepareOptions, PrepareProgress
from gptfit.data.prepare import prepare
from gptfit.errors import DataError

from .conftest import Kept, WriteParquet, stories
from .test_http import Server


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


def test_a_source_edited_while_it_is_read_is_noticed(
    tmp_path: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "BATCH_BYTES", 2000)
    source = tmp_path / "a.jsonl"
    rows = [json.dumps({"text": text}) for text in stories(400)]
    source.write_text("\n".join(rows) + "\n", encoding="utf-8")

    class Editing(Kept):
        def progress(self, progress: PrepareProgress) -> None:
            source.write_text("\n".join([*reversed(rows), rows[0]]) + "\n", encoding="utf-8")

    options = PrepareOptions((str(source),), tmp_path / "out", workers=1)
    with pytest.raises(DataError, match="changed while it was read"):
        prepare(options, Editing())
    assert not (options.out / "manifest.json").exists()
    with pytest.raises(DataError, match="--restart"):
        prepare(options, kept)


@pytest.mark.parametrize("said", ["bytes 0-{}/{}", "bytes 5-{}/{}", "", "bytes */{}"])
def test_a_server_that_answers_with_another_range_is_refused(server: Server, said: str) -> None:
    """206 with bytes from elsewhere is wrong data; found by comparing what was sent with what was asked for."""
    server.content = bytes(range(256)) * 4000
    file = HttpFile(server.url)
    handler: Any = server._http.RequestHandlerClass
    original = handler._send

    def lie(self: Any, status: int, body: bytes, content_range: str | None) -> None:
        size = len(server.content)
        original(self, status, server.content[5 : 5 + len(body)], said.replace("{}", str(size), 1).format(size))

    handler._send = lie
    file.seek(1000)
    with pytest.raises(DataError, match=r"the server sent|changed on the server"):
        file.read(100)


def test_too_little_memory_is_no_damage_and_is_never_skipped(
    parquet: WriteParquet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(parquet("a.parquet", stories(50)))

    def exhausted(*_: Any, **__: Any) -> Iterator[Any]:
        raise pa.ArrowMemoryError("malloc of size 12345 failed")

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", exhausted)
    options = PrepareOptions((source,), tmp_path / "out")
    for skip_bad in (False, True):
        with pytest.raises(DataError, match="not enough memory") as caught:
            prepare(replace(options, skip_bad=skip_bad, out=tmp_path / str(skip_bad)))
        assert "download" not in str(caught.value)


def test_one_endless_line_in_a_small_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zstandard

    monkeypatch.setattr(lines, "MOST_LINE_BYTES", 2**22)
    source = tmp_path / "bomb.jsonl.zst"
    source.write_bytes(zstandard.compress(b'{"text": "' + b"a" * 2**26 + b'"}\n'))
    assert source.stat().st_size < 20_000
    with pytest.raises(DataError, match="a line is longer than 4 MiB"):
        prepare(PrepareOptions((str(source),), tmp_path / "out"))


ENCRYPT = """
import base64, sys
import pyarrow as pa, pyarrow.parquet as pq, pyarrow.parquet.encryption as pe

class Keys(pe.KmsClient):
    def wrap_key(self, key, name):
        return base64.b64encode(key)
    def unwrap_key(self, wrapped, name):
        return base64.b64decode(wrapped)

factory = pe.CryptoFactory(lambda _: Keys())
wish = pe.EncryptionConfiguration(footer_key="f", column_keys={"k": ["text"]}, plaintext_footer=True)
properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), wish)
table = pa.table({"text": ["a b c"] * 10, "n": range(10)})
with pq.ParquetWriter(sys.argv[1], table.schema, encryption_properties=properties) as writer:
    writer.write_table(table)
"""


def test_an_encrypted_column_is_one_line_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    source = tmp_path / "secret.parquet"
    made = subprocess.run([sys.executable, "-c", ENCRYPT, str(source)], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"this pyarrow cannot encrypt: {made.stderr.splitlines()[-1]}")
    for words in (["prepare", str(source), f"--out={tmp_path / 'out'}"], ["inspect", str(source)]):
        done = subprocess.run([sys.executable, "-m", "gptfit", *words], capture_output=True, text=True, check=False)
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
        assert "encrypted columns" in done.stderr


def test_a_file_without_columns_is_described_and_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "none.parquet"
    pq.write_table(pa.table({}), source)
    assert main(["prepare", str(source), f"--out={tmp_path / 'out'}"]) == 1
    assert "has no column 'text'; it has none" in capsys.readouterr().err
    assert main(["inspect", str(source)]) in (0, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="names of any bytes as Linux has them")
def test_a_name_that_is_not_utf8_is_one_line(
    parquet: WriteParquet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.parquet")
    os.rename(parquet("a.parquet", stories(5)), odd)
    for words in (["prepare", odd, f"--out={tmp_path / 'out'}"], ["inspect", odd]):
        assert main(words) == 1
        assert "not UTF-8" in capsys.readouterr().err


def test_a_home_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "~nobody-has-this-name/x.parquet", f"--out={tmp_path / 'out'}"]) == 1
    assert "no such file" in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_one_line_everywhere(
    parquet: WriteParquet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = parquet("a.parquet", stories(5))
    source.chmod(0)
    for words in (["prepare", str(source), f"--out={tmp_path / 'out'}"], ["inspect", str(source)]):
        assert main(words) == 1
        assert "Permission denied" in capsys.readouterr().err


def test_what_cannot_be_opened_is_one_line(
    parquet: WriteParquet, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user without the right to read meets it, whoever runs the test."""
    import builtins

    source = parquet("a.parquet", stories(5))
    original = builtins.open

    def refuse(file: Any, *rest: Any, **named: Any) -> Any:
        if str(file) == str(source):
            raise PermissionError(13, "Permission denied", str(file))
        return original(file, *rest, **named)

    monkeypatch.setattr(builtins, "open", refuse)
    for words in (["prepare", str(source), f"--out={tmp_path / 'out'}"], ["inspect", str(source)]):
        assert main(words) == 1
        said = capsys.readouterr().err
        assert "Permission denied" in said
        assert "go on" not in said


def test_advice_to_go_on_is_given_only_where_it_helps(
    parquet: WriteParquet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(parquet("a.parquet", stories(5)))
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    assert main(["prepare", source, f"--out={blocked}"]) == 1
    said = capsys.readouterr().err
    assert "something else has this name" in said
    assert "to go on" not in said
    for name in ("empty.parquet", "empty.txt", "empty.jsonl"):
        (tmp_path / name).write_bytes(b"")
        assert main(["prepare", str(tmp_path / name), f"--out={tmp_path / 'out'}"]) == 1
        assert "download it again" not in capsys.readouterr().err


def test_the_signature_of_an_encrypted_footer_is_nobody_elses(parquet: WriteParquet) -> None:
    from gptfit.data.parquet import open_parquet

    path = parquet("a.parquet", stories(5))
    assert open_parquet(path, "a").metadata.num_rows == 5


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_one_line_and_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "a.parquet"
    os.mkfifo(pipe)
    out = f"--out={tmp_path / 'out'}"
    plan, wish = ["plan", "--gpu", "4070", "--data"], ["propose", "--gpu", "4070", "--hours", "1", "--data"]
    for words in (["prepare", out], ["inspect"], plan, wish):
        assert main([*words, str(pipe)]) == 1
        assert "is a pipe or a device, not a file" in capsys.readouterr().err


def test_a_folder_that_may_not_be_read_is_an_error_and_not_an_empty_one(
    parquet: WriteParquet, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passed by, its documents would be missing without a word."""
    parquet("texts/a.parquet", stories(5))
    parquet("texts/locked/b.parquet", stories(5))
    original = os.scandir

    def refuse(path: Any = ".") -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert main(["prepare", str(tmp_path / "texts"), f"--out={tmp_path / 'out'}"]) == 1
    assert "locked: cannot be read (Permission denied)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
