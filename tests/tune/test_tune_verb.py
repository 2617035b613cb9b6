"""`gptfit tune` as a user meets it: table, files, cache, then train --batch_size=auto and plan use what it found."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from gptfit import measured
from gptfit.cli import main
from gptfit.config.keys import DEFAULTS
from gptfit.config.read import load_config
from gptfit.tune import measuring, search
from gptfit.tune.trials import Candidate, Machine, Variant
from gptfit.verbs.tune_output import ROW_COLUMNS

pytestmark = pytest.mark.xdist_group("tune")  # one worker: the session that all look at is measured once
CONFIG = """# a toy, to see tune work
n_layer = 1
n_head = 2
n_embd = 32
block_size = 16
batch_size = 2  # what fitted last time
gradient_accumulation_steps = 2
max_iters = 2
lr_decay_iters = 2
warmup_iters = 0
eval_interval = 2
eval_iters = 1
device = 'cpu'
dtype = 'float32'
compile = False
"""


@dataclass(frozen=True)
class Tuned:
    folder: Path
    config: Path
    output: str


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """One real session on this CPU, with short timings; its cache stays for the tests of this file."""
    folder = tmp_path_factory.mktemp("tune")
    config = folder / "toy.py"
    config.write_text(CONFIG + "vocab_size = 65\n", encoding="utf-8")
    output = io.StringIO()
    words = ["tune", str(config), "--minutes=3", "--sizes=3", "--write", f"--html={folder / 'tune.html'}"]
    words += ["--csv", str(folder / "rows.csv")]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setenv("GPTFIT_CACHE", str(folder / "cache"))
        patch.setattr(measuring, "TIMED_SECONDS", 0.1)
        patch.setattr(search, "MOST_ROUNDS", 2)
        assert main(words) == 0
    return Tuned(folder, config, output.getvalue())


def test_the_answer_keeps_the_tokens_of_a_step(tuned: Tuned) -> None:
    said = " ".join(tuned.output.split())  # a narrow terminal breaks the lines between any two words
    assert "best: batch_size = " in said
    assert "(64 tokens per step, as before)" in said
    assert "note: 3 does not divide the 4 rows of a step; nearest that do: 2 and 4" in said
    for size in (2, 4):
        assert f"micro-batch {size}: " in said


def test_the_copy_differs_from_the_config_in_the_two_sizes_only(tuned: Tuned) -> None:
    copy = tuned.folder / "toy_tuned.py"
    before, after = load_config([tuned.config]).config, load_config([copy]).config
    assert after.tokens_per_iter() == before.tokens_per_iter()
    sizes = {"batch_size": before.batch_size, "gradient_accumulation_steps": before.gradient_accumulation_steps}
    assert after.replace(**sizes) == before
    assert "# what fitted last time" in copy.read_text(encoding="utf-8")
    assert tuned.config.read_text(encoding="utf-8").startswith(CONFIG), "the config itself is left alone"


def test_the_page_is_whole_and_fetches_nothing(tuned: Tuned) -> None:
    page = (tuned.folder / "tune.html").read_text(encoding="utf-8")
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert [plot["id"] for plot in data["plots"]] == ["speed", "memory"]
    best = int(re.search(r"best: batch_size = (\d+)", tuned.output)[1])  # type: ignore[index]
    assert best in {size for trace in data["plots"][0]["traces"] for size in trace["x"]}
    assert "<script src" not in page


def test_the_row_has_the_columns_of_the_measurement_table(tuned: Tuned, repo: Path) -> None:
    with (repo / "tests" / "measured.csv").open(encoding="utf-8", newline="") as file:
        assert next(csv.reader(file)) == ROW_COLUMNS
    with (tuned.folder / "rows.csv").open(encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    assert int(row["micro_batch"]) * int(row["grad_accum"]) == 4
    assert float(row["tokens_per_s"]) > 0
    assert row["vocab_size"] == "65"


def test_every_size_is_in_the_cache_of_measured_facts(tuned: Tuned) -> None:
    known = measured.read(tuned.folder / "cache" / measured.FILE_NAME)
    assert known.skipped == 0
    assert {2, 4} <= {speed.key.micro_batch for speed in known.speeds}
    assert {speed.source for speed in known.speeds} == {"tune"}


def test_plan_afterwards_says_measured(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPTFIT_CACHE", str(tuned.folder / "cache"))
    main(["plan", str(tuned.config), "--gpu=cpu", "--json"])
    planned = json.loads(capsys.readouterr().out)["tokens_per_s"]
    assert planned["basis"] == "measured"
    known = measured.read(tuned.folder / "cache" / measured.FILE_NAME).speeds
    newest = [speed for speed in known if speed.key.micro_batch == 2][-1]
    step_ms = 2 * newest.ms_per_micro_step + (newest.ms_per_update or 0)
    assert planned["value"] == pytest.approx(1e3 * 64 / step_ms)


def test_train_with_batch_size_auto_uses_what_tune_found(
    tuned: Tuned,
    token_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GPTFIT_CACHE", str(tuned.folder / "cache"))
    before = (tuned.folder / "cache" / measured.FILE_NAME).read_bytes()
    words = [
        "train",
        str(tuned.config),
        "--batch_size=auto",
        f"--dataset={token_folder}",
        f"--out_dir={tmp_path / 'out'}",
    ]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "batch_size = auto: " in said
    assert "measured here at " in said
    assert "64 tokens per step as before" in said
    lines = (tuned.folder / "cache" / measured.FILE_NAME).read_bytes()[len(before) :].decode()
    assert '"source": "tune"' not in lines, "nothing was tuned again"


def test_train_with_batch_size_auto_tunes_first_where_nothing_is_known(
    token_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPTFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "TIMED_SECONDS", 0.05)
    monkeypatch.setattr(search, "MOST_ROUNDS", 1)
    config = tmp_path / "two.py"
    config.write_text(CONFIG.replace("batch_size = 2", "batch_size = 1"), encoding="utf-8")
    words = ["train", str(config), "--batch_size=auto", f"--dataset={token_folder}", f"--out_dir={tmp_path / 'out'}"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "best: batch_size = " in said
    assert "measured just now; 32 tokens per step as before" in said
    assert "threads=" not in said, "this process trains with the threads it has"


def test_control_c_keeps_what_was_measured(tmp_path: Path) -> None:
    config = tmp_path / "toy.py"
    config.write_text(CONFIG + "vocab_size = 65\n", encoding="utf-8")
    environment = {**os.environ, "GPTFIT_CACHE": str(tmp_path / "cache"), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "gptfit", "tune", str(config), "--minutes=5"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("micro-batch "):
                break
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert "stopped early: " in rest
    assert "best: batch_size = " in rest
    assert measured.read(tmp_path / "cache" / measured.FILE_NAME).speeds


def test_a_size_beyond_the_memory_limit_is_a_row_and_the_search_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """256 rows x 512 x 4096 logits are 2 GiB in float32; each trial may have 1 GiB."""
    monkeypatch.setenv("GPTFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "TIMED_SECONDS", 0.05)
    shape = [
        "--n_layer=1",
        "--n_head=1",
        "--n_embd=16",
        "--block_size=512",
        "--vocab_size=4096",
        "--chunked_loss=False",
    ]
    step = ["--batch_size=1", "--gradient_accumulation_steps=256", "--device=cpu", "--compile=False"]
    limits = ["--memory=1", "--sizes=256", "--minutes=10", "--json"]
    monkeypatch.setattr(measuring, "next_candidate", _first_small_then_asked)
    assert main(["tune", *shape, *step, *limits]) == 0
    answer = json.loads(capsys.readouterr().out)
    outcomes = [(trial["candidate"]["micro_batch"], trial["outcome"]) for trial in answer["trials"]]
    assert outcomes == [(1, "ok"), (256, "oom"), (2, "ok")]
    assert answer["best"]["batch_size"] in (1, 2)
    assert "out of memory from 256" in answer["explanation"]


def _first_small_then_asked(space: object, trials: list[object]) -> Candidate | None:
    """A fixed order, so that the test takes three trials."""
    base = space.base  # type: ignore[attr-defined]
    return Candidate((1, 256, 2)[len(trials)], base) if len(trials) < 3 else None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes=0"], "--minutes 0 makes no sense"),
        (["--headroom=100"], "--headroom 100 makes no sense"),
        (["--memory=-1"], "--memory -1 makes no sense"),
        (["--sizes=4,x"], "--sizes 4,x: give whole numbers"),
        (["--write"], "--write without a config file needs a name"),
        (["--write=tuned.txt"], "a config file ends in .py"),
        (["--write=nowhere/tuned.py"], "there is no folder nowhere"),
        (["--html=nowhere/tune.html"], "there is no folder nowhere"),
        (["--batchsize=4"], "did you mean batch_size?"),
    ],
)
def test_a_bad_command_line_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *words]) != 0
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("before", [["toy.py"], []])
def test_a_config_is_never_overwritten(
    before: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("toy.py").write_text(CONFIG, encoding="utf-8")
    assert main(["tune", *before, "--write", "toy.py"]) == 1
    assert "--write toy.py: is there already" in capsys.readouterr().err
    assert Path("toy.py").read_text(encoding="utf-8") == CONFIG


def test_one_size_alone_is_no_comparison(tuned: Tuned) -> None:
    from gptfit.tune.cache import best_known

    known = measured.read(tuned.folder / "cache" / measured.FILE_NAME)
    config = load_config([tuned.config]).config
    key = known.speeds[0].key
    machine = Machine(
        device=key.device, kind="cpu", dtype="float32", has_bf16=False, torch=known.speeds[0].torch, threads=1, cores=2,
        total_bytes=2**34, free_bytes=2**34,
    )  # fmt: skip
    best = best_known(config, config.shape(), machine, known)
    assert best is not None
    assert best.candidate.variant == Variant.of(1, {**DEFAULTS, "dtype": "float32", "compile": False})
    only = measured.Measurements(tuple(speed for speed in known.speeds if speed.key == key))
    assert best_known(config, config.shape(), machine, only) is None
    elsewhere = Machine(**{**vars(machine), "torch": "1.0"})
    assert best_known(config, config.shape(), elsewhere, known) is None, "another torch is another machine"
