"""Training on from weights that are there: the first loss is the one they have in nanoGPT, whatever the config named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gptfit.checkpoint import pretrained
from gptfit.checkpoint.format import load_checkpoint
from gptfit.config.keys import TrainConfig
from gptfit.errors import ConfigError
from gptfit.logs.events import Eval, Event
from gptfit.logs.runlog import read_run
from gptfit.measured import MeasuredLoss
from gptfit.plan.finished_run import of_run
from gptfit.train.train import train
from tests.models import ARCHES, load_model, save_checkpoint, tiny_model

MakeConfig = Callable[..., TrainConfig]
NO_LEARNING = {"learning_rate": 0.0, "min_lr": 0.0, "warmup_iters": 0}


def first_eval(config: TrainConfig) -> Eval:
    events: list[Event] = []
    train(config, events.append)
    return next(event for event in events if isinstance(event, Eval))


@pytest.mark.parametrize("arch", ARCHES)
def test_a_run_goes_on_from_another_runs_best_weights(small_config: MakeConfig, tmp_path: Path, arch: str) -> None:
    earlier = train(small_config(out_dir=str(tmp_path / "earlier"), arch=arch))
    config = small_config(init_from=str(tmp_path / "earlier"), n_layer=1, n_embd=64, max_iters=2, warmup_iters=0)
    begun = first_eval(config)
    assert begun.step == 0
    assert begun.val_loss == pytest.approx(earlier.best_val_loss, abs=1e-6)
    saved = load_checkpoint(tmp_path / "out")
    assert (saved.iter_num, saved.arch, saved.shape.n_layer, saved.shape.n_embd) == (2, arch, 2, 32)
    for steps in (4, 6):
        assert train(small_config(init_from="resume", arch=arch, max_iters=steps, lr_decay_iters=8)).step == steps
        log = read_run(tmp_path / "out")
        assert log.config["init_from"] == str(tmp_path / "earlier"), "the second start is no other beginning"
        assert not [fact for fact in of_run(log) if isinstance(fact, MeasuredLoss)]


def test_weights_that_training_only_spoils_are_kept(small_config: MakeConfig, tmp_path: Path) -> None:
    earlier = train(small_config(out_dir=str(tmp_path / "earlier")))
    spoilt = small_config(init_from=str(tmp_path / "earlier"), learning_rate=3.0, min_lr=3.0, warmup_iters=0)
    assert train(spoilt).best_val_loss == pytest.approx(earlier.best_val_loss, abs=1e-6)
    assert load_checkpoint(tmp_path / "out" / "best.pt").iter_num == 0


def test_a_hugging_face_folder_is_a_start(small_config: MakeConfig, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 16, "vocab_size": 65}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**shape, activation_function="gelu", initializer_range=0.2)
    ).eval()
    model.save_pretrained(tmp_path / "hf")
    train(small_config(init_from=str(tmp_path / "hf"), n_layer=6, bias=False, max_iters=1, **NO_LEARNING))
    ours, _ = load_model(tmp_path / "out")
    ids = torch.randint(65, (3, 16))
    with torch.inference_mode():
        torch.testing.assert_close(ours.logits(ids), model(ids).logits, atol=1e-5, rtol=1e-5)


def test_a_shorter_window_keeps_the_first_positions(small_config: MakeConfig, tmp_path: Path) -> None:
    path = save_checkpoint(tiny_model(vocab_size=65), tmp_path / "earlier" / "ckpt.pt")
    before = load_checkpoint(path).model["transformer.wpe.weight"]
    config = small_config(init_from=str(path), block_size=8, max_iters=1, **NO_LEARNING)
    first_eval(config)
    after = load_checkpoint(tmp_path / "out").model["transformer.wpe.weight"]
    assert torch.equal(after, before[:8])


def test_bad_starts_are_one_line(small_config: MakeConfig, tmp_path: Path) -> None:
    save_checkpoint(tiny_model(vocab_size=65), tmp_path / "out" / "ckpt.pt")
    for changes, line in (
        ({"init_from": str(tmp_path / "out")}, "in out_dir itself; use --init_from=resume"),
        ({"init_from": str(tmp_path / "out" / "ckpt.pt")}, "in out_dir itself; use --init_from=resume"),
        ({"init_from": str(tmp_path / "out"), "out_dir": str(tmp_path / "b"), "block_size": 32}, "knows 16 positions"),
        ({"init_from": "gpt2-huge"}, "init_from = 'gpt2-huge' is not known; use scratch, resume, gpt2"),
    ):
        with pytest.raises(ConfigError, match=line):
            train(small_config(**changes))
    assert not (tmp_path / "b").exists()


def test_a_released_models_name_may_be_the_name_of_the_run(
    small_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is made between the two times the weights are looked for."""
    released = save_checkpoint(tiny_model(vocab_size=65), tmp_path / "cache" / "ckpt.pt")
    monkeypatch.setattr(pretrained, "find_stock", lambda name: released)
    monkeypatch.chdir(tmp_path)
    train(small_config(init_from="gpt2", out_dir="gpt2", max_iters=1, **NO_LEARNING))
    before, after = load_checkpoint(released), load_checkpoint(tmp_path / "gpt2")
    assert all(torch.equal(after.model[name], tensor) for name, tensor in before.model.items())
