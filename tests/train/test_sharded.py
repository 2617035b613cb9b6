"""parallel='fsdp': a divided model trains as a whole one, saves the same file, and survives what a whole one does."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptfit.checkpoint import divided
from gptfit.checkpoint.format import load_checkpoint, newest_readable
from gptfit.config.keys import TrainConfig
from gptfit.errors import RunError
from gptfit.logs.runlog import read_run
from gptfit.plan import link
from gptfit.plan.resolve import Place, setting_of
from gptfit.train.train import train
from tests.several import losses, train_together
from tests.train.test_several import COMMON, RUN_OUT, assert_same_curve, assert_same_weights

MakeConfig = Callable[..., TrainConfig]
MUON: dict[str, Any] = {"optimizer": "muon", "arch": "modern"}
AHEAD: dict[str, Any] = {**MUON, "lookahead": 0.5, "average_tail": 0.8}


@pytest.fixture
def make(small_config: MakeConfig, tmp_path: Path) -> MakeConfig:
    return lambda name, **changes: small_config(
        out_dir=str(tmp_path / name), **{**COMMON, "parallel": "fsdp", **changes}
    )


def test_two_processes_with_half_the_model_each_train_as_one(make: MakeConfig, tmp_path: Path) -> None:
    train(make("1"))
    train(make("muon-1", **MUON))
    train_together(2, make("2"), make("muon-2", **MUON))
    assert_same_curve(tmp_path / "1", tmp_path / "2")
    assert_same_curve(tmp_path / "muon-1", tmp_path / "muon-2")
    assert_same_weights(tmp_path / "1", tmp_path / "2")
    assert_same_weights(tmp_path / "muon-1", tmp_path / "muon-2")


# What a micro-step with its sums sends, as a ring does it, of every process.
COUNTED = """
from pathlib import Path
from gptfit.train import sharded
rehearse = sharded.Sharded._rehearse
def counted(self):
    rehearse(self)
    own = [*self._exchange.in_forward, *self._exchange.in_backward]
    n = self._processes.count
    sent = sum(max(one.n_in, one.n_out) * one.dtype.itemsize * (n - 1) / n for one in own)
    Path(os.environ["SENT"]).write_text(str(sent))
sharded.Sharded._rehearse = counted
"""


def test_plan_knows_the_bytes_of_a_micro_step(
    make: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SENT", str(tmp_path / "sent"))
    for changes in ({}, {**MUON, "value_embeddings": "tables", "bigram": True}):
        config = make("counted", n_embd=64, max_iters=0, gradient_accumulation_steps=2, eval_iters=1, **changes)
        train_together(2, config, before=COUNTED)
        setting = setting_of(config, config.shape(65), Place("cpu"), processes=2)
        assert link.exchanged_bytes(setting) == pytest.approx(float((tmp_path / "sent").read_text()), rel=0.01)


# Nobody gathers a checkpoint: its tensors are in a folder that all processes wrote.
IN_PARTS = "from gptfit.checkpoint import divided; divided.WHOLE_UP_TO = 0"


def assert_damage_is_noticed(folder: Path, copy: Path) -> None:
    shutil.copytree(folder, copy)
    part = copy / "parts-00000002-1" / "__1_0.distcp"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    with pytest.raises(RunError, match=r"__1_0.distcp is damaged"):
        load_checkpoint(copy)
    checkpoint, passed_over = newest_readable(copy)
    assert checkpoint.path == copy / "best.pt"
    assert len(passed_over) == 1
    part.unlink()
    with pytest.raises(RunError, match=r"__1_0.distcp is missing"):
        load_checkpoint(copy)


def test_an_index_that_names_a_function_to_call_is_refused(tmp_path: Path) -> None:
    index = tmp_path / divided.INDEX
    index.write_bytes(pickle.dumps(print))
    with pytest.raises(ValueError, match=r"builtins.print has no place in it"):
        divided.read_index(index)


@pytest.mark.slow
def test_a_checkpoint_in_parts_resumes_on_any_number_and_is_read_as_any_other(make: MakeConfig, tmp_path: Path) -> None:
    train(make("whole", **AHEAD))
    halves = {name: make(name, **AHEAD, max_iters=2) for name in ("to-1", "to-4")}
    train_together(2, *halves.values(), before=IN_PARTS)
    for name in halves:
        folders = [path.name for path in (tmp_path / name).glob("parts-*")]
        assert sorted(folders) == ["parts-00000002-1", "parts-00000002-2"]  # ckpt.pt and best.pt
        assert (tmp_path / name / "ckpt.pt").stat().st_size < 100_000
    assert_damage_is_noticed(tmp_path / "to-1", tmp_path / "copy")
    train(make("to-1", **AHEAD, init_from="resume"))
    train_together(4, make("to-4", **AHEAD, init_from="resume"))
    assert_same_curve(tmp_path / "whole", tmp_path / "to-1", tmp_path / "to-4")
    assert_same_weights(tmp_path / "whole", tmp_path / "to-4")


# Backward asks for too much where it would gather a block's weights.
RUN_OUT_IN_GATHER = (
    RUN_OUT
    + """
from types import SimpleNamespace
from gptfit.train.sharded import _AllGather
allocate = _AllGather.allocate
def ask_in_backward(engine):
    _AllGather.allocate = ask
    return SimpleNamespace(remove=lambda: setattr(_AllGather, "allocate", allocate))
"""
)


def test_memory_that_runs_out_in_one_of_two_processes_is_survived_by_both(make: MakeConfig, tmp_path: Path) -> None:
    """A rehearsal, 2 micro-steps to meet, 6 per update: the 9th is the first of an update, the 14th its last."""
    cases = ("forward_micro_step-9", "backward_micro_step-10", "backward_micro_step-14", "_add_losses-3")
    train(make("whole"))
    train_together(2, *(make(name, chunked_loss=False, log_interval=1) for name in cases), before=RUN_OUT_IN_GATHER)
    for name in cases:
        told = [message.message for message in read_run(tmp_path / name).messages if message.kind == "oom"]
        assert told == ["out of memory: from here on gradients are summed in every micro-step"]
    assert_same_curve(tmp_path / "whole", *(tmp_path / name for name in cases))


TABLES: dict[str, Any] = {"value_embeddings": "tables", "bigram": True, "smear": True, "backout": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "clip": {"grad_clip": 0.05, "bias": True},
    "chunked": {"chunked_loss": True},
    "wide": {"checkpoint_activations": "wide"},
    "blocks": {"checkpoint_activations": True},
    "host": {"optimizer_device": "cpu"},
    "muon": MUON,
    "ahead": AHEAD,
    "tables": {**MUON, **TABLES, "normuon": True, "cautious_decay": True, "n_embd": 40},
    "tied": {**MUON, "tied_head": True, "checkpoint_activations": True, "optimizer_device": "cpu"},
}


@pytest.mark.slow
def test_every_ingredient_trains_the_same_divided_copied_and_whole(make: MakeConfig, tmp_path: Path) -> None:
    for name, changes in VARIANTS.items():
        train(make(f"{name}-1", **changes))
    train_together(2, *(make(f"{name}-ddp", **{**changes, "parallel": "ddp"}) for name, changes in VARIANTS.items()))
    for count in (2, 4):
        train_together(count, *(make(f"{name}-{count}", **changes) for name, changes in VARIANTS.items()))
    for name in VARIANTS:
        assert_same_curve(*(tmp_path / f"{name}-{how}" for how in ("1", "ddp", "2", "4")))
        assert_same_weights(tmp_path / f"{name}-1", tmp_path / f"{name}-4")
        one, four = (read_run(tmp_path / f"{name}-{count}").evals for count in (1, 4))
        assert [point.val_loss for point in four] == pytest.approx([point.val_loss for point in one], abs=1e-5)


@pytest.mark.slow
def test_16_bit_blocks_compiled_blocks_and_8_bit_state_learn_as_ddp_does(make: MakeConfig, tmp_path: Path) -> None:
    """Rounding differs, so that curves agree to a hundredth."""
    variants: dict[str, dict[str, Any]] = {
        "bf16": {"dtype": "bfloat16"},
        "modern": {**MUON, **TABLES, "dtype": "bfloat16"},
        "8bit": {"optimizer_state": "8bit", "n_embd": 128},
        "compiled": {"compile": True},
    }
    for how in ("ddp", "fsdp"):
        train_together(2, *(make(f"{name}-{how}", **{**v, "parallel": how}) for name, v in variants.items()))
    for name in variants:
        assert losses(tmp_path / f"{name}-fsdp") == pytest.approx(losses(tmp_path / f"{name}-ddp"), abs=0.02), name
