"""The losses that stock nanoGPT prints, digit for digit."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from gptfit.config.keys import TrainConfig
from gptfit.logs.events import Eval, Step
from gptfit.train.train import train

# Printed by nanoGPT's train.py (commit 3adf61e), torch 2.13 on a CPU: config/train_shakespeare_char.py --device=cpu
# --compile=False --dtype=float32 --log_interval=1 --eval_interval=25 --eval_iters=4 --batch_size=12 --block_size=64
# --n_layer=4 --n_head=4 --n_embd=128
STEP_LOSSES = """
4.1692 4.1579 4.1257 4.1128 4.0604 4.0315 3.9684 3.8917 3.8707 3.8177 3.7671 3.7353 3.7462 3.7163 3.6571
3.6859 3.6413 3.6405 3.6322 3.5886 3.6420 3.5686 3.5291 3.5155 3.5143 3.5574 3.4369 3.4469 3.3992 3.4133
3.2772 3.3470 3.2934 3.3449 3.2153 3.2879 3.2531 3.2462 3.2550 3.2086 3.1349 3.1509 3.1158 3.1056 3.0573
3.0667 3.1294 3.0902 3.0739 2.9984 2.9772
"""
# step: (train loss, val loss)
EVAL_LOSSES = {0: ("4.1650", "4.1697"), 25: ("3.5125", "3.5303"), 50: ("2.9709", "2.9495")}


@pytest.fixture
def shakespeare(shared: Path, tmp_path: Path) -> Path:
    """data/shakespeare_char as nanoGPT's prepare.py makes it."""
    text = (shared / "data" / "tinyshakespeare.txt").read_text(encoding="utf-8")
    characters = sorted(set(text))
    ids = np.searchsorted(np.array(characters), np.array(list(text))).astype(np.uint16)
    cut = int(len(text) * 0.9)
    folder = tmp_path / "shakespeare_char"
    folder.mkdir()
    ids[:cut].tofile(folder / "train.bin")
    ids[cut:].tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(characters)}))
    return folder


def test_fifty_iterations_of_shakespeare_char_print_nanogpts_losses(shakespeare: Path, tmp_path: Path) -> None:
    config = TrainConfig(
        dataset=str(shakespeare),
        out_dir=str(tmp_path / "out"),
        sampling="random",
        n_layer=4,
        n_head=4,
        n_embd=128,
        block_size=64,
        batch_size=12,
        gradient_accumulation_steps=1,
        dropout=0.2,
        learning_rate=1e-3,
        min_lr=1e-4,
        beta2=0.99,
        warmup_iters=100,
        lr_decay_iters=5000,
        max_iters=100,
        eval_interval=25,
        eval_iters=4,
        device="cpu",
        dtype="float32",
        compile=False,
    )
    events = []
    train(config, events.append)
    steps = [f"{event.loss:.4f}" for event in events if isinstance(event, Step)]
    evals = {e.step: (f"{e.train_loss:.4f}", f"{e.val_loss:.4f}") for e in events if isinstance(e, Eval)}
    assert steps[:51] == STEP_LOSSES.split()
    assert {step: evals[step] for step in EVAL_LOSSES} == EVAL_LOSSES
