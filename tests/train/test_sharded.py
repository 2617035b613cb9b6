"""parallel='fsdp': a divided model trains as a whole one, saves the same file, and survives what a whole one does."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptfit.checkpoint import part_index
from gptfit.checkpoint.format import load_checkpoint, newest_readable
from gptfit.config.keys import TrainConfig
from gptfit.data.options import PrepareOptions
from gptfit.data.prepare import prepare
from gptfit.errors import RunError
from gptfit.logs.runlog import read_run
from gptfit.plan import link
from gptfit.plan.resolve import Place, setting_of
from gptfit.train.train import train
from tests.several import losses, train_together
from tests.train.test_masked import write_chat
from tests.train.test_several import COMMON, MUON, assert_same_curve, assert_same_weights

MakeConfig = Callable[..., TrainConfig]
AHEAD: dict[str, Any] = {**MUON, "lookahead": 0.5, "average_tail": 0.8}


@pytest.fixture
def make(small_config: MakeConfig, tmp_path: Path) -> MakeConfig:
    return lambda name, **changes: small_config(
        out_dir=str(tmp_path / name), **{**COMMON, "parallel": "fsdp", **changes}
    )


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
    Path(os.environ["SENT"], self._model.shape.arch).write_text(str(sent))
sharded.Sharded._rehearse = counted
"""


def test_plan_knows_the_bytes_of_a_micro_step(
    make: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SENT", str(tmp_path))
    common: dict[str, Any] = {"n_embd": 64, "max_iters": 0, "gradient_accumulation_steps": 2, "eval_iters": 1}
    tables = {**MUON, "value_embeddings": "tables", "bigram": True}
    configs = [make("plain", **common), make("tables", **common, **tables)]
    train_together(2, *configs, before=COUNTED)
    for config in configs:
        setting = setting_of(config, config.shape(65), Place("cpu"), processes=2)
        sent = float((tmp_path / config.arch).read_text())
        assert link.exchanged_bytes(setting) == pytest.approx(sent, rel=0.01)


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
    index = tmp_path / part_index.INDEX
    index.write_bytes(pickle.dumps(print))
    with pytest.raises(ValueError, match=r"builtins.print has no place in it"):
        part_index.read_index(index)


@pytest.mark.slow
@pytest.mark.timeout(1200)
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


TABLES: dict[str, Any] = {"value_embeddings": "tables", "bigram": True, "smear": True, "backout": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "clip": {"grad_clip": 0.05, "bias": True},
    "chunked": {"chunked_loss": True},
    "wide": {"checkpoint_activations": "wide"},
    "blocks": {"checkpoint_activations": True},
    "host": {"optimizer_device": "cpu"},
    "growing": {"gradient_accumulation_steps": 16, "batch_size": 2, "grow_batch_iters": 3},
    "muon": MUON,
    "ahead": AHEAD,
    "tables": {**MUON, **TABLES, "normuon": True, "cautious_decay": True, "n_embd": 40},
    "tables adamw": {"arch": "modern", **TABLES, "checkpoint_activations": "wide"},
    "tied": {**MUON, "tied_head": True, "checkpoint_activations": True, "optimizer_device": "cpu"},
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_ingredient_trains_the_same_divided_copied_and_whole(make: MakeConfig, tmp_path: Path) -> None:
    write_chat(tmp_path / "chat.jsonl")
    source = (str(tmp_path / "chat.jsonl"),)
    prepare(PrepareOptions(source, tmp_path / "chat", tokenizer="bytes", val_fraction=0.2, chat=True))
    variants = {**VARIANTS, "masked": {"dataset": str(tmp_path / "chat")}}
    keys = {name: {"gradient_accumulation_steps": 4, **changes} for name, changes in variants.items()}
    for name, changes in keys.items():
        train(make(f"{name} 1", **changes))
    copied = [make(f"{name} ddp", **{**changes, "parallel": "ddp"}) for name, changes in keys.items()]
    train_together(2, *copied, *(make(f"{name} 2", **changes) for name, changes in keys.items()))
    train_together(4, *(make(f"{name} 4", **changes) for name, changes in keys.items()))
    for name in keys:
        assert_same_curve(*(tmp_path / f"{name} {how}" for how in ("1", "ddp", "2", "4")))
        assert_same_weights(tmp_path / f"{name} 1", tmp_path / f"{name} 4")
        one, four = (read_run(tmp_path / f"{name} {how}").evals for how in ("1", "4"))
        assert [point.val_loss for point in four] == pytest.approx([point.val_loss for point in one], abs=1e-5)


ROUNDED: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "modern": {**MUON, **TABLES, "dtype": "bfloat16"},
    "8bit": {"optimizer_state": "8bit", "n_embd": 128},
    "8bit on the host": {**MUON, "optimizer_state": "8bit", "optimizer_device": "cpu", "n_embd": 128},
    "compiled": {"compile": True},
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_16_bit_blocks_compiled_blocks_and_8_bit_state_learn_as_one_process_does(
    make: MakeConfig, tmp_path: Path
) -> None:
    """Rounding differs, so that curves agree to a hundredth."""
    keys = {name: {"gradient_accumulation_steps": 4, **changes} for name, changes in ROUNDED.items()}
    for name, changes in keys.items():
        train(make(f"{name} 1", **{**changes, "compile": False}))
    pairs = [(name, how) for name in keys for how in ("ddp", "fsdp")]
    train_together(2, *(make(f"{name} {how}", **{**keys[name], "parallel": how}) for name, how in pairs))
    for name, how in pairs:
        assert losses(tmp_path / f"{name} {how}") == pytest.approx(losses(tmp_path / f"{name} 1"), abs=0.02), name
