"""Engines: the same shards written by threads of this machine, or as tasks of a Ray cluster."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gptfit.data.journal import Journal, read_journal
from gptfit.data.shard import Job, OnProgress, Shard, write_shard
from gptfit.data.tokenizer import Tokenizer, char_tokenizer, load_tokenizer
from gptfit.data.work import Unit, shards
from gptfit.errors import DataError

POLL_SECONDS = 1.0


@dataclass(frozen=True)
class TokenizerSpec:
    """What another process needs to build the same tokenizer."""

    which: str
    alphabet: Mapping[str, int] | None = None

    def load(self) -> Tokenizer:
        return load_tokenizer(self.which) if self.alphabet is None else char_tokenizer(self.alphabet)


@dataclass(frozen=True)
class Written:
    """The token files of each split in reading order, and the sum of what the shards counted."""

    files: dict[str, list[str]]
    state: Journal


def write_local(
    job: Job, units: list[Unit], out: Path, fresh: Journal, tokenizer: Tokenizer, on_progress: OnProgress
) -> Written:
    """One shard, train.bin and val.bin, by threads of this process."""
    if begun := _begun_shards(out):
        raise DataError(f"{out}: was begun with --engine ray and {begun} workers; go on with it, or use --restart")
    shard = Shard(tuple(units), out / "train.bin", out / "val.bin", out / "prepare.journal.json")
    state = write_shard(job, shard, fresh, tokenizer, on_progress)
    return _written([shard], [state])


def write_ray(
    job: Job, units: list[Unit], out: Path, fresh: Journal, spec: TokenizerSpec, on_progress: OnProgress
) -> Written:
    """One shard per worker, each a Ray task; the folder and the sources must be visible to all nodes.

    Joined in order, the shards are byte for byte what the local engine writes.
    """
    if (out / "prepare.journal.json").exists():
        raise DataError(f"{out}: was begun with --engine local; go on with it, or use --restart")
    try:
        import ray
    except ImportError:
        raise DataError("--engine ray needs an extra; pip install 'gptfit[ray]'") from None
    ours = not ray.is_initialized()
    if ours:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere unasked
        ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    try:
        # A prepare that was begun keeps its number of shards: the journals are about those.
        count = _begun_shards(out) or job.workers
        parts = _ray_shards(units, out.absolute(), count)
        return _written(parts, _run_tasks(ray, job, parts, fresh, spec, on_progress))
    finally:
        if ours:
            ray.shutdown()


def _begun_shards(out: Path) -> int | None:
    for path in out.glob("prepare.journal.*-of-*.json"):
        found = re.fullmatch(r"prepare\.journal\.\d+-of-(\d+)\.json", path.name)
        if found:
            return int(found[1])
    return None


def _ray_shards(units: list[Unit], out: Path, count: int) -> list[Shard]:
    return [
        Shard(
            run,
            out / f"train-{i:05d}.bin",
            out / f"val-{i:05d}.bin",
            out / f"prepare.journal.{i:05d}-of-{count:05d}.json",
        )
        for i, run in enumerate(shards(units, count))
    ]


def _run_tasks(
    ray: Any, job: Job, parts: list[Shard], fresh: Journal, spec: TokenizerSpec, on_progress: OnProgress
) -> list[Journal]:
    task = ray.remote(num_cpus=1, max_retries=2)(_write_in_task)  # a lost node's shard goes on from its journal
    pending = [task.remote(replace(job, workers=1), shard, fresh, spec) for shard in parts]
    order = list(pending)
    try:
        while pending:
            done, pending = ray.wait(pending, timeout=POLL_SECONDS)
            problems = [line for _, lines in ray.get(done) for line in lines]
            on_progress(_sum([read_journal(shard.journal) or fresh for shard in parts]), problems)
        return [state for state, _ in ray.get(order)]
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise (cause if isinstance(cause, DataError) else DataError(f"a Ray task failed: {cause!r}")) from None
    except ray.exceptions.RayError as error:
        message = str(error).splitlines()[0]
        raise DataError(f"Ray failed ({message}); run the same command again to go on") from None
    finally:
        for unfinished in pending:
            ray.cancel(unfinished, force=True)


def _write_in_task(job: Job, shard: Shard, fresh: Journal, spec: TokenizerSpec) -> tuple[Journal, list[str]]:
    problems: list[str] = []
    state = write_shard(job, shard, fresh, spec.load(), lambda _, lines: problems.extend(lines))
    return state, problems


def _written(parts: list[Shard], states: list[Journal]) -> Written:
    files = {
        "train": [shard.train.name for shard, state in zip(parts, states, strict=True) if state.train_bytes],
        "val": [shard.val.name for shard, state in zip(parts, states, strict=True) if state.val_bytes],
    }
    for shard, state in zip(parts, states, strict=True):  # an empty file would only crash its reader
        if not state.train_bytes:
            shard.train.unlink(missing_ok=True)
        if not state.val_bytes:
            shard.val.unlink(missing_ok=True)
    return Written(files, _sum(states))


def _sum(states: list[Journal]) -> Journal:
    return replace(
        states[0],
        train_bytes=sum(state.train_bytes for state in states),
        val_bytes=sum(state.val_bytes for state in states),
        source_bytes=sum(state.source_bytes for state in states),
        seconds=max(state.seconds for state in states),
        counts=sum((state.counts for state in states), Counter()),
    )
