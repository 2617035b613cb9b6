"""Memory of this process and of the machine, as the operating system tells it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CGROUP = Path("/sys/fs/cgroup")
# The limit, what is used of it, and what of that is files read that the system drops when memory is asked for: v2, v1.
_CGROUP_NAMES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def peak_host_bytes() -> int:
    """Largest resident size since the last reset (since the start where a reset is not possible)."""
    if _STATUS.is_file():
        return _kib_field(_STATUS, "VmHWM")
    memory = psutil.Process().memory_info()
    if hasattr(memory, "peak_wset"):  # Windows
        return int(memory.peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_host_bytes() -> None:
    """Linux forgets the peak when 5 is written here (proc(5), clear_refs); elsewhere it stays."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def free_host_bytes() -> int:
    """What can be allocated without swapping, within the limits set for this process and for the container it is in."""
    return max(0, min([int(psutil.virtual_memory().available), *_rooms()]))


def _rooms() -> Iterator[int]:
    """What each limit leaves: a container's and that of `ulimit -d`; none where none is set."""
    for limit, current, stat, dropped in _CGROUP_NAMES:
        most, used = _number(_CGROUP / limit), _number(_CGROUP / current)
        if most is not None and used is not None:
            yield most - used + _stat(_CGROUP / stat, dropped)
    if sys.platform == "linux":
        soft, _ = psutil.Process().rlimit(psutil.RLIMIT_DATA)
        if soft != psutil.RLIM_INFINITY:
            yield soft - _kib_field(_STATUS, "VmData")


def _number(file: Path) -> int | None:
    """The number a file of the system holds; None where it is not there or says 'max'."""
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text(encoding="ascii"))
    return None


def _stat(file: Path, name: str) -> int:
    """The number beside a name in a container's statistics; 0 where there is none."""
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text(encoding="ascii").splitlines():
            if line.startswith(name + " "):
                return int(line.split()[1])
    return 0


def limit_host_bytes(limit_bytes: int) -> None:
    """A hard limit on this process's own memory, above which an allocation fails; nothing where it is not known."""
    if sys.platform == "linux":
        # RLIMIT_DATA counts private writable pages (since Linux 4.7), which is what tensors are;
        # RLIMIT_AS would also count libraries and reserved address space.
        psutil.Process().rlimit(psutil.RLIMIT_DATA, (limit_bytes, limit_bytes))


def _kib_field(file: Path, name: str) -> int:
    for line in file.read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{file} has no {name}")
