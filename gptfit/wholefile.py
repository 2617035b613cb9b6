"""Writing a file so that it is there whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

TEMPORARY = ".tmp"


def write_whole(path: Path, content: bytes | Callable[[IO[bytes]], None]) -> None:
    """Under a temporary name, flushed to the disk, then renamed: a crash leaves the old file or the new one.

    Raises the OSError of a place that cannot be written, or of a full disk, for the caller to put in its words.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")  # two processes may write the same page
    try:
        with open(temporary, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
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
