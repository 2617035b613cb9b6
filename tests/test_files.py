"""A file is there whole or not at all, also when two processes write it at once."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import gptfit
from gptfit.errors import DataError
from gptfit.files import FolderLock, publish_tree, temporary_name, write_whole

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


def test_a_leftover_of_a_process_that_cannot_be_is_nobodys(tmp_path: Path) -> None:
    """Larger than the system's numbers of processes: not written by us, so it stays, and stops nobody."""
    page = tmp_path / "manifest.json"
    machine = temporary_name(page).name.split(".")[2].partition("-")[0]
    odd = tmp_path / f"manifest.json.{machine}-{10**22}.tmp"
    odd.touch()
    write_whole(page, b"new")
    assert page.read_bytes() == b"new"
    assert odd.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for a descriptor's name")
def test_a_folder_that_others_wrote_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"
    (made / "inner").mkdir(parents=True)
    for name in ("a.json", "inner/b.bin"):
        (made / name).write_bytes(b"content")
    done: list[str] = []
    real_sync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_sync(descriptor)

    def rename(source: Path, target: Path) -> None:
        done.append("rename")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    publish_tree(made, tmp_path / "named")
    before = done[: done.index("rename")]
    assert sorted(before) == ["a.json", "b.bin", "inner"]
    assert (tmp_path / "named" / "inner" / "b.bin").read_bytes() == b"content"


def test_no_other_module_gives_files_their_names() -> None:
    """What is renamed, linked or flushed elsewhere escapes the rules of files.py. The token files grow by themselves,
    and a run that is set aside is moved file by file."""
    allowed = {"files.py", "data/bins.py", "checkpoint/store.py"}
    package = Path(gptfit.__file__).parent
    calls = {"os." + name for name in ("replace", "rename", "link", "symlink", "fsync", "ftruncate", "truncate")}
    found = {
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in calls
    }
    assert found <= allowed


def test_parts_of_a_folder_are_locked_each_for_itself_and_a_patient_writer_gets_its_turn(tmp_path: Path) -> None:
    first = FolderLock(tmp_path, "writing", "wait", part="shard 1")
    with FolderLock(tmp_path, "preparing data in", "wait"), FolderLock(tmp_path, "writing", "wait", part="shard 2"):
        with pytest.raises(DataError, match=r"process \d+ is writing shard 1; wait"):
            FolderLock(tmp_path, "writing", "wait", DataError, part="shard 1", patience=0.1)
        threading.Timer(0.2, first.release).start()
        FolderLock(tmp_path, "writing", "wait", part="shard 1", patience=60).release()
    assert not list(tmp_path.iterdir())
