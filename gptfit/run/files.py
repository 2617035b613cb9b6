"""The folder of a run: writable, with room, and one process at a time."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import IO

from gptfit.errors import RunError
from gptfit.units import gib
from gptfit.wholefile import TEMPORARY


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
