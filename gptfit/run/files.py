"""Writing a file so that it is there whole or not at all, and the lock of a run folder."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from gptfit.errors import RunError
from gptfit.units import gib

TEMPORARY = ".tmp"


def write_whole(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Under a temporary name, flushed to the disk, then renamed: a crash leaves the old file or the new one."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut; Windows has no such call and needs none."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def check_free_space(folder: Path, needed_bytes: int, what: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise RunError(f"{folder}: {what} needs {gib(needed_bytes)}, {gib(free)} is free; make room on this disk")


def make_run_folder(out_dir: str) -> Path:
    """The folder of a run, there and writable."""
    folder = Path(out_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable{TEMPORARY}"
        probe.touch()
        probe.unlink(missing_ok=True)  # several processes may try at once
    except OSError as error:
        raise RunError(f"{folder}: cannot write here ({error.strerror}); choose another --out_dir") from None
    return folder


class FolderLock:
    """One training process per folder. The system drops the lock when the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / ".lock", "a+", encoding="ascii")  # noqa: SIM115 - held as long as the run
        try:
            _lock(self._file)
        except OSError:
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            self._file.close()
            raise RunError(
                f"{folder}: process {owner} is training into this folder; wait for it, stop it, or use another --out_dir"
            ) from None
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def release(self) -> None:
        self._file.close()


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[str]) -> None:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(file: IO[str]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
