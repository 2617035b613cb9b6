"""A shard: a run of units written to one pair of token files, with its own journal, stoppable at any instant."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gptfit.data.bins import CountedTokenWriter, TokenFileWriter, mask_path, publish
from gptfit.data.documents import Reading
from gptfit.data.encode import EncodedBatch
from gptfit.data.journal import Journal, resume_point
from gptfit.data.pipeline import encoded_pieces
from gptfit.data.work import Unit
from gptfit.data.worker_processes import Delivered, MakeTokenizer, is_worth_processes, pieces_by_processes
from gptfit.errors import DataError

JOURNAL_SECONDS = 1.0


@dataclass(frozen=True)
class ShardOptions:
    """What every shard of one prepare has in common."""

    reading: Reading
    separator: int | None
    workers: int
    limit_documents: int | None = None
    limit_tokens: int | None = None
    masked_dtype: str | None = None  # of the token files where a mask belongs to them


@dataclass(frozen=True)
class Shard:
    """Some consecutive units and where their tokens go."""

    units: tuple[Unit, ...]
    train: Path
    val: Path
    journal: Path


# Called now and then with the state so far and the lines about bad rows since the last call.
OnShardProgress = Callable[[Journal, list[str]], None]


def write_shard(
    job: ShardOptions, shard: Shard, fresh: Journal, make_tokenizer: MakeTokenizer, on_progress: OnShardProgress
) -> Journal:
    """From where the journal stands to the end; returns the last state, with the files under their final names."""
    state = resume_point(shard.journal, replace(fresh, unit=shard.units[0].index))
    if not state.complete:
        state = _write_units(job, shard, state, make_tokenizer, on_progress)
    for path, size in ((shard.train, state.train_bytes), (shard.val, state.val_bytes)):
        if job.masked_dtype:
            publish(mask_path(path), size // np.dtype(job.masked_dtype).itemsize)
        publish(path, size)
    return state


def _writer(job: ShardOptions, path: Path, keep_bytes: int) -> TokenFileWriter | CountedTokenWriter:
    if job.masked_dtype:
        return CountedTokenWriter(path, keep_bytes, job.masked_dtype)
    return TokenFileWriter(path, keep_bytes)


def _write_units(
    job: ShardOptions, shard: Shard, state: Journal, make_tokenizer: MakeTokenizer, on_progress: OnShardProgress
) -> Journal:
    train, val = _writer(job, shard.train, state.train_bytes), _writer(job, shard.val, state.val_bytes)
    started = saved = time.monotonic() - state.seconds
    problems: list[str] = []

    def save() -> None:
        train.sync()
        val.sync()
        state.write(shard.journal)

    try:
        save()
        on_progress(state, problems)
        is_over = _is_full(job, state.counts)  # stopped after the limit was reached, before it was called complete
        units = [unit for unit in shard.units if unit.index >= state.unit and not is_over]
        with closing(_delivered(job, make_tokenizer, units, state.piece)) as delivered:
            for unit, number, piece in delivered:
                if piece is None:
                    state = replace(state, unit=unit.index + 1, piece=0)
                    continue
                piece = _within_limits(piece, job, state.counts)
                train.append(*piece.train)
                val.append(*piece.val)
                problems += piece.account.problems
                state = _after(state, piece, number, train.size, val.size, time.monotonic() - started)
                if _is_full(job, state.counts):
                    break
                if time.monotonic() - saved >= JOURNAL_SECONDS:
                    save()
                    saved = time.monotonic()
                    on_progress(state, problems)
                    problems = []
        state = replace(state, complete=True)
        save()
        on_progress(state, problems)
        return state
    except BaseException:
        with suppress(DataError):  # on a full disk the journal of a second ago still stands
            save()
        raise
    finally:
        train.close()
        val.close()


def _delivered(job: ShardOptions, make_tokenizer: MakeTokenizer, units: list[Unit], skip_pieces: int) -> Delivered:
    """By threads of this process, or by processes where there are cores and work enough."""
    if is_worth_processes(units, job.workers):
        return pieces_by_processes(job.reading, make_tokenizer, job.separator, units, skip_pieces, job.workers)
    return encoded_pieces(job.reading, make_tokenizer(), job.separator, units, skip_pieces, job.workers)


def _within_limits(piece: EncodedBatch, job: ShardOptions, counts: Counter[str]) -> EncodedBatch:
    """The piece, or its documents up to the one that reaches the limit."""
    keep = len(piece.lengths)
    if job.limit_documents is not None:
        keep = min(keep, job.limit_documents - counts["train.documents"] - counts["val.documents"])
    if job.limit_tokens is not None:
        left = job.limit_tokens - counts["train.tokens"] - counts["val.tokens"]
        keep = min(keep, int(np.searchsorted(np.cumsum(piece.lengths), left)) + 1)
    if keep >= len(piece.lengths):
        return piece
    lengths, is_val = piece.lengths[:keep], piece.is_val[:keep]
    return replace(
        piece,
        train=(np.concatenate(piece.train)[: lengths[~is_val].sum()],),
        val=(np.concatenate(piece.val)[: lengths[is_val].sum()],),
        lengths=lengths,
        is_val=is_val,
        text_bytes=piece.text_bytes[:keep],
        account=replace(piece.account, continues=False),
    )


def _is_full(job: ShardOptions, counts: Counter[str]) -> bool:
    documents = counts["train.documents"] + counts["val.documents"]
    tokens = counts["train.tokens"] + counts["val.tokens"]
    return (job.limit_documents is not None and documents >= job.limit_documents) or (
        job.limit_tokens is not None and tokens >= job.limit_tokens
    )


def _after(
    state: Journal, piece: EncodedBatch, number: int, train_bytes: int, val_bytes: int, seconds: float
) -> Journal:
    return replace(
        state,
        piece=number,
        train_bytes=train_bytes,
        val_bytes=val_bytes,
        source_bytes=state.source_bytes + piece.account.source_bytes,
        seconds=seconds,
        counts=state.counts + _counts(piece),
    )


def _counts(piece: EncodedBatch) -> Counter[str]:
    finished = np.ones(len(piece.lengths), np.int64)
    if piece.account.continues and len(finished):
        finished[-1] = 0
    counts: Counter[str] = Counter({"rows": piece.account.rows})
    if piece.counted is not None:
        counts["train.counted"], counts["val.counted"] = piece.counted
    for name, of_each in (("documents", finished), ("tokens", piece.lengths), ("bytes", piece.text_bytes)):
        in_val = int(of_each[piece.is_val].sum())
        counts[f"train.{name}"] = int(of_each.sum()) - in_val
        counts[f"val.{name}"] = in_val
    counts.update({f"skipped.{reason}": n for reason, n in piece.account.skipped.items()})
    counts.update({f"replaced.{reason}": n for reason, n in piece.account.replaced.items()})
    return counts
