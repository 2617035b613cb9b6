"""What a run tells: run.jsonl, the screen, trackers that may fail."""

from __future__ import annotations

import math
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptfit.config.keys import TrainConfig
from gptfit.errors import ConfigError
from gptfit.logs.events import DataSaid, Eval, Event, Step
from gptfit.logs.runlog import read_run
from gptfit.train.train import train
from gptfit.verbs.train_view import LiveView, event_lines, live_figures, summary_lines
from tests.small_runs import told

MakeConfig = Callable[..., TrainConfig]


def test_the_log_says_what_the_run_was_and_how_it_went(small_config: MakeConfig, tmp_path: Path) -> None:
    result = train(small_config())
    log = read_run(tmp_path / "out")
    assert log.header.parameters == log.header.shape.n_embd * 65 + 2 * (12 * 32 * 32 + 2 * 32) + 32
    assert log.header.tokens_per_step == 4 * 16 * 2
    assert log.header.device.kind == "cpu"
    assert log.header.device.peak_basis == "measured float32 matrix product"
    assert [step.tokens for step in log.steps] == [128 * (i + 1) for i in range(8)]
    assert [event.step for event in log.evals] == [0, 4, 8]
    assert all(event.eval_tokens == 2 * (4 * 2) * 16 for event in log.evals)
    assert log.evals[-1].val_loss < log.evals[0].val_loss
    assert log.end is not None
    assert log.end.best_val_loss == result.best_val_loss


def test_fixed_eval_windows_give_the_same_loss_for_the_same_weights(small_config: MakeConfig) -> None:
    trained = train(small_config())
    again = train(small_config(init_from="resume", eval_only=True, batch_size=8, eval_iters=1))
    assert again.val_loss == pytest.approx(trained.val_loss, rel=1e-6)


def test_lines_are_nanogpts(small_config: MakeConfig) -> None:
    lines: list[str] = []
    train(small_config(), lambda event: lines.extend(event_lines(event)))
    text = "\n".join(lines)
    assert re.search(r"^iter 7: loss \d\.\d{4}, time \d+\.\d\dms, mfu \d+\.\d\d%$", text, re.M)
    assert re.search(r"^step 8: train loss \d\.\d{4}, val loss \d\.\d{4}", text, re.M)
    assert "tokens per iteration will be: 128" in text


def test_losses_in_a_vocabulary_of_ones_own_are_said_in_bits_per_byte() -> None:
    data = DataSaid(tokenizer="tokenizer.json", bytes_per_token=4.0)
    found = Eval(step=8, train_loss=2.0, val_loss=4 * math.log(2), eval_tokens=512)
    assert event_lines(found, data)[0].endswith("val loss 2.7726 (1.0000 bits per byte, 512 val tokens)")
    assert "bits" not in event_lines(found, DataSaid(tokenizer="gpt2", bytes_per_token=4.0))[0]


def test_the_summary_names_the_next_command(small_config: MakeConfig, tmp_path: Path) -> None:
    config = small_config()
    result = train(config)
    lines = summary_lines(config, result)
    assert lines[0].startswith("done: step 8 after")
    assert lines[-1] == f"next: gptfit sample {tmp_path / 'out'}"
    own = DataSaid(tokenizer="tokenizer.json", bytes_per_token=1 / math.log(2))
    best = f"{result.best_val_loss:.4f}"
    assert f"best validation {best} bits per byte (val loss {best}) in {tmp_path / 'out' / 'best.pt'}" in summary_lines(
        config, result, own
    )


def test_the_summary_of_a_run_stopped_early_names_no_file_that_is_not_there(
    small_config: MakeConfig, tmp_path: Path
) -> None:
    """And the limit that stopped it is raised, as the hours of the whole run count."""
    config = small_config(max_hours=1e-6)
    lines = summary_lines(config, train(config))
    assert any(line.startswith("best val loss") for line in lines)
    assert not any("best.pt" in line for line in lines)
    assert f"--init_from=resume --out_dir={tmp_path / 'out'} --max_hours=2e-06" in lines[-1]


def test_the_live_line_shows_loss_speed_memory_and_time_left(small_config: MakeConfig) -> None:
    events: list[Event] = []
    config = small_config()
    with LiveView(config) as view:

        def show(event: Event) -> None:
            events.append(event)
            view.report(event)

        train(config, show)
    step = next(event for event in events if isinstance(event, Step))
    figures = live_figures(step, 1000)
    for part in ("loss ", "tok/s", "mfu ", "GiB", "left ", "epoch "):
        assert part in figures


def test_tensorboard_gets_the_losses(small_config: MakeConfig, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(small_config(track="tensorboard"))
    assert list((tmp_path / "out" / "tensorboard").glob("events.*"))


def test_wandb_gets_nanogpts_names(small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with wandb's three calls; the real one starts a service and takes ten seconds."""
    calls: list[Any] = []
    fake = types.SimpleNamespace(
        init=lambda **options: calls.append(("init", options["project"], options["name"])),
        log=lambda values, step: calls.append(("log", step, sorted(values))),
        finish=lambda: calls.append(("finish",)),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(small_config(wandb_log=True, wandb_project="p", wandb_run_name="r"))
    assert calls[0] == ("init", "p", "r")
    assert ("log", 0, ["iter", "train/loss", "val/loss"]) in calls
    assert calls[-1] == ("finish",)


def test_wandbs_own_environment_is_not_overridden(small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb gives an argument the last word, so none may be given where its variable speaks; and the run says so."""
    given: list[dict[str, Any]] = []
    fake = types.SimpleNamespace(
        init=lambda **options: given.append(options), log=lambda *_, **__: None, finish=lambda: None
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name, value in {"PROJECT": "theirs", "NAME": "a", "DIR": "/tmp/w", "MODE": "offline", "RUN_ID": "7"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    events: list[Event] = []
    train(small_config(wandb_log=True, wandb_project="ours", eval_only=True), events.append)
    assert set(given[0]) == {"config"}
    assert [e.message for e in told(events, "sink")] == [
        "wandb: project 'theirs' from WANDB_PROJECT, not wandb_project = 'ours'"
    ]


def test_without_wandbs_environment_the_config_says_it(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[dict[str, Any]] = []
    fake = types.SimpleNamespace(
        init=lambda **options: given.append(options), log=lambda *_, **__: None, finish=lambda: None
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("PROJECT", "NAME", "DIR"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    train(small_config(track="wandb", eval_only=True))
    options = {key: value for key, value in given[0].items() if key != "config"}
    assert options == {"project": "owt", "name": "gpt2", "dir": str(tmp_path / "out")}


def test_a_tracker_that_fails_does_not_stop_the_run(small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network\nsecond line")

    fake = types.SimpleNamespace(init=lambda **_: None, log=fail, finish=fail)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    events: list[Event] = []
    result = train(small_config(track="wandb"), events.append)
    assert result.step == 8
    assert [e.message for e in told(events, "sink")] == ["wandb failed and is off: no network"]


@pytest.mark.parametrize(("keys", "named"), [({"track": "trackio"}, "track"), ({"wandb_log": True}, "wandb_log")])
def test_a_tracker_that_is_not_installed_is_refused_at_the_start(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], named: str, tmp_path: Path
) -> None:
    for module in ("trackio", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match="which is not installed; pip install 'gptfit") as error:
        train(small_config(**keys))
    assert error.value.key == named
    assert not (tmp_path / "out").exists(), "nothing is begun"


def test_a_save_is_said_once_per_evaluation(small_config: MakeConfig) -> None:
    lines: list[str] = []
    train(small_config(), lambda event: lines.extend(event_lines(event)))
    saves = [line for line in lines if line.startswith("saving checkpoint")]
    evals = [line for line in lines if line.startswith("step ") and not line.startswith("step 0:")]
    assert len(saves) == len(evals) > 0


def test_a_smoke_run_shorter_than_its_warm_up_runs_as_in_nanogpt(small_config: MakeConfig) -> None:
    events: list[Event] = []
    config = small_config(max_iters=3, warmup_iters=100, lr_decay_iters=100, learning_rate=1e-3, min_lr=1e-4)
    assert train(config, events.append).step == 3
    (warning,) = told(events, "warning")
    assert (
        "warmup_iters 100 is longer than max_iters 3: the rate rises to 0.03 of learning_rate only" in warning.message
    )
    # nanoGPT's get_lr: learning_rate * (it + 1) / (warmup_iters + 1)
    rates = [event.lr for event in events if isinstance(event, Step)]
    assert rates == pytest.approx([1e-3 * (step + 1) / 101 for step in range(3)])
