"""How much of prepare's work holds Python's interpreter lock, and what that leaves of 16 threads.

A child process does one worker's job; this one looks into its memory a few thousand times a second to see whether the
lock is held. A busy machine slows both states alike, so the share is right even then. CPython 3.11 on Linux.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

RUNTIME_BYTES = 4096  # of CPython's global state that are searched for the field
SAMPLE_SECONDS = 0.0002
CHILD = """
import ctypes, sys, time
sys.path.insert(0, {folder!r})
import _lockshare
work = _lockshare.make_work({files!r})
work(1)  # caches and lazy imports
runtime = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
get = ctypes.pythonapi.PyThreadState_Get
get.restype = ctypes.c_void_p
print(runtime, get(), flush=True)
time.sleep(0.5)  # the parent looks which field says that nobody holds the lock
print("go", flush=True)
print(work({rounds}), flush=True)
time.sleep(0.2)
"""


def lock_share(files: list[Path], rounds: int) -> float:
    """Of a worker's time, the part it holds the lock."""
    program = CHILD.format(folder=str(Path(__file__).parent), files=[str(file) for file in files], rounds=rounds)
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child:
        runtime, holder = map(int, child.stdout.readline().split())
        memory = os.open(f"/proc/{child.pid}/mem", os.O_RDONLY)
        field = _lock_field(memory, runtime, holder)
        child.stdout.readline()
        held = seen = 0
        os.set_blocking(child.stdout.fileno(), False)
        while not child.stdout.readline():
            seen += 1
            held += os.pread(memory, 8, field) != bytes(8)
            time.sleep(SAMPLE_SECONDS)
        os.close(memory)
    return held / seen


def _lock_field(memory: int, runtime: int, holder: int) -> int:
    """The word that names the holding thread while it runs and nobody while it sleeps."""
    time.sleep(0.1)
    asleep = os.pread(memory, RUNTIME_BYTES, runtime)
    names = ctypes.sizeof(ctypes.c_void_p)
    empty = [at for at in range(0, len(asleep), names) if asleep[at : at + names] == bytes(names)]
    while True:
        now = os.pread(memory, RUNTIME_BYTES, runtime)
        for at in empty:
            if int.from_bytes(now[at : at + names], sys.byteorder) == holder:
                return runtime + at


def make_work(files: list[str]):  # type: ignore[no-untyped-def]
    """One worker's job over the files: read, encode, as the pipeline's threads do."""
    from gptfit.data.documents import read_unit
    from gptfit.data.encode import encode_documents
    from gptfit.data.forecast import lay_out
    from gptfit.data.options import PrepareOptions, Silent
    from gptfit.data.parquet import OpenFiles
    from gptfit.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer("gpt2")
    laid = lay_out(PrepareOptions(tuple(files), Path("unused")), tokenizer, Silent())

    def work(rounds: int) -> int:
        tokens = 0
        with closing(OpenFiles()) as opened:
            for _ in range(rounds):
                for unit in laid.units:
                    for batch in read_unit(laid.reading, unit, opened):
                        tokens += int(encode_documents(batch, tokenizer, tokenizer.end_of_text).lengths.sum())
        return tokens

    return work


def efficiency(share: float, threads: int) -> float:
    """Of `threads` cores, the part that works when each holds one common lock for `share` of its own time.

    Mean value analysis of one queue (the lock) and private work: exact for random arrivals.
    """
    waiting = 0.0
    rate = 0.0
    for n in range(1, threads + 1):
        at_lock = share * (1 + waiting)
        rate = n / (at_lock + 1 - share)
        waiting = rate * at_lock
    return rate / threads


if __name__ == "__main__":
    print(lock_share([Path(name) for name in sys.argv[2:]], int(sys.argv[1])))
