"""Bad input to `gptfit train`: one line that says where, what and what next; nothing half-written."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptfit.cli import main
from gptfit.config import TrainConfig
from gptfit.errors import ConfigError, DataError, DeviceError, RunError
from gptfit.run import files, tokens
from gptfit.run.checkpoint import LAST, load_checkpoint
from gptfit.run.files import FolderLock
from gptfit.run.train import train
from gptfit.run.validation import Evaluator, Losses
from tests.torch.conftest import start_gptfit

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
    monkeypatch.setattr(tokens, "CHECK_AT_ONCE", 10)
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
    lock = FolderLock(tmp_path / "out")
    refused(small_config(), RunError, f"process {os.getpid()} is training into this folder")
    lock.release()
    assert train(small_config(max_iters=2)).step == 2


def test_a_disk_too_full_for_a_checkpoint_is_found_before_writing(
    small_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(small_config(max_iters=2))
    before = (tmp_path / "out" / LAST).read_bytes()
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage)
    events: list[dict[str, Any]] = []
    with pytest.raises(RunError, match=r"a checkpoint needs .* is free; make room"):
        train(small_config(init_from="resume"), events.append)
    assert [event["step"] for event in events if event.get("kind") == "checkpoint_failed"] == [4, 4, 8]
    assert (tmp_path / "out" / LAST).read_bytes() == before


def test_a_run_stopped_while_the_disk_is_full_says_that_its_work_is_not_saved(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not `goes on at step 1`, which it could not."""
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(RunError, match=r"a checkpoint needs .* is free; make room"):
        train(small_config(max_hours=1e-6))


def test_a_checkpoint_that_failed_is_tried_again_at_the_same_step(
    small_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early stop at step 4, where the save before the eval finds the disk full and the one after it does not."""
    frees = iter([1000, *[10**12] * 10])
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: type("Usage", (), {"free": next(frees)}))
    monkeypatch.setattr(Evaluator, "losses", lambda *_: Losses(3.0, 3.0, 100))
    result = train(small_config(early_stop_evals=1))
    assert (result.reason, result.step) == ("early_stop", 4)
    assert load_checkpoint(tmp_path / "out").iter_num == 4


@pytest.mark.skipif(sys.platform != "linux", reason="file size limits as Linux has them")
def test_a_write_that_fails_half_way_leaves_the_previous_checkpoint(small_config: MakeConfig, tmp_path: Path) -> None:
    import resource

    train(small_config(max_iters=2))
    out = tmp_path / "out"
    before = (out / LAST).read_bytes()
    limit = len(before) // 2
    process = start_gptfit(
        small_config(init_from="resume"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
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
