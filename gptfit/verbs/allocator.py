"""Asks glibc to keep freed memory, for a verb that needs the same few megabytes again thousands of times."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_MMAP_THRESHOLD = 32 * 2**20  # glibc takes no more
KEPT_BYTES = 256 * 2**20


def keep_freed_memory() -> None:
    """Otherwise every batch's buffers go back to the kernel and come back as page faults: 4 % of prepare's CPU time."""
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
