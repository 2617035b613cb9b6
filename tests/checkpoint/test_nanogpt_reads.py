"""Stock nanoGPT goes on from what train writes. Needs its checkout: GPTFIT_NANOGPT=/path/to/nanoGPT."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gptfit.checkpoint.format import LAST, load_checkpoint
from gptfit.config.keys import TrainConfig
from gptfit.train.train import train

MakeConfig = Callable[..., TrainConfig]
SIZES = "--n_layer=2 --n_head=2 --n_embd=32 --block_size=16 --batch_size=4 --gradient_accumulation_steps=2"
SHORT = "--max_iters=10 --eval_interval=10 --eval_iters=2 --log_interval=1 --device=cpu --compile=False --dtype=float32"


def test_stock_nanogpt_resumes_our_checkpoint_and_we_go_on_from_its(
    small_config: MakeConfig, token_folder: Path, tmp_path: Path
) -> None:
    """The sums that resume verifies are part of the archive itself, where torch.load does not mind them."""
    checkout = os.environ.get("GPTFIT_NANOGPT")
    if not checkout:
        pytest.skip("needs GPTFIT_NANOGPT, a checkout of nanoGPT")
    nanogpt = tmp_path / "nanoGPT"
    shutil.copytree(checkout, nanogpt, ignore=shutil.ignore_patterns(".git"))
    shutil.copytree(token_folder, nanogpt / "data" / "mine")
    train(small_config())
    before = load_checkpoint(tmp_path / "out")
    words = ["--dataset=mine", f"--out_dir={tmp_path / 'out'}", "--init_from=resume", *SIZES.split(), *SHORT.split()]
    command = [sys.executable, "train.py", *words, "--always_save_checkpoint=True"]
    done = subprocess.run(command, cwd=nanogpt, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [int(step) for step in re.findall(r"iter (\d+): loss", done.stdout)] == [8, 9, 10]
    # nanoGPT has written the file anew: every sum in it is right, and the run can be gone on with here.
    after = load_checkpoint(tmp_path / "out" / LAST)
    assert (before.iter_num, after.iter_num) == (8, 10)
    assert train(small_config(init_from="resume", max_iters=12)).step == 12
