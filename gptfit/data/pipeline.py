"""The pipeline: units read and encoded in threads, a bounded number in flight, pieces delivered in order."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from gptfit.data.chat import encode_conversations
from gptfit.data.documents import DocumentBatch, Reading, read_unit
from gptfit.data.encode import EncodedBatch, encode_documents
from gptfit.data.parquet import OpenFiles
from gptfit.data.tokenizer import Tokenizer
from gptfit.data.work import Unit

PIECES_WAITING = 2  # encoded pieces a unit may have ready before its worker waits
POLL_SECONDS = 0.1  # how soon a waiting worker notices that it should stop


@dataclass
class _Running:
    """A unit at work: its pieces, then None, or the exception that ended it."""

    unit: Unit
    pieces: queue.Queue[EncodedBatch | BaseException | None] = field(
        default_factory=lambda: queue.Queue(PIECES_WAITING)
    )


def encoded_pieces(
    reading: Reading,
    tokenizer: Tokenizer,
    separator: int | None,
    units: Sequence[Unit],
    skip_pieces: int,
    workers: int,
) -> Generator[tuple[Unit, int, EncodedBatch | None], None, None]:
    """(unit, number, piece) in the order of the units; a None piece ends each unit.

    The first `skip_pieces` pieces of the first unit are already written: they are read again but not encoded.
    """
    stop = threading.Event()
    files = OpenFiles()
    encode: Callable[[DocumentBatch], EncodedBatch] = (
        partial(encode_conversations, tokenizer=tokenizer)
        if reading.is_chat
        else partial(encode_documents, tokenizer=tokenizer, separator=separator)
    )
    # One long file is one unit: then its batches are encoded by the workers that have no unit to read.
    idle = workers - len(units)

    def work(running: _Running, skip: int) -> None:
        try:
            batches = islice(read_unit(reading, running.unit, files), skip, None)
            for piece in _encoded(batches, encode, pool, idle) if idle > 0 else map(encode, batches):
                if stop.is_set():
                    return
                _put(running, piece, stop)
            _put(running, None, stop)
        except BaseException as error:  # noqa: BLE001 - handed over and raised again in the caller's thread
            _put(running, error, stop)

    waiting = deque(units)
    at_work: deque[_Running] = deque()
    with closing(files), ThreadPoolExecutor(workers, thread_name_prefix="prepare") as pool:
        try:
            while waiting or at_work:
                while waiting and len(at_work) < workers + 1:
                    running = _Running(waiting.popleft())
                    pool.submit(work, running, skip_pieces if running.unit is units[0] else 0)
                    at_work.append(running)
                running = at_work.popleft()
                number = skip_pieces if running.unit is units[0] else 0
                while isinstance(piece := running.pieces.get(), EncodedBatch):
                    number += 1
                    yield running.unit, number, piece
                if piece is not None:
                    raise piece
                yield running.unit, number, None
        finally:
            stop.set()


def _encoded(
    batches: Iterable[DocumentBatch],
    encode: Callable[[DocumentBatch], EncodedBatch],
    pool: ThreadPoolExecutor,
    ahead: int,
) -> Iterator[EncodedBatch]:
    """The batches encoded in the pool, in order, with `ahead` of them at work while the next is read."""
    waiting: deque[Future[EncodedBatch]] = deque()
    for batch in batches:
        waiting.append(pool.submit(encode, batch))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _put(running: _Running, piece: EncodedBatch | BaseException | None, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            running.pieces.put(piece, timeout=POLL_SECONDS)
            return
        except queue.Full:
            continue
