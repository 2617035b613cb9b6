"""An export removes what an export made, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gptfit.cli import main
from gptfit.config.keys import TrainConfig
from gptfit.files import temporary_name
from gptfit.train.train import train


def test_a_persons_folder_beside_the_export_stays(
    small_config: Callable[..., TrainConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(small_config(max_iters=2, vocab_size=50304))
    mine = tmp_path / "X.tmp"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    left = temporary_name(tmp_path / "X").with_name("X.00000000-1.tmp")  # of another machine: it may be alive
    left.mkdir()
    code = main(["export", str(tmp_path / "out"), "--to=nanogpt", f"--out={tmp_path / 'X'}"])
    assert code == 0, capsys.readouterr().err
    assert (mine / "thesis.txt").read_text() == "years of work"
    assert left.is_dir()
    assert (tmp_path / "X" / "ckpt.pt").is_file()
