"""Checkpoints go both ways between nanoGPT and gptfit, and cannot run code."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptfit.checkpoint.format import BEST, LAST, best_of, load_checkpoint
from gptfit.config.keys import TrainConfig
from gptfit.device.device import find_device
from gptfit.errors import RunError
from gptfit.plan.memory import state_bytes
from gptfit.plan.setting import Setting
from gptfit.train.engine import build_engine
from gptfit.train.train import train
from tests.models import load_model

MakeConfig = Callable[..., TrainConfig]
NANOGPT_KEYS = {"model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"}
# The arguments of nanoGPT's GPTConfig, which its sample.py fills with **model_args.
NANOGPT_MODEL_ARGS = {"n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout"}


def as_nanogpt_saves_it(path: Path, prefix: str) -> None:
    """Only nanoGPT's keys, the best loss as a tensor, and the prefix a wrapped model gets."""
    saved = torch.load(path, weights_only=True)
    del saved["gptfit"]
    saved["best_val_loss"] = torch.tensor(saved["best_val_loss"])
    saved["model"] = {prefix + name: tensor for name, tensor in saved["model"].items()}
    saved["config"] = {key: saved["config"][key] for key in ("dataset", "batch_size", "n_layer", "learning_rate")}
    torch.save(saved, path)


def test_the_file_has_what_nanogpts_sample_reads(small_config: MakeConfig, tmp_path: Path) -> None:
    train(small_config())
    saved = torch.load(tmp_path / "out" / LAST, weights_only=True)
    assert set(saved) == NANOGPT_KEYS | {"gptfit"}
    assert set(saved["model_args"]) == NANOGPT_MODEL_ARGS
    assert "lm_head.weight" in saved["model"]
    assert torch.equal(saved["model"]["lm_head.weight"], saved["model"]["transformer.wte.weight"])


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod."])
def test_a_nanogpt_checkpoint_loads_and_resumes(small_config: MakeConfig, tmp_path: Path, prefix: str) -> None:
    train(small_config(max_iters=4))
    before, _ = load_model(tmp_path / "out")
    as_nanogpt_saves_it(tmp_path / "out" / LAST, prefix)
    after, checkpoint = load_model(tmp_path / "out")
    ids = torch.randint(65, (1, 16))
    assert torch.equal(before.logits(ids), after.logits(ids))
    assert checkpoint.iter_num == 4
    assert train(small_config(init_from="resume")).step == 8


def test_a_checkpoint_with_code_in_it_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "hacked"),)

    torch.save({"model": Evil()}, tmp_path / LAST)
    with pytest.raises(RunError, match="not a readable checkpoint"):
        load_checkpoint(tmp_path)
    assert not (tmp_path / "hacked").exists()


def test_a_checkpoint_of_another_model_names_the_tensor(small_config: MakeConfig, tmp_path: Path) -> None:
    train(small_config(max_iters=4))
    saved = torch.load(tmp_path / "out" / LAST, weights_only=True)
    del saved["model"]["transformer.h.1.mlp.c_fc.weight"]
    torch.save(saved, tmp_path / "out" / LAST)
    with pytest.raises(RunError, match=r"transformer.h.1.mlp.c_fc.weight is missing, the model needs \(128, 32\)"):
        load_model(tmp_path / "out")


def test_the_optimizer_state_is_as_large_as_the_plan_says(small_config: MakeConfig, tmp_path: Path) -> None:
    train(small_config(max_iters=2))
    checkpoint = load_checkpoint(tmp_path / "out")
    assert checkpoint.optimizer is not None
    states = checkpoint.optimizer["state"].values()
    found = sum(t.nbytes for state in states for name, t in state.items() if name != "step")
    assert found == state_bytes(Setting(checkpoint.shape, 1))


def test_nanogpts_decay_groups(small_config: MakeConfig) -> None:
    config = small_config(bias=True)
    shape = config.shape(65)
    engine = build_engine(config, shape, find_device(config))
    decayed, others = engine.optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert sum(p.numel() for p in decayed["params"]) == sum(weight.size for weight in shape.weights() if weight.decays)
    assert sum(p.numel() for p in others["params"]) == sum(
        weight.size for weight in shape.weights() if not weight.decays
    )


def test_a_best_model_that_the_disk_does_not_show_is_not_replaced_by_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / BEST).write_bytes(b"")
    assert best_of(tmp_path) == tmp_path / BEST
    real = os.stat

    def stat(path: Any, *args: Any, **more: Any) -> os.stat_result:
        if str(path).endswith(BEST):
            raise OSError(errno.EIO, "Input/output error")
        return real(path, *args, **more)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(RunError, match="cannot be read"):
        best_of(tmp_path)
