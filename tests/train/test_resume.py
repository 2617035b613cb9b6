"""A resumed run is the run that was never interrupted, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptfit.checkpoint.format import BEST, LAST, load_checkpoint, newest_readable
from gptfit.checkpoint.resume import adopt_config
from gptfit.config.keys import TrainConfig
from gptfit.errors import ConfigError, RunError
from gptfit.logs.events import Event, Step
from gptfit.logs.runlog import read_run
from gptfit.train.train import train
from tests.small_runs import messages_in, told

MakeConfig = Callable[..., TrainConfig]


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(Path(folder) / LAST).model


def assert_same_state(left: Path, right: Path) -> None:
    a, b = load_checkpoint(left / LAST), load_checkpoint(right / LAST)
    assert a.iter_num == b.iter_num
    assert a.best_val_loss == b.best_val_loss
    for name, tensor in a.model.items():
        assert torch.equal(tensor, b.model[name]), name
    assert a.optimizer is not None
    assert b.optimizer is not None
    for index, state in a.optimizer["state"].items():
        for key, value in state.items():
            assert torch.equal(value, b.optimizer["state"][index][key]), (index, key)


@pytest.mark.parametrize("sampling", ["epoch", "random"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("first_part", [3, 4])
def test_2n_steps_equal_n_plus_resume_plus_n(
    small_config: MakeConfig, tmp_path: Path, sampling: str, dropout: float, first_part: int
) -> None:
    common: dict[str, Any] = {"sampling": sampling, "dropout": dropout, "lr_decay_iters": 8}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(small_config(out_dir=str(whole), max_iters=8, **common))
    # max_iters may not change the eval at the end of the first part, which draws in random sampling.
    train(small_config(out_dir=str(parts), max_iters=first_part, eval_interval=first_part, **common))
    result = train(small_config(out_dir=str(parts), max_iters=8, init_from="resume", **common))
    assert result.step == 8
    if sampling == "epoch" or first_part == 4:
        assert_same_state(whole, parts)


def test_eight_by_one_and_two_by_four_take_the_same_steps(small_config: MakeConfig, tmp_path: Path) -> None:
    results = {}
    for micro_batch, micro_steps in ((8, 1), (2, 4)):
        out = str(tmp_path / str(micro_batch))
        train(small_config(batch_size=micro_batch, gradient_accumulation_steps=micro_steps, out_dir=out, max_iters=3))
        results[micro_batch] = weights(out)
    for name, tensor in results[8].items():
        torch.testing.assert_close(tensor, results[2][name], rtol=1e-4, atol=1e-5)


def test_a_frozen_key_refuses_with_its_name(small_config: MakeConfig) -> None:
    train(small_config(max_iters=2))
    with pytest.raises(ConfigError, match=r"n_layer is 3 but the checkpoint .* has 2"):
        train(small_config(init_from="resume", n_layer=3))
    with pytest.raises(ConfigError, match=r"vocab_size is 70 but"):
        train(small_config(init_from="resume", vocab_size=70))


def test_a_changed_rate_is_listed_and_used(small_config: MakeConfig) -> None:
    train(small_config(max_iters=2))
    events: list[Event] = []
    train(small_config(init_from="resume", learning_rate=5e-3, log_interval=2), events.append)
    resume = next(event for event in told(events, "resume"))
    assert resume.message.endswith("changed: max_iters: 2 -> 8, learning_rate: 0.01 -> 0.005")
    step = next(event for event in events if isinstance(event, Step))
    assert step.lr == 5e-3


def test_a_larger_batch_on_resume_goes_on_where_the_data_was(small_config: MakeConfig, tmp_path: Path) -> None:
    train(small_config(max_iters=3))
    train(small_config(max_iters=4, gradient_accumulation_steps=6, init_from="resume"))
    saved = load_checkpoint(tmp_path / "out").progress
    assert saved["window"] == 3 * 8 + 24


def test_resume_needs_only_the_folder(small_config: MakeConfig, tmp_path: Path) -> None:
    train(small_config(max_iters=3))
    bare = TrainConfig.unchecked(out_dir=str(tmp_path / "out"), init_from="resume", max_iters=5)
    config = adopt_config(bare, given={"out_dir", "init_from", "max_iters"})
    assert (config.n_layer, config.learning_rate, config.max_iters) == (2, 1e-2, 5)
    assert train(config).step == 5


def test_the_log_of_a_resumed_run_reads_as_one(small_config: MakeConfig, tmp_path: Path) -> None:
    train(small_config(max_iters=3))
    train(small_config(max_iters=6, init_from="resume"))
    log = read_run(tmp_path / "out")
    assert [step.step for step in log.steps] == [0, 1, 2, 3, 4, 5]
    assert log.end is not None
    assert log.end.reason == "max_iters"
    seconds = [step.seconds for step in log.steps]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("resumed", [0, 5, 9])
def test_a_checkpoint_cut_at_any_tenth_is_reported_and_the_previous_used(
    small_config: MakeConfig, tmp_path: Path, resumed: int
) -> None:
    train(small_config(max_iters=5))
    last = tmp_path / "out" / LAST
    whole = last.read_bytes()
    for tenth in (*range(10), resumed):
        last.write_bytes(whole[: len(whole) * tenth // 10])
        with pytest.raises(RunError, match=r"not a (readable )?checkpoint"):
            load_checkpoint(last)
    events: list[Event] = []
    result = train(small_config(init_from="resume"), events.append)
    kinds = [getattr(event, "kind", "") for event in events]
    assert kinds[1:3] == ["damaged", "resume"]
    assert "ckpt-00000004.pt at step 4" in events[2].message
    assert result.step == 8


def test_best_and_last_and_the_one_before_are_kept(small_config: MakeConfig, tmp_path: Path) -> None:
    train(small_config(max_iters=12, lr_decay_iters=12, eval_interval=3, keep_checkpoints=2))
    names = sorted(path.name for path in (tmp_path / "out").glob("*.pt"))
    assert names == [BEST, "ckpt-00000006.pt", "ckpt-00000009.pt", LAST]
    log = read_run(tmp_path / "out")
    best = min(log.evals, key=lambda event: event.val_loss)
    assert load_checkpoint(tmp_path / "out" / BEST).iter_num == best.step
    assert load_checkpoint(tmp_path / "out" / BEST).best_val_loss == best.val_loss


def test_a_copy_too_many_is_removed_when_a_run_is_resumed(small_config: MakeConfig, tmp_path: Path) -> None:
    """A kill right after the last save leaves it; there is no later save to remove it. A person's file stays."""
    out = tmp_path / "out"
    train(small_config(max_iters=6, lr_decay_iters=6, eval_interval=2))
    kept = (out / "ckpt-00000004.pt").read_bytes()
    for name in ("ckpt-00000002.pt", "ckpt-mine.pt", "ckpt-3.pt"):
        (out / name).write_bytes(kept)
    train(small_config(max_iters=6, lr_decay_iters=6, eval_interval=2, init_from="resume"))
    names = {path.name for path in out.glob("ckpt*.pt")}
    assert names == {"ckpt-00000004.pt", "ckpt-3.pt", "ckpt-mine.pt", LAST}


def test_a_copy_of_a_step_that_was_never_reached_is_not_counted(small_config: MakeConfig, tmp_path: Path) -> None:
    """Somebody's file: it takes no kept copy's place, and it is not removed or resumed from."""
    out = tmp_path / "out"
    train(small_config(max_iters=2, lr_decay_iters=6, eval_interval=2))
    stray = out / "ckpt-99999999999999999999.pt"
    stray.write_bytes((out / LAST).read_bytes())
    train(small_config(max_iters=6, lr_decay_iters=6, eval_interval=2, keep_checkpoints=1, init_from="resume"))
    assert {path.name for path in out.glob("ckpt*.pt")} == {LAST, "ckpt-00000004.pt", stray.name}
    (out / LAST).write_bytes(b"damaged")
    found, passed_over = newest_readable(out)
    assert found.path == out / "ckpt-00000004.pt"
    assert "holds step 2" in passed_over[1]


def test_while_ckpt_pt_is_damaged_no_copy_is_too_many(small_config: MakeConfig, tmp_path: Path) -> None:
    """The third best may be the only one that can be read."""
    out = tmp_path / "out"
    train(small_config(max_iters=4, lr_decay_iters=6, eval_interval=1, keep_checkpoints=3))
    for name in (LAST, "ckpt-00000003.pt"):
        (out / name).write_bytes(b"damaged")
    common = {"max_iters": 4, "lr_decay_iters": 6, "eval_interval": 2, "init_from": "resume"}
    events: list[Event] = []
    assert train(small_config(keep_checkpoints=1, **common), events.append).step == 4
    assert any("ckpt-00000002.pt at step 2" in message for message in messages_in(events))


def test_starting_over_moves_the_earlier_run_aside(small_config: MakeConfig, tmp_path: Path) -> None:
    train(small_config(max_iters=2))
    before = (tmp_path / "out" / LAST).read_bytes()
    events: list[Event] = []
    train(small_config(max_iters=3), events.append)
    assert (tmp_path / "out" / "earlier-1" / LAST).read_bytes() == before
    assert any("earlier-1" in message for message in messages_in(events))
    assert [step.step for step in read_run(tmp_path / "out").steps] == [0, 1, 2]
