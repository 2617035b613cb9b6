"""Bad input is one line and counted; a kill at any instant costs nothing but the time."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gptfit.data import bins, shard, work
from gptfit.data.options import PrepareOptions
from gptfit.data.prepare import prepare
from gptfit.errors import DataError
from gptfit.files import FolderLock
from tests.forking import fork, gptfit_program

from .conftest import Kept, WriteParquet, digest, stories


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces and a journal after each, so that a small file has many instants to die at."""
    monkeypatch.setattr(work, "BATCH_BYTES", 2000)
    monkeypatch.setattr(shard, "JOURNAL_SECONDS", 0.0)


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it may touch the disk."""


def die_at(monkeypatch: pytest.MonkeyPatch, instant: int) -> None:
    """The process is gone at its n-th call that changes the disk, and every later call fails too."""
    left = [instant]

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] <= 0:
                raise Killed
            return call(*args, **named)

        return wrapped

    for name in ("write", "fsync", "ftruncate", "replace", "unlink"):
        monkeypatch.setattr(os, name, deadly(getattr(os, name)))
    monkeypatch.setattr(Path, "unlink", deadly(Path.unlink))


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("options", [{}, {"val_fraction": 0.0}, {"shuffle": True}, {"tokenizer": "chars"}])
def test_dying_at_any_instant_ends_in_the_same_bytes(
    parquet: WriteParquet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    source = str(parquet("a.parquet", stories(40), rows=15))
    undisturbed = prepare(PrepareOptions((source,), tmp_path / "undisturbed", workers=2, **options))
    deaths = 0
    for instant in range(1, 400, 3):
        again = PrepareOptions((source,), tmp_path / f"died {instant}", workers=2, **options)
        with monkeypatch.context() as patch:
            die_at(patch, instant)
            try:
                prepare(again)
                break
            except Killed:
                deaths += 1
        prepare(again)
        assert digest(again.out) == digest(undisturbed.folder), f"died at its call number {instant}"
        left = {path.name for path in again.out.iterdir()}
        assert left == {path.name for path in undisturbed.folder.iterdir()}
    assert deaths > 10


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("limit", [{"limit_tokens": 2000}, {"limit_documents": 17}])
def test_stopped_when_the_limit_is_reached_nothing_is_added_after_it(
    parquet: WriteParquet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: dict[str, int]
) -> None:
    source = str(parquet("a.parquet", stories(200), rows=10))
    undisturbed = prepare(PrepareOptions((source,), tmp_path / "undisturbed", **limit))
    stopped = PrepareOptions((source,), tmp_path / "stopped", **limit)
    is_full = shard._is_full

    def interrupted(job: shard.ShardOptions, counts: Any) -> bool:
        if is_full(job, counts):
            raise KeyboardInterrupt
        return False

    with monkeypatch.context() as patch:
        patch.setattr(shard, "_is_full", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(stopped)
    prepare(stopped)
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (stopped.out, undisturbed.folder)]
    assert digest(stopped.out) == digest(undisturbed.folder)
    assert manifests[0]["splits"] == manifests[1]["splits"]


@pytest.mark.slow
def test_sigkill_at_random_moments_ends_in_the_same_bytes(shared: Path, tmp_path: Path) -> None:
    """The real signal on the real file, a few times; bench/prepare.py does it twenty times."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for i in range(4):
        (folder / f"{i}.parquet").symlink_to(shared / "data" / "web_mdn.parquet")
    undisturbed = prepare(PrepareOptions((str(folder),), tmp_path / "undisturbed"))
    out = tmp_path / "killed"
    rng = random.Random(2)
    kills = 0
    for _ in range(3):
        process = fork(gptfit_program(["prepare", str(folder), "--out", str(out)]))
        deadline = time.monotonic() + 60
        while not (out / "train.bin.part").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.5))
        process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
    assert kills >= 1
    prepare(PrepareOptions((str(folder),), out))
    assert digest(out) == digest(undisturbed.folder)


@pytest.mark.usefixtures("small_steps")
def test_a_resume_does_not_encode_again_what_is_written(
    parquet: WriteParquet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Kept
) -> None:
    source = str(parquet("a.parquet", stories(200), rows=10))
    options = PrepareOptions((source,), tmp_path / "out", workers=1)
    with monkeypatch.context() as patch:
        die_at(patch, 300)
        with pytest.raises(Killed):
            prepare(options)
    journal = json.loads((options.out / "prepare.journal.json").read_text())
    assert journal["unit"] > 3
    prepare(options, kept)
    assert kept.steps[0].tokens * 2 == journal["train_bytes"] + journal["val_bytes"]


@pytest.mark.usefixtures("small_steps")
def test_a_full_disk_is_one_line_and_the_run_goes_on_after_it(
    parquet: WriteParquet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(parquet("a.parquet", stories(100), rows=15))
    undisturbed = prepare(PrepareOptions((source,), tmp_path / "undisturbed"))
    options = PrepareOptions((source,), tmp_path / "out")
    room = [20_000]

    def write(descriptor: int, data: memoryview) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real_write(descriptor, data[: room[0]])  # a full disk takes a part first
        room[0] -= written
        return written

    real_write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(bins.os, "write", write)
        with pytest.raises(DataError, match="the disk is full; free some space and run the same command again"):
            prepare(options)
    assert not (options.out / "train.bin").exists()
    prepare(options)
    assert digest(options.out) == digest(undisturbed.folder)


def test_too_little_space_is_said_before_work(
    parquet: WriteParquet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptfit.data.prepare.free_bytes", lambda _: 100)
    with pytest.raises(DataError, match="is free; free some space or use --limit"):
        prepare(PrepareOptions((str(parquet("a.parquet", stories(50))),), tmp_path / "out"))


@pytest.fixture
def unfinished(
    parquet: WriteParquet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_steps: None
) -> PrepareOptions:
    options = PrepareOptions((str(parquet("a.parquet", stories(100), rows=15)),), tmp_path / "out")
    with monkeypatch.context() as patch:
        die_at(patch, 100)
        with pytest.raises(Killed):
            prepare(options)
    return options


def test_other_options_on_resume_are_refused_and_named(unfinished: PrepareOptions) -> None:
    with pytest.raises(DataError, match=r"other options \(seed was 2357, now 5; shuffle was False, now True\)"):
        prepare(replace(unfinished, seed=5, shuffle=True))
    prepare(replace(unfinished, workers=3, skip_bad=True))  # these change no byte


def test_a_source_that_changed_is_refused(unfinished: PrepareOptions) -> None:
    source = Path(unfinished.sources[0])
    os.utime(source, ns=(1, 1))
    with pytest.raises(DataError, match=r"a\.parquet changed since this prepare began"):
        prepare(unfinished)
    prepare(replace(unfinished, restart=True))


def test_a_token_file_cut_short_is_noticed(unfinished: PrepareOptions) -> None:
    (unfinished.out / "train.bin.part").write_bytes(b"")
    with pytest.raises(DataError, match="shorter than its journal says"):
        prepare(unfinished)


def test_a_damaged_journal_is_one_line(unfinished: PrepareOptions) -> None:
    (unfinished.out / "prepare.journal.json").write_text("{")
    with pytest.raises(DataError, match="damaged journal"):
        prepare(unfinished)


def test_two_prepares_into_one_folder_are_refused(parquet: WriteParquet, tmp_path: Path) -> None:
    options = PrepareOptions((str(parquet("a.parquet", stories(5))),), tmp_path / "out")
    options.out.mkdir()
    with (
        FolderLock(options.out, "preparing data in", "wait"),
        pytest.raises(DataError, match=r"process \d+ is preparing data in this folder"),
    ):
        prepare(options)
    prepare(options)


def bad(tmp_path: Path, parquet: WriteParquet, case: str) -> Path:
    path = tmp_path / "bad.parquet"
    if case == "number":
        return parquet("bad.parquet", [1, 2, 3])
    if case == "column":
        return parquet("bad.parquet", ["x"], column="content")
    whole = parquet("bad.parquet", stories(50)).read_bytes()
    path.write_bytes(
        {"empty": b"", "html": b"<!DOCTYPE html><p>Sign in", "cut": whole[:-200], "noise": b"x" * 500}[case]
    )
    return path


BAD = {
    "empty": "is empty",
    "html": "is a web page, not Parquet",
    "cut": "is cut short",
    "noise": "does not begin with PAR1",
    "column": "has no column 'text'; it has content, n",
    "number": "holds int64, not text",
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_no_parquet_says_why_and_can_be_skipped(
    parquet: WriteParquet, tmp_path: Path, kept: Kept, case: str
) -> None:
    good = parquet("good.parquet", stories(50))
    path = bad(tmp_path, parquet, case)
    options = PrepareOptions((str(good), str(path)), tmp_path / "out")
    with pytest.raises(DataError, match=BAD[case]) as found:
        prepare(options)
    assert str(found.value).startswith(f"{path}: ")
    assert not options.out.exists()
    prepare(replace(options, skip_bad=True), kept)
    prepare(PrepareOptions((str(good),), tmp_path / "alone"))
    assert digest(options.out) == digest(tmp_path / "alone")
    skipped = json.loads((options.out / "manifest.json").read_text())["skipped_files"]
    assert [entry["path"] for entry in skipped] == [str(path)]
    assert any("file skipped" in note for note in kept.notes)


def test_a_row_group_damaged_inside_stops_or_is_skipped(parquet: WriteParquet, tmp_path: Path, kept: Kept) -> None:
    import pyarrow.parquet as pq

    path = parquet("a.parquet", stories(400, words=200), rows=100)
    chunk = pq.ParquetFile(path).metadata.row_group(2).column(0)
    raw = bytearray(path.read_bytes())
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    raw[start : start + 2000] = b"\xff" * 2000
    path.write_bytes(raw)
    options = PrepareOptions((str(path),), tmp_path / "out")
    with pytest.raises(DataError, match="row group 2 is damaged"):
        prepare(options)
    prepare(replace(options, skip_bad=True), kept)
    manifest = json.loads((options.out / "manifest.json").read_text())
    assert manifest["skipped"] == {"unreadable": 100}
    assert manifest["splits"]["train"]["documents"] + manifest["splits"]["val"]["documents"] == 300


def test_zero_documents_is_an_error_and_leaves_no_data_set(parquet: WriteParquet, tmp_path: Path) -> None:
    for texts in ([], [None, "", None]):
        source = parquet("a.parquet", texts, kind=pa.string())
        with pytest.raises(DataError, match="no documents in"):
            prepare(PrepareOptions((str(source),), tmp_path / "out"))
        assert not list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True


def test_one_bad_row_does_not_lose_its_batch(shared: Path, tmp_path: Path, kept: Kept) -> None:
    source = shared / "data" / "edge.parquet"
    info = prepare(PrepareOptions((str(source),), tmp_path / "out"), kept)
    assert info.train is not None
    assert info.val is not None
    assert info.train.tokens + info.val.tokens == sum([2, 9, 6, 5, 10, 25000, 1200000, 2500, 1, 2]) + 10
    assert f"{source}: row 4: invalid UTF-8 replaced" in kept.notes


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads its peak memory from /proc")
def test_a_document_of_100_mb_in_one_row_takes_a_few_times_its_size(parquet: WriteParquet, tmp_path: Path) -> None:
    """The encoder alone would take twelve times its size if it were given the whole document."""
    sentence = "It was the best of times, it was the worst of times. "
    source = parquet("a.parquet", [sentence * 2_000_000, "short", "another"])
    program = f"""
from pathlib import Path
from gptfit.data.options import PrepareOptions
from gptfit.data.prepare import prepare
info = prepare(PrepareOptions(({str(source)!r},), Path({str(tmp_path / "out")!r}), val_fraction=0))
# Not ru_maxrss: exec hands the parent's peak on to its child.
peak_kib = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(info.train.tokens, int(peak_kib) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    tokens, peak_mib = map(int, done.stdout.split())
    # 14 tokens a sentence, the blank after the last one, two short documents and three end-of-text tokens.
    assert tokens == 2_000_000 * 14 + 1 + 2 + 3
    assert peak_mib < 1200  # pyarrow alone takes 300: the page, the column and its dictionary


def test_ctrl_c_keeps_what_is_written(shared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sources"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i}.parquet").symlink_to(shared / "data" / "web_usgov.parquet")
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        out = tmp_path / signal_number.name
        process = fork(gptfit_program(["prepare", str(folder), "--out", str(out)]))
        while not (out / "prepare.journal.json").exists() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(0.3)
        process.send_signal(signal_number)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 128 + signal_number, stdout + stderr
        assert "run the same command again to go on" in stdout
        assert "Traceback" not in stderr
        assert (out / "prepare.journal.json").exists()


def test_restart_removes_its_own_files_only(parquet: WriteParquet, tmp_path: Path) -> None:
    options = PrepareOptions((str(parquet("a.parquet", stories(30))),), tmp_path / "out")
    prepare(options)
    mine = options.out / "train_of_last_week.bin"
    mine.write_bytes(b"keep me")
    prepare(replace(options, seed=9, restart=True))
    assert mine.read_bytes() == b"keep me"
