"""The Ray engine writes shards that, joined in order, are the local engine's bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gptfit.data.options import PrepareOptions
from gptfit.data.prepare import prepare
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


def test_a_local_ray_gives_the_bytes_of_the_local_engine_and_resumes(parquet: WriteParquet, tmp_path: Path) -> None:
    sources = tuple(
        str(parquet(f"{i}.parquet", [*stories(60, i), None, b"\xff"], rows=25, kind="binary")) for i in range(3)
    )
    local = PrepareOptions(sources, tmp_path / "local", val_fraction=0.1)
    prepare(local)
    # A process of its own: Ray leaves sockets and threads behind that warn at exit.
    program = f"""
import sys, ray
from dataclasses import replace
from pathlib import Path
from gptfit.data import engines, work
from gptfit.data.options import PrepareOptions
from gptfit.data.prepare import prepare
work.BATCH_BYTES = 2000  # many units from small files
options = PrepareOptions({sources!r}, Path({str(tmp_path / "ray")!r}), val_fraction=0.1, engine="ray", workers=2)
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
written = engines.write_ray
def die_after_writing(*args):
    written(*args)
    raise KeyboardInterrupt
import gptfit.data.prepare as module
module.write_ray = die_after_writing
try:
    prepare(options)
except KeyboardInterrupt:
    print("died with", len(list(options.out.glob("prepare.journal.*-of-00002.json"))), "journals")
module.write_ray = written
prepare(replace(options, workers=3))
ray.shutdown()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "died with 2 journals" in done.stdout
    info = read_dataset(tmp_path / "ray")
    assert info.train is not None
    assert [file.name for file in info.train.files] == ["train-00000.bin", "train-00001.bin"]
    assert digest(tmp_path / "ray") == digest(tmp_path / "local")
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("ray", "local")]
    for manifest in manifests:
        for split in manifest["splits"].values():
            del split["files"]
    assert manifests[0] == manifests[1]
    assert not list((tmp_path / "ray").glob("prepare.journal*"))


def test_one_engine_does_not_go_on_with_the_others_work(parquet: WriteParquet, tmp_path: Path) -> None:
    options = PrepareOptions((str(parquet("a.parquet", stories(30))),), tmp_path / "out")
    options.out.mkdir()
    (options.out / "prepare.journal.00000-of-00002.json").write_text("{}")
    with pytest.raises(DataError, match="was begun with --engine ray and 2 workers"):
        prepare(options)
    prepare(replace(options, restart=True))
