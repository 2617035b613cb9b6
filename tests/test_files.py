"""A file is there whole or not at all, also when two processes write it at once."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gptfit.errors import DataError
from gptfit.files import FolderLock, write_whole

WRITER = """
import sys
from pathlib import Path
from gptfit.files import write_whole
for _ in range(60):
    write_whole(Path(sys.argv[1]), sys.argv[2].encode() * 300_000)
"""


def test_two_writers_leave_one_whole_file_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, page, letter]) for letter in "ab"]
    while any(writer.poll() is None for writer in writers):
        if page.exists():
            assert page.read_bytes() in (b"a" * 300_000, b"b" * 300_000)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert list(tmp_path.iterdir()) == [page]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_whole(page, b"old")

    def half(file: object) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_whole(page, half)
    assert page.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [page]


def test_parts_of_a_folder_are_locked_each_for_itself_and_a_patient_writer_gets_its_turn(tmp_path: Path) -> None:
    first = FolderLock(tmp_path, "writing", "wait", part="shard 1")
    with FolderLock(tmp_path, "preparing data in", "wait"), FolderLock(tmp_path, "writing", "wait", part="shard 2"):
        with pytest.raises(DataError, match=r"process \d+ is writing shard 1; wait"):
            FolderLock(tmp_path, "writing", "wait", DataError, part="shard 1", patience=0.1)
        threading.Timer(0.2, first.release).start()
        FolderLock(tmp_path, "writing", "wait", part="shard 1", patience=60).release()
    assert not list(tmp_path.iterdir())
