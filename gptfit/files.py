"""The one module that changes files: whole or not at all, line by line, one owner per folder, only what we made removed.

Every failure is an OSError that names its file; the callers put it in their words, and the command line has words for
the rest (`cannot_write`).
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from gptfit.errors import GptfitError, RunError
from gptfit.units import gib

TEMPORARY = ".tmp"
LOCK = ".lock"
BINARY = getattr(os, "O_BINARY", 0)  # Windows changes line ends in files opened without it
FULL = (errno.ENOSPC, errno.EDQUOT)
# What is no fault of the disk, and what to do about it.
LIMITS = {
    errno.EMFILE: "close other programs, or allow more open files (`ulimit -n`)",
    errno.ENFILE: "close other programs: the system has no more open files",
    errno.EFBIG: "it is larger than files may be here (`ulimit -f`, or the kind of disk)",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "it is a link to itself; name the folder it should be",
    errno.ENOLCK: "this disk has no locks; use a folder on a local one",
}
TORN_BYTES = 2**20  # the longest last line that is looked for
MOST_TEXT_BYTES = 2**28  # of a manifest, vocabulary or config; the largest known vocabularies are a tenth of it
WAITING_BYTES = 16 * 2**20  # lines kept for a disk that does not take them; the oldest go first


class NoRoom(RunError):
    """The disk has less room than something is known to need."""


def cache_folder() -> Path:
    """$GPTFIT_CACHE, else where this system keeps a user's caches: ~/.cache/gptfit on Linux."""
    from platformdirs import user_cache_path

    named = os.environ.get("GPTFIT_CACHE")
    return Path(named) if named else user_cache_path("gptfit", appauthor=False)


def write_whole(path: Path, content: bytes | Callable[[IO[bytes]], None]) -> None:
    """Under a temporary name, flushed to the disk, then renamed: a crash leaves the old file or the new one."""
    temporary = temporary_name(path)
    remove_leftovers(path.parent, re.escape(path.name))
    with _naming(path):
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
            with suppress(OSError):  # the first failure is the one to tell
                temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Text for people (UTF-8, one kind of line end), whole or not at all; its folder is made if need be."""
    with _naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode())


def temporary_name(path: Path) -> Path:
    """Beside `path`, and nobody else's: two processes, also of two machines, may write the same page."""
    return path.with_name(f"{path.name}.{_machine()}-{os.getpid()}{TEMPORARY}")


def remove_leftovers(folder: Path, names: str, is_ours_alone: bool = False) -> None:
    """Temporary files of killed writers of `names` (a regular expression): known by their name and a dead process.

    `is_ours_alone`: the folder's lock is held, so that no other writer can be alive.
    """
    pattern = re.compile(rf"(?:{names})\.(?P<machine>[0-9a-f]{{8}})-(?P<process>\d+){re.escape(TEMPORARY)}")
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            match = pattern.fullmatch(entry.name)
            if match and (is_ours_alone or _is_dead(match["machine"], int(match["process"]))):
                remove_tree(Path(entry.path))


def remove_tree(path: Path) -> None:
    """A file or folder that we made; one that cannot be removed stays."""
    import shutil

    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def publish(temporary: Path, path: Path) -> None:
    """Give what was written its name."""
    with _naming(path):
        os.replace(temporary, path)
    sync_folder(path.parent)


def publish_tree(temporary: Path, path: Path) -> None:
    """As `publish`, for a file or folder that others wrote into: first all of it is made to be on the disk."""
    with _naming(path):
        for file in [temporary] if temporary.is_file() else temporary.rglob("*"):
            if file.is_file():
                with open(file, "rb+") as opened:  # Windows flushes only what is open for writing
                    os.fsync(opened.fileno())
            else:
                sync_folder(file)
    publish(temporary, path)


def second_name(source: Path, target: Path) -> None:
    """`target` for the same bytes: a link where the disk can, a copy where it cannot; the old target is replaced."""
    temporary = temporary_name(target)
    with _naming(target):
        if target.exists() and target.samefile(source):
            return  # renaming one name of a file to another of the same would do nothing and leave the first
        try:
            try:
                os.link(source, temporary)
            except OSError as error:
                if error.errno in FULL or not source.exists():
                    raise
                import shutil

                shutil.copyfile(source, temporary)
            os.replace(temporary, target)
        except BaseException:
            remove_tree(temporary)
            raise


def sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut. Windows and some network disks have no such call, and the file is there."""
    if os.name != "posix":
        return
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def free_bytes(folder: Path) -> int:
    """Room on the disk of a folder, or of the nearest one above it that is there."""
    import shutil

    for place in (folder, *folder.absolute().parents):
        with suppress(OSError):
            return shutil.disk_usage(place).free
    raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))


def check_room(folder: Path, needed_bytes: int, what: str) -> None:
    free = free_bytes(folder)
    if free < needed_bytes:
        raise NoRoom(f"{folder}: {what} needs {gib(needed_bytes)}, {gib(free)} is free; make room on this disk")


def make_writable_folder(folder: Path) -> None:
    """There, and a file can be made in it."""
    with _naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder, r"\.writable")
        probe = temporary_name(folder / ".writable")
        try:
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | BINARY, 0o644))
        finally:
            probe.unlink(missing_ok=True)  # several processes may try at once


class Lines:
    """A file that lines are appended to. One that the disk does not take waits, and goes first the next time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._waiting: deque[bytes] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def append(self, line: str) -> None:
        """Raises the OSError of a disk that cannot; the line is kept for the next call all the same."""
        self._waiting.append(line.encode() + b"\n")
        while sum(map(len, self._waiting)) > WAITING_BYTES:
            self._waiting.popleft()
        self.flush()

    def flush(self) -> None:
        with _naming(self.path):
            while self._waiting:
                line = self._waiting[0]
                done = os.write(self._open(), line)
                if done < len(line):
                    self._waiting[0] = line[done:]
                else:
                    self._waiting.popleft()

    def close(self) -> None:
        """All lines and safe on the disk, or an OSError; closed either way."""
        try:
            self.flush()
            if self._descriptor is not None:
                with _naming(self.path):
                    os.fsync(self._descriptor)
        finally:
            self._close()

    def _open(self) -> int:
        """The file's descriptor; opened again when somebody has moved or deleted the file meanwhile."""
        if self._descriptor is not None and not self._is_there():
            self._close()
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | BINARY, 0o644)
            self._end_torn_line()
        return self._descriptor

    def _is_there(self) -> bool:
        assert self._descriptor is not None
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except OSError:
            return False

    def _end_torn_line(self) -> None:
        """A crash may have left half a line: it is taken away, or ended where it is whole but for its end."""
        assert self._descriptor is not None
        size = os.lseek(self._descriptor, 0, os.SEEK_END)
        first = os.lseek(self._descriptor, max(0, size - TORN_BYTES), os.SEEK_SET)
        head, newline, torn = os.read(self._descriptor, TORN_BYTES).rpartition(b"\n")
        if not torn:
            return
        if _is_json(torn) or not (newline or first == 0):
            os.write(self._descriptor, b"\n")
        else:
            os.ftruncate(self._descriptor, first + len(head) + len(newline))

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def append_text(path: Path, text: str) -> None:
    """Whole lines in one write, so that two processes never interleave inside one; all of them or none."""
    with _naming(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | BINARY, 0o644)
        try:
            before = os.lseek(descriptor, 0, os.SEEK_END)
            is_torn = before and (os.lseek(descriptor, -1, os.SEEK_END), os.read(descriptor, 1))[1] != b"\n"
            data = (b"\n" if is_torn else b"") + text.encode()  # the last writer was killed mid-line
            try:
                while data:
                    data = data[os.write(descriptor, data) :]  # a disk may take a part, and say why with the next
                os.fsync(descriptor)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(descriptor, before)
                raise
        finally:
            with suppress(OSError):
                os.close(descriptor)


def read_plain(path: Path, most: int = MOST_TEXT_BYTES) -> bytes:
    """A small file that somebody may have been sent: never a pipe or a device, which would block, nor a giant."""
    with _naming(path), open(_opened(path), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(errno.EFBIG, f"{size:,} bytes is too large for this kind of file")
        return file.read(size)


def read_tail(path: Path, most: int) -> bytes:
    """The end of a file that only grows."""
    with _naming(path), open(_opened(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - most))
        return file.read(min(size, most))


def _opened(path: Path) -> int:
    """A descriptor of a regular file; opening a pipe does not wait for a writer."""
    descriptor = os.open(path, os.O_RDONLY | BINARY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return descriptor


class FolderLock:
    """One writer per folder, on every system. The system drops the lock when the process ends, however it ends."""

    def __init__(
        self,
        folder: Path,
        doing: str,
        instead: str,
        error: type[GptfitError] = RunError,
        *,
        part: str = "",
        patience: float = 0.0,
    ) -> None:
        """`doing`: what the other process does there; `instead`: what a person can do.

        `part`: lock only what has this name in the folder; `patience`: seconds to wait for the other process.
        """
        import filelock

        self._path = path = folder / f"{part}{LOCK}"
        self._lock: Any = filelock.FileLock(path, thread_local=False)
        try:
            with _naming(path):
                self._lock.acquire(timeout=patience)
        except filelock.Timeout:
            owner, what = _owner(path), part or "this folder"
            raise error(f"{folder}: {owner} is {doing} {what}", fix=instead) from None
        with suppress(OSError):  # only so that the next one can be told who it is
            path.write_text(f"{os.getpid()}\n", encoding="ascii")

    def release(self) -> None:
        """The file goes while the lock is held: who waits for it sees that it has no name any more and makes another."""
        with suppress(OSError):
            self._path.unlink()
        with suppress(OSError):
            self._lock.release()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _owner(path: Path) -> str:
    with suppress(OSError, ValueError):
        return f"process {int(path.read_text(encoding='ascii'))}"
    return "another process"


def cannot_write(error: OSError) -> str:
    """One line for a disk that does not do what it should: where, what, what to do."""
    where = f"{os.fsdecode(error.filename2 or error.filename)}: " if error.filename is not None else ""
    return f"{where}{reason_of(error)}; {remedy_of(error)}"


def reason_of(error: BaseException) -> str:
    """What went wrong, in a few words without numbers."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[0][:120].rstrip(".:") if lines else type(error).__name__


def reading_remedy(error: OSError) -> str:
    """Of what cannot be read: another place would not help."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return "make it readable for you (its permissions, or its owner's)"
    return remedy_of(error)


def remedy_of(error: OSError) -> str:
    if error.errno in FULL:
        return "free some space and run the same command again"
    if error.errno in LIMITS:
        return LIMITS[error.errno]
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a place you may use, or change its permissions"
    if isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError):
        return "something else has this name; move it away or choose another"
    if isinstance(error, FileNotFoundError):
        return "it is not there; check the name"
    return "check the disk and run the same command again"


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An error of a descriptor has no name; a person needs one."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def _machine() -> str:
    import zlib
    from platform import node

    return f"{zlib.crc32(node().encode()):08x}"


def _is_dead(machine: str, process: int) -> bool:
    """Whether the process that wrote a temporary file is known to be gone; of another machine nothing is known."""
    if machine != _machine() or process == os.getpid():
        return False
    if os.name != "posix":
        return False  # os.kill would end it there; the folder's lock decides instead
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # no process has a number that large, and the file is not ours
        return False
    return False
