"""The Ray engine writes shards that, joined in order, are the local engine's bytes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from gptfit.data.engines import _joined, fresh_of
from gptfit.data.journal import Journal
from gptfit.data.options import PrepareOptions
from gptfit.data.prepare import prepare
from gptfit.data.shard import Shard
from gptfit.data.work import Span, plan_units, shards
from gptfit.dataset import read_dataset
from gptfit.errors import DataError

from .conftest import WriteParquet, digest, stories

pytest.importorskip("ray")


def test_shards_keep_the_order_of_the_units_and_share_the_work() -> None:
    units = plan_units([Span(0, 10 + i % 3, 5 * 2**20) for i in range(40)], None)
    runs = shards(units, 4)
    assert [unit for run in runs for unit in run] == units
    sizes = [sum(unit.source_bytes for unit in run) for run in runs]
    assert max(sizes) - min(sizes) < 30
    assert len(shards(units[:2], 5)) == 2


# A process of its own: Ray leaves sockets and threads behind that warn at exit. The task is the real one, except that it
# writes down every beginning and that real SIGKILLs come at the beginnings named.
PROGRAM = """
import os, ray, signal, sys, time
from pathlib import Path
from gptfit.data import engines, work
from gptfit.data.options import PrepareOptions
from gptfit.data.prepare import prepare
sources, out, log, workers, kill_worker, kill_driver = {values!r}
work.BATCH_BYTES = 2000  # many units from small files
real, driver = engines._write_in_task, os.getpid()
def watched(common, shard, fresh):
    number, marker = int(shard.train.name[6:11]), Path(log + ".killed")
    with open(log, "a") as file:
        file.write(str(number) + "\\n")
    if number == kill_driver:
        while Path(log).read_text().split().count(str(kill_worker)) < 2:
            time.sleep(0.05)  # the killed worker's shard was not begun again yet
        os.kill(driver, signal.SIGKILL)
    if number == kill_worker and not marker.exists():
        marker.touch()
        engines.write_shard(*common[:1], shard, fresh, common[1].load, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    return real(common, shard, fresh)
engines._write_in_task = watched
for patience in (2, 1, 0):  # Ray gives its own processes half a minute to start, which a busy machine may not have
    try:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        break
    except Exception:
        ray.shutdown()
        if not patience:
            raise
prepare(PrepareOptions(sources, Path(out), val_fraction=0.1, engine="ray", workers=workers))
ray.shutdown()
"""


def run_ray(*values: object) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(values=values)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600)


def test_a_ray_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says so with a plain Exception where its own processes take too long."""
    import ray

    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup. This could happen\nbecause of much.")

    monkeypatch.setattr(ray, "init", init)
    with (
        pytest.raises(DataError, match=r"no Ray cluster answers \(The current node timed out during startup"),
        _joined(ray),
    ):
        pass


@pytest.mark.timeout(1200)  # two starts of Ray
def test_a_killed_worker_loses_one_shard_and_a_killed_driver_none_and_the_bytes_are_the_local_engines(
    parquet: WriteParquet, tmp_path: Path
) -> None:
    sources = tuple(
        str(parquet(f"{i}.parquet", [*stories(60, i), None, b"\xff"], rows=25, kind="binary")) for i in range(3)
    )
    prepare(PrepareOptions(sources, tmp_path / "local", val_fraction=0.1))
    out, log = tmp_path / "ray", tmp_path / "beginnings"
    first = run_ray(sources, str(out), str(log), 2, 3, 6)
    assert first.returncode == -signal.SIGKILL, first.stderr
    beginnings = Counter(log.read_text().split())
    assert beginnings["3"] == 2, "the killed worker's shard was begun again"
    assert all(count == 1 for shard, count in beginnings.items() if shard != "3")
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("train-*.bin")}
    assert len(kept) >= 4
    second = run_ray(sources, str(out), str(log), 3, -1, -1)
    assert second.returncode == 0, second.stderr
    assert {name: (out / name).stat().st_mtime_ns for name in kept} == kept, "what was done is not done again"
    info = read_dataset(out)
    assert info.train is not None
    assert [file.name for file in info.train.files] == [f"train-{i:05d}.bin" for i in range(8)]
    assert digest(out) == digest(tmp_path / "local")
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("ray", "local")]
    for manifest in manifests:
        for split in manifest["splits"].values():
            del split["files"]
    assert manifests[0] == manifests[1]
    assert not list(out.glob("prepare.journal*"))


def test_a_shards_journal_names_its_own_sources_only() -> None:
    units = plan_units([Span(i, 10, 5 * 2**20) for i in range(1000)], None)
    fresh = Journal({}, tuple({"path": f"{i}.parquet", "size": i, "stamp": ""} for i in range(1000)))
    shard = Shard(shards(units, 100)[7], Path("train"), Path("val"), Path("journal"))
    assert [source["size"] for source in fresh_of(shard, fresh).sources] == list(range(70, 80))


def test_one_engine_does_not_go_on_with_the_others_work(parquet: WriteParquet, tmp_path: Path) -> None:
    options = PrepareOptions((str(parquet("a.parquet", stories(30))),), tmp_path / "out")
    options.out.mkdir()
    (options.out / "prepare.journal.00000-of-00002.json").write_text("{}")
    with pytest.raises(DataError, match="was begun with --engine ray and 2 shards"):
        prepare(options)
    prepare(replace(options, restart=True))
