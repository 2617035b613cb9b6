"""Bad input to `gptfit train`: one line that says where, what and what next; nothing half-written."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptfit import files
from gptfit.checkpoint import store
from gptfit.checkpoint.format import BEST, LAST, load_checkpoint
from gptfit.checkpoint.store import CheckpointStore
from gptfit.cli import main
from gptfit.config.keys import TrainConfig
from gptfit.data import token_files
from gptfit.errors import ConfigError, DataError, DeviceError, RunError
from gptfit.files import FolderLock
from gptfit.logs.events import Event
from gptfit.train.evaluation import Evaluator, Losses
from gptfit.train.train import train
from tests.small_runs import fork_gptfit, told

MakeConfig = Callable[..., TrainConfig]


def refused(config: TrainConfig, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        train(config)
    assert "\n" not in str(caught.value)
    assert not (Path(config.out_dir) / LAST).exists()


def test_a_missing_data_folder(small_config: MakeConfig, tmp_path: Path) -> None:
    refused(small_config(dataset="nowhere", data_root=str(tmp_path)), DataError, "no such data folder.*gptfit prepare")


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_a_missing_split(small_config: MakeConfig, token_folder: Path, name: str) -> None:
    (token_folder / name).unlink()
    refused(small_config(), DataError, f"{name}: missing")


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_an_empty_split(small_config: MakeConfig, token_folder: Path, name: str) -> None:
    (token_folder / name).write_bytes(b"")
    refused(small_config(), DataError, f"{name}: is empty")


def test_an_odd_number_of_bytes(small_config: MakeConfig, token_folder: Path) -> None:
    (token_folder / "train.bin").write_bytes(b"abc")
    refused(small_config(), DataError, "train.bin: 3 bytes is odd")


def test_a_val_split_shorter_than_a_window(small_config: MakeConfig, token_folder: Path) -> None:
    np.zeros(16, dtype=np.uint16).tofile(token_folder / "val.bin")
    refused(small_config(), DataError, r"val.bin: 16 tokens are fewer than one window .*block_size = 15 or less")


def test_a_token_beyond_the_vocabulary_is_named_with_its_position(small_config: MakeConfig, token_folder: Path) -> None:
    ids = np.fromfile(token_folder / "train.bin", dtype=np.uint16)
    ids[[1234, 2000]] = 65
    ids.tofile(token_folder / "train.bin")
    refused(small_config(), DataError, r"train.bin: token id 65 at position 1,234 is beyond the vocabulary of 65")


def test_a_bad_token_in_a_file_too_large_to_check_is_found_when_it_is_read(
    small_config: MakeConfig, token_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "CHECK_AT_ONCE", 10)
    ids = np.fromfile(token_folder / "train.bin", dtype=np.uint16)
    ids[100:] = 70
    ids.tofile(token_folder / "train.bin")
    refused(small_config(), DataError, r"train.bin: token id 70 at position [\d,]+ is beyond the vocabulary of 65")


def test_meta_pkl_with_code_in_it_is_not_run(small_config: MakeConfig, token_folder: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "hacked"),)

    (token_folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": Evil()}))
    refused(small_config(), DataError, "meta.pkl: not a plain meta.pkl")
    assert not (tmp_path / "hacked").exists()


def test_an_out_dir_that_cannot_be_written(small_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    refused(small_config(out_dir=str(tmp_path / "file" / "out")), RunError, "cannot write here.*another --out_dir")


def test_resume_without_a_checkpoint(small_config: MakeConfig) -> None:
    refused(small_config(init_from="resume"), RunError, "no such checkpoint; start the run without --init_from=resume")


def test_an_unknown_start(small_config: MakeConfig) -> None:
    refused(small_config(init_from="gpt3"), ConfigError, "init_from = 'gpt3' is not known; use scratch")


def test_cuda_on_a_machine_without_it_names_the_fix(small_config: MakeConfig) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    refused(small_config(device="cuda"), DeviceError, "sees no CUDA.*--device=cpu")


def test_two_runs_into_one_folder_are_refused(small_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    lock = FolderLock(tmp_path / "out", "training into", "wait for it")
    refused(small_config(), RunError, f"process {os.getpid()} is training into this folder")
    lock.release()
    assert train(small_config(max_iters=2)).step == 2


def disk_with(monkeypatch: pytest.MonkeyPatch, *frees: int) -> None:
    """Free bytes as the disk answers one question after another; the last answer stays."""
    answers = list(frees)

    def usage(_: object) -> Any:
        return type("Usage", (), {"free": answers.pop(0) if len(answers) > 1 else answers[0]})

    monkeypatch.setattr(shutil, "disk_usage", usage)


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoint can be written any more, whatever was said of free bytes."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store, "write_whole", full)


def test_at_the_end_a_checkpoint_is_tried_however_little_room_there_seems_to_be(
    small_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best one too, which was refused when it was found."""
    disk_with(monkeypatch, 10**12, 1000)
    events: list[Event] = []
    assert train(small_config(), events.append).step == 8
    assert told(events, "checkpoint_failed")
    assert load_checkpoint(tmp_path / "out").iter_num == 8
    assert load_checkpoint(tmp_path / "out" / BEST).iter_num in (4, 8)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 600 KiB, where one may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("needs to mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_with_room_for_two_checkpoints_and_a_new_one_is_enough(
    small_config: MakeConfig, small_disk: Path
) -> None:
    """177 KiB each."""
    train(small_config(n_layer=1, max_iters=2, out_dir=str(small_disk / "out")))
    assert load_checkpoint(small_disk / "out").iter_num == 2
    assert load_checkpoint(small_disk / "out" / BEST).iter_num == 2


def test_a_disk_that_cannot_hold_one_checkpoint_is_refused_before_the_first_step(
    small_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_with(monkeypatch, 1000)
    events: list[Event] = []
    with pytest.raises(RunError, match=r"the first checkpoint needs .* is free; make room"):
        train(small_config(), events.append)
    assert not events
    assert not (tmp_path / "out" / "run.jsonl").exists()


def test_a_disk_that_fills_later_keeps_the_newest_checkpoint_and_says_so_at_the_end(
    small_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(small_config(max_iters=2))
    before = (tmp_path / "out" / LAST).read_bytes()
    fill_the_disk(monkeypatch)
    events: list[Event] = []
    with pytest.raises(RunError, match=r"could not be written \(No space left on device\)"):
        train(small_config(init_from="resume"), events.append)
    assert [event.step for event in told(events, "checkpoint_failed")][:2] == [4, 4]
    assert (tmp_path / "out" / LAST).read_bytes() == before


def test_room_is_made_from_kept_checkpoints_before_anything_is_given_up(
    small_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(small_config(max_iters=4, eval_interval=1, keep_checkpoints=2))
    assert len(list((tmp_path / "out").glob("ckpt-*.pt"))) == 2
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda folder: type("Usage", (), {"free": 0 if list(Path(folder).glob("ckpt-*.pt")) else 10**9}),
    )
    monkeypatch.setattr(CheckpointStore, "check_first_room", lambda *_: None)
    train(small_config(init_from="resume", max_iters=5, eval_interval=1, keep_checkpoints=2))
    assert load_checkpoint(tmp_path / "out").iter_num == 5


def test_seventeen_mebibytes_are_enough_for_a_small_checkpoint(
    small_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_with(monkeypatch, 17 * 2**20)
    assert train(small_config(max_iters=2)).step == 2


def test_a_run_stopped_while_the_disk_is_full_says_that_its_work_is_not_saved(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not `goes on at step 1`, which it could not."""
    fill_the_disk(monkeypatch)
    with pytest.raises(RunError, match=r"could not be written \(No space left on device\)"):
        train(small_config(max_hours=1e-6))


def test_a_checkpoint_that_failed_is_tried_again_at_the_same_step(
    small_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early stop at step 4, where the save before the eval finds the disk full and the one after it does not."""
    disk_with(monkeypatch, 10**12, 1000, 10**12)
    monkeypatch.setattr(Evaluator, "losses", lambda *_: Losses(3.0, 3.0, 100))
    result = train(small_config(early_stop_evals=1))
    assert (result.reason, result.step) == ("early_stop", 4)
    assert load_checkpoint(tmp_path / "out").iter_num == 4


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for a descriptor's name")
def test_a_single_refused_call_costs_no_checkpoint(
    small_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write at step 4 fails once: the copy that is kept is of step 4, as in a run that nothing disturbed."""
    real, failures = files.os.fsync, [OSError(errno.EIO, "Input/output error")]

    def fsync(descriptor: int) -> None:
        is_it = (tmp_path / "out" / LAST).exists() and os.readlink(f"/proc/self/fd/{descriptor}").endswith(".tmp")
        if is_it and failures:
            raise failures.pop()
        real(descriptor)

    monkeypatch.setattr(files.os, "fsync", fsync)
    events: list[Event] = []
    train(small_config(max_iters=6, eval_interval=2, keep_checkpoints=1), events.append)
    assert not failures
    assert [path.name for path in (tmp_path / "out").glob("ckpt-*.pt")] == ["ckpt-00000004.pt"]
    assert not told(events, "checkpoint_failed")


def test_a_best_model_that_could_not_be_written_is_tried_again(
    small_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free room as asked: the start, ckpt.pt at step 4, best.pt at step 4 (refused), then all again."""
    disk_with(monkeypatch, 10**12, 10**12, 1000, 10**12)
    losses = iter([5.0, 2.0, 4.0, 4.0])
    monkeypatch.setattr(Evaluator, "losses", lambda *_: Losses(3.0, next(losses), 100))
    train(small_config())
    best = load_checkpoint(tmp_path / "out" / BEST)
    assert (best.iter_num, best.best_val_loss) == (4, 2.0), "not that of step 8, and not missing"


@pytest.mark.skipif(sys.platform != "linux", reason="file size limits as Linux has them")
def test_a_write_that_fails_half_way_leaves_the_previous_checkpoint(small_config: MakeConfig, tmp_path: Path) -> None:
    train(small_config(max_iters=2))
    out = tmp_path / "out"
    before = (out / LAST).read_bytes()
    limit = len(before) // 2
    limited = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
    process = fork_gptfit(small_config(init_from="resume"), before=limited)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 1, output + errors
    assert "the previous checkpoint is untouched" in output
    assert errors.startswith("gptfit: ")
    assert errors.count("\n") == 1
    assert (out / LAST).read_bytes() == before
    assert load_checkpoint(out).iter_num == 2
    assert not list(out.glob("*.tmp"))


def test_the_command_line_prints_one_line_and_exits_with_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = main(["train", "--dataset=nowhere", f"--data_root={tmp_path}", "--device=cpu", f"--out_dir={tmp_path}/out"])
    captured = capsys.readouterr()
    assert code == 1
    assert captured.err.startswith("gptfit: ")
    assert captured.err.count("\n") == 1
