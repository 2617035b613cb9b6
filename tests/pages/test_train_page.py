"""What `gptfit train` leaves is a run that can be compared and a page that can be opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gptfit.cli import main
from gptfit.config.keys import DEFAULTS, TrainConfig


def test_train_ends_with_a_report_page_and_its_run_compares_with_its_own_stdout(
    small_config: Callable[..., TrainConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(max_iters=6, eval_interval=2, log_interval=1)
    words = [f"--{key}={value}" for key, value in config.as_dict().items() if value != DEFAULTS[key]]
    assert main(["train", *words]) == 0
    printed = capsys.readouterr().out
    page = tmp_path / "out" / "report.html"
    assert f"report: {page}" in printed
    assert 'id="headline"' in page.read_text(encoding="utf-8")
    (tmp_path / "stdout.txt").write_text(printed)
    assert main(["compare", str(tmp_path / "out"), str(tmp_path / "stdout.txt"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    ours, stdout = answer["runs"]
    assert ours["parameters"] == stdout["parameters"]
    assert ours["tokens_per_step"] == stdout["tokens_per_step"]
    assert [point["step"] for point in ours["evals"]] == [point["step"] for point in stdout["evals"]]
    assert answer["at_equal"]["step"]["ahead"] is None
