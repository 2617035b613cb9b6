"""Engines: the same shards written by threads of this machine, or as tasks of a Ray cluster."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gptfit.data.bins import mask_path, remove_file
from gptfit.data.journal import Journal, read_journal
from gptfit.data.shard import OnShardProgress, Shard, ShardOptions, write_shard
from gptfit.data.tokenizer import Tokenizer, char_tokenizer, load_tokenizer
from gptfit.data.work import Unit, shards
from gptfit.errors import DataError
from gptfit.files import FolderLock, reason_of

POLL_SECONDS = 1.0
SHARDS_PER_WORKER = 4  # a slow machine does fewer of them, and a lost one loses less
LOCK_SECONDS = 60.0
RETRIES = 5  # of a task whose process or machine was lost


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
    job: ShardOptions, units: list[Unit], out: Path, fresh: Journal, spec: TokenizerSpec, on_progress: OnShardProgress
) -> Written:
    """One shard, train.bin and val.bin, by threads or processes of this machine."""
    if begun := _begun_shards(out):
        raise DataError(f"{out}: was begun with --engine ray and {begun} shards", fix="go on with it, or use --restart")
    shard = Shard(tuple(units), out / "train.bin", out / "val.bin", out / "prepare.journal.json")
    state = write_shard(job, shard, fresh, spec.load, on_progress)
    return _written([shard], [state])


def write_ray(
    job: ShardOptions,
    units: list[Unit],
    out: Path,
    fresh: Journal,
    spec: TokenizerSpec,
    on_progress: OnShardProgress,
    workers: int | None = None,
) -> Written:
    """A few shards per worker (default: per core of the cluster), each a Ray task with a journal of its own.

    The folder and the sources must be visible to all nodes. Joined in order, the shards are byte for byte what the
    local engine writes.
    """
    if (out / "prepare.journal.json").exists():
        raise DataError(f"{out}: was begun with --engine local", fix="go on with it, or use --restart")
    try:
        import ray
    except ImportError:
        raise DataError("--engine ray needs an extra", fix="pip install 'gptfit[ray]'") from None
    with _joined(ray):
        workers = workers or _cores(ray)
        # A prepare that was begun keeps its number of shards: the journals are about those.
        count = _begun_shards(out) or SHARDS_PER_WORKER * workers
        parts = _ray_shards(units, out.absolute(), count)
        return _written(parts, _run_tasks(ray, job, parts, fresh, spec, on_progress, workers))


@contextmanager
def _joined(ray: Any) -> Iterator[None]:
    """In the cluster RAY_ADDRESS names, or one of this machine's cores that ends with us."""
    ours = not ray.is_initialized()
    if ours:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere unasked
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        except Exception as error:  # noqa: BLE001  Ray raises plain ones too, as when its processes start too slowly
            ray.shutdown()
            raise DataError(
                f"no Ray cluster answers ({reason_of(error)})", fix="check RAY_ADDRESS, or use --engine local"
            ) from None
    try:
        yield
    finally:
        if ours:
            ray.shutdown()


def _cores(ray: Any) -> int:
    return int(ray.cluster_resources().get("CPU", 1))


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
    ray: Any,
    job: ShardOptions,
    parts: list[Shard],
    fresh: Journal,
    spec: TokenizerSpec,
    on_progress: OnShardProgress,
    workers: int,
) -> list[Journal]:
    """At most `workers` tasks at once, so that a shard not begun can go to whoever is free."""
    # A lost worker's or node's shard goes on from its journal elsewhere.
    task = ray.remote(num_cpus=1, max_retries=RETRIES)(_write_in_task)
    common = ray.put((replace(job, workers=1), spec))  # once per node: it names every source
    waiting, running = deque(range(len(parts))), dict[Any, int]()
    done: dict[int, Journal] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                i = waiting.popleft()
                running[task.remote(common, parts[i], fresh_of(parts[i], fresh))] = i
            finished, _ = ray.wait(list(running), timeout=POLL_SECONDS)
            problems: list[str] = []
            for reference in finished:
                done[running.pop(reference)], lines = ray.get(reference)
                problems += lines
            at_work = [read_journal(parts[i].journal) for i in running.values()]
            on_progress(_sum([*done.values(), *filter(None, at_work), fresh]), problems)
        return [done[i] for i in range(len(parts))]
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        is_plain = isinstance(cause, DataError | OSError)  # said in a line of its own where this is caught
        raise (cause if is_plain else DataError(f"a Ray task failed: {cause!r}")) from None
    except ray.exceptions.RayError as error:
        raise DataError(f"Ray failed ({reason_of(error)})", fix="run the same command again to go on") from None
    finally:
        for unfinished in running:
            ray.cancel(unfinished, force=True)


def fresh_of(shard: Shard, fresh: Journal) -> Journal:
    """The beginning of a shard's journal: only its own sources, as it is written every second and they may be thousands."""
    mine = sorted({span.source for unit in shard.units for span in unit.spans})
    return replace(fresh, sources=tuple(fresh.sources[i] for i in mine))


def _write_in_task(
    common: tuple[ShardOptions, TokenizerSpec], shard: Shard, fresh: Journal
) -> tuple[Journal, list[str]]:
    job, spec = common
    problems: list[str] = []
    with _only_writer(shard.journal):
        state = write_shard(job, shard, fresh, spec.load, lambda _, lines: problems.extend(lines))
    return state, problems


def _only_writer(journal: Path) -> FolderLock:
    """Wait until the task of a killed driver, which may live a little longer, has let go of this shard."""
    instead = "stop it, then run this again"
    return FolderLock(journal.parent, "writing", instead, DataError, part=journal.stem, patience=LOCK_SECONDS)


def _written(parts: list[Shard], states: list[Journal]) -> Written:
    files = {
        "train": [shard.train.name for shard, state in zip(parts, states, strict=True) if state.train_bytes],
        "val": [shard.val.name for shard, state in zip(parts, states, strict=True) if state.val_bytes],
    }
    for shard, state in zip(parts, states, strict=True):  # some readers crash on an empty file
        for path, size in ((shard.train, state.train_bytes), (shard.val, state.val_bytes)):
            if not size:
                remove_file(path)
                remove_file(mask_path(path))
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
