"""Stock nanoGPT trains on what prepare writes. Needs its checkout: GPTFIT_NANOGPT=/path/to/nanoGPT."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gptfit.data.options import PrepareOptions
from gptfit.data.prepare import prepare

from .conftest import WriteParquet, stories


@pytest.mark.parametrize(("tokenizer", "vocab_size"), [("gpt2", 50304), ("bytes", 257), ("chars", None)])
def test_stock_nanogpt_trains_and_finds_the_vocabulary(
    parquet: WriteParquet, tmp_path: Path, tokenizer: str, vocab_size: int | None
) -> None:
    checkout = os.environ.get("GPTFIT_NANOGPT")
    if not checkout:
        pytest.skip("needs GPTFIT_NANOGPT, a checkout of nanoGPT")
    nanogpt = tmp_path / "nanoGPT"
    shutil.copytree(checkout, nanogpt, ignore=shutil.ignore_patterns(".git"))
    out = nanogpt / "data" / "mine"
    info = prepare(PrepareOptions((str(parquet("a.parquet", stories(400))),), out, tokenizer=tokenizer))
    sizes = "--n_layer=1 --n_head=2 --n_embd=16 --block_size=32 --batch_size=2 --gradient_accumulation_steps=1"
    short = (
        "--max_iters=2 --eval_interval=2 --eval_iters=1 --log_interval=1 --device=cpu --compile=False --dtype=float32"
    )
    command = [sys.executable, "train.py", "--dataset=mine", *sizes.split(), *short.split()]
    done = subprocess.run(command, cwd=nanogpt, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"iter \d+: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3
    if tokenizer == "gpt2":
        assert f"defaulting to vocab_size of GPT-2 to {vocab_size}" in done.stdout
    else:
        assert f"found vocab_size = {info.vocab_size}" in done.stdout
