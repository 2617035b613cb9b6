"""Recognising memory that ran out: by the error's type, by its words, or by what it was raised from."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# How what is no torch.OutOfMemoryError says it: torch's CPU and MPS allocators, C++, the workspaces of cuBLAS (whose
# handle is made lazily) and cuDNN, the driver.
OUT_OF_MEMORY_WORDS = (
    "DefaultCPUAllocator",
    "MPS backend out of memory",
    "std::bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "[CUDA]: out of memory",
    "CUDA out of memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Mostly torch says so by type; some allocations are not torch's and fail as a RuntimeError with these words.

    While compiling, the compiler's own error stands in front: its cause and its text are looked at too.
    """
    return any(_says_out_of_memory(each) for each in _with_causes(error))


def _says_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY_WORDS)


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and what it wraps (`inner_exception` of torch's compiler)."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or any(each is other for other in seen):
            continue
        seen.append(each)
        yield each
        inner = getattr(each, "inner_exception", None)
        waiting += [each.__cause__, inner if isinstance(inner, BaseException) else None]
