"""The pipeline on many cores: processes that read and encode every n-th unit, and one reader that keeps their order.

Threads share Python's interpreter lock, which a worker holds for about a third of its time (bench/prepare.py lock), so
more than a few of them wait for it. Processes have a lock each; their tokens come through pipes as plain bytes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np

from gptfit.data.documents import Reading
from gptfit.data.encode import EncodedBatch, Tokens
from gptfit.data.pipeline import encoded_pieces
from gptfit.data.tokenizer import Tokenizer
from gptfit.data.work import Unit
from gptfit.errors import DataError

MOST_THREADS = (
    2  # of one process: with two, 90 % of their time is work; with 16 it would be 20 % (bench/prepare.py lock)
)
UNITS_WORTH_A_PROCESS = 8  # of about 2 MiB of text: a process takes a second to start
PIPE_BYTES = 2**20  # as much as Linux grants everyone; fewer calls per piece

MakeTokenizer = Callable[[], Tokenizer]
Delivered = Generator[tuple[Unit, int, EncodedBatch | None], None, None]


def is_worth_processes(units: Sequence[Unit], workers: int) -> bool:
    # A Windows pipe has no file descriptor to read plain bytes from.
    return workers > MOST_THREADS and len(units) >= UNITS_WORTH_A_PROCESS * workers and sys.platform != "win32"


def pieces_by_processes(
    reading: Reading,
    make_tokenizer: MakeTokenizer,
    separator: int | None,
    units: Sequence[Unit],
    skip_pieces: int,
    workers: int,
) -> Delivered:
    """What `encoded_pieces` delivers, in the same order, from `workers` processes; process i has units i, i+n, ..."""
    # Not forked: this process may have threads that hold locks.
    context = multiprocessing.get_context("spawn")
    children: list[tuple[BaseProcess, Connection]] = []
    try:
        for i in range(min(workers, len(units))):
            ours, theirs = context.Pipe(duplex=False)
            _widen(ours)
            skip = skip_pieces if i == 0 else 0
            work = (theirs, reading, make_tokenizer, separator, tuple(units[i::workers]), skip)
            child = context.Process(target=_work, args=work, daemon=True)
            child.start()
            theirs.close()
            children.append((child, ours))
        for i, unit in enumerate(units):
            yield from _of_unit(children[i % len(children)][1], unit, skip_pieces if i == 0 else 0)
    finally:
        for ended, connection in children:
            connection.close()
            ended.terminate()
        for ended, _ in children:
            ended.join()


def _of_unit(connection: Connection, unit: Unit, number: int) -> Delivered:
    while True:
        try:
            received = connection.recv()
        except (EOFError, OSError):
            raise DataError(
                "a worker process was killed, out of memory perhaps", fix="run the same command again"
            ) from None
        if isinstance(received, BaseException):
            raise received
        if received is None:
            yield unit, number, None
            return
        piece, dtype, sizes = received
        number += 1
        train, val = (tuple(_read(connection.fileno(), n, dtype) for n in side) for side in sizes)
        yield unit, number, replace(piece, train=train, val=val)


def _work(
    connection: Connection,
    reading: Reading,
    make_tokenizer: MakeTokenizer,
    separator: int | None,
    units: Sequence[Unit],
    skip_pieces: int,
) -> None:
    """A child: its units in order, each piece's counts first and then its tokens as bytes."""
    with suppress(BrokenPipeError, KeyboardInterrupt):  # the reader went away, or the person stopped everything
        try:
            for _, _, piece in encoded_pieces(reading, make_tokenizer(), separator, units, skip_pieces, 1):
                _send(connection, piece)
        except DataError as error:
            connection.send(error)


def _send(connection: Connection, piece: EncodedBatch | None) -> None:
    if piece is None:
        connection.send(None)
        return
    sizes = tuple(tuple(len(tokens) for tokens in side) for side in (piece.train, piece.val))
    dtype = next((str(tokens.dtype) for tokens in (*piece.train, *piece.val)), "uint16")
    connection.send((replace(piece, train=(), val=()), dtype, sizes))
    for tokens in (*piece.train, *piece.val):
        left = np.ascontiguousarray(tokens).data.cast("B")
        while left:
            left = left[os.write(connection.fileno(), left) :]


def _read(descriptor: int, count: int, dtype: str) -> Tokens:
    """Straight into the array: a pickled one is copied twice more, and this one reader serves all processes."""
    tokens: Tokens = np.empty(count, dtype)
    left = tokens.data.cast("B") if count else memoryview(b"")
    while left:
        got = os.readv(descriptor, [left])
        if not got:
            raise DataError("a worker process was killed, out of memory perhaps", fix="run the same command again")
        left = left[got:]
    return tokens


def _widen(connection: Connection) -> None:
    if sys.platform == "linux":
        import fcntl

        with suppress(OSError):
            fcntl.fcntl(connection.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
