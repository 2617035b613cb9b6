"""Every rung of the memory ladder, and every pair, trains as none does; running out of memory climbs it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from gptfit.checkpoint.format import load_checkpoint
from gptfit.config.keys import TrainConfig
from gptfit.device.device import Device, find_device
from gptfit.device.processes import Processes
from gptfit.errors import RunError
from gptfit.logs.events import Eval, Event, Message
from gptfit.plan import memory
from gptfit.plan.ladder import RUNGS, Rung
from gptfit.plan.resolve import Place, setting_of
from gptfit.train import climb
from gptfit.train.engine import Engine, build_engine
from gptfit.train.parallel import Alone
from gptfit.train.train import train
from tests.small_runs import start_gptfit

MakeConfig = Callable[..., TrainConfig]
PAIRS = [pair for pair in combinations(RUNGS, 2) if pair[0].key != pair[1].key]


def val_losses(config: TrainConfig) -> list[float]:
    events: list[Event] = []
    train(config, events.append)
    return [event.val_loss for event in events if isinstance(event, Eval)]


GPT2: dict[str, Any] = {"arch": "gpt2"}
MODERN: dict[str, Any] = {"arch": "modern", "optimizer": "muon"}
PLAIN: dict[str, list[float]] = {}  # losses without rungs, trained once
CASES = [(recipe, (rung,)) for recipe in (GPT2, MODERN) for rung in RUNGS] + [(MODERN, pair) for pair in PAIRS]


@pytest.mark.parametrize(
    ("recipe", "rungs"), CASES, ids=[f"{c[0]['arch']} {' '.join(r.words for r in c[1])}" for c in CASES]
)
def test_rungs_alone_and_in_pairs_train_as_none_does(
    small_config: MakeConfig, tmp_path: Path, recipe: dict[str, Any], rungs: tuple[Rung, ...]
) -> None:
    if recipe["arch"] not in PLAIN:
        PLAIN[recipe["arch"]] = val_losses(small_config(out_dir=str(tmp_path / "plain"), max_iters=3, **recipe))
    climbed = val_losses(small_config(max_iters=3, **recipe, **{rung.key: rung.value for rung in rungs}))
    # Chunks add the same numbers in another order; 8-bit state and 16-bit gradients round.
    bound = 1e-5 if all(rung.is_exact for rung in rungs) else 0.01
    assert climbed == pytest.approx(PLAIN[recipe["arch"]], abs=bound)


HOST: dict[str, Any] = {"optimizer_device": "cpu", "embedding_device": "cpu"}


@pytest.mark.parametrize("saved", [{}, {"optimizer_state": "8bit"}, HOST], ids=str)
@pytest.mark.parametrize("resumed", [HOST, {"optimizer_state": "8bit", "checkpoint_activations": "wide"}], ids=str)
def test_a_run_resumes_across_rungs_and_says_what_changed(
    small_config: MakeConfig, tmp_path: Path, saved: dict[str, Any], resumed: dict[str, Any]
) -> None:
    whole = val_losses(small_config(out_dir=str(tmp_path / "whole"), **resumed))
    train(small_config(max_iters=4, **saved))
    events: list[Event] = []
    train(small_config(init_from="resume", **resumed), events.append)
    assert [event.val_loss for event in events if isinstance(event, Eval)][-1] == pytest.approx(whole[-1], abs=0.01)
    told = " ".join(event.message for event in events if isinstance(event, Message) and event.kind == "resume")
    changed = {**dict.fromkeys(saved), **resumed}
    for key in ("optimizer_state",):
        assert (f"{key}:" in told) == (key in changed and saved.get(key) != resumed.get(key))


def test_running_out_of_memory_climbs_rung_by_rung_and_the_step_stays_the_same(
    small_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(small_config(out_dir=str(tmp_path / "whole"), batch_size=8, gradient_accumulation_steps=1))
    monkeypatch.setattr(climb, "BUSY_TOKENS", 4 * 16)  # four rows of these small windows
    original = Engine.forward_micro_step

    def limited(self: Engine, batch: Any, is_last: bool) -> torch.Tensor:
        if self.model.checkpoint_activations is not True or len(batch[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(self, batch, is_last)

    monkeypatch.setattr(Engine, "forward_micro_step", limited)
    events: list[Event] = []
    result = train(small_config(batch_size=8, gradient_accumulation_steps=1, memory="auto"), events.append)
    told = [event.message for event in events if isinstance(event, Message) and event.kind == "oom"]
    assert "checkpoint_activations = 'wide'" in told[0]
    assert "batch_size is now 4" in told[1]
    assert "checkpoint_activations = True" in told[2]
    assert result.micro_batch == 4
    whole, climbed = load_checkpoint(tmp_path / "whole"), load_checkpoint(tmp_path / "out")
    for name, tensor in whole.model.items():
        torch.testing.assert_close(climbed.model[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("recipe", [GPT2, {**MODERN, "value_embeddings": "tables", "bigram": True}], ids=str)
def test_tables_in_host_memory_get_the_gradients_they_get_on_the_device(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, recipe: dict[str, Any]
) -> None:
    monkeypatch.setattr(Alone, "keep_gradients_of", lambda *_: None)  # on a card autograd makes those that are there
    found = []
    for where in ("auto", "cpu"):
        config = small_config(**recipe, vocab_size=65, embedding_device=where, chunked_loss=True)
        torch.manual_seed(1)
        engine = build_engine(config, config.shape(), find_device(config))
        ids = torch.randint(0, 65, (4, 17), generator=torch.Generator().manual_seed(2))
        for _ in range(2):
            loss = engine.forward_micro_step((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), True)
            engine.backward_micro_step(loss, 2)
        found.append({name: p.grad for name, p in engine.model.named_parameters()})
    assert engine.model.tables_on_host
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


def test_a_run_killed_on_the_last_rungs_ends_there_and_on_others_as_one_that_was_not(
    small_config: MakeConfig, tmp_path: Path
) -> None:
    keys = {**HOST, "checkpoint_activations": "wide", "max_iters": 40, "eval_interval": 2, "lr_decay_iters": 40}
    whole = small_config(**keys, out_dir=str(tmp_path / "whole"))
    train(whole)
    killed = start_gptfit(small_config(**keys))
    saved = tmp_path / "out" / "ckpt.pt"
    while killed.poll() is None and not saved.exists():
        time.sleep(0.02)
    killed.kill()
    killed.communicate()
    assert load_checkpoint(tmp_path / "out").iter_num < 40
    shutil.copytree(tmp_path / "out", tmp_path / "other")
    train(small_config(**keys, init_from="resume"))
    across = {**keys, "optimizer_device": "auto", "embedding_device": "auto", "checkpoint_activations": True}
    train(small_config(**across, init_from="resume", out_dir=str(tmp_path / "other")))
    ends = [load_checkpoint(tmp_path / name) for name in ("whole", "out", "other")]
    torch.testing.assert_close(ends[1].model, ends[0].model, rtol=0, atol=0)
    torch.testing.assert_close(
        ends[2].model, ends[0].model, rtol=1e-4, atol=1e-5
    )  # tables add their rows in another order


def test_host_memory_that_is_too_small_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(n_layer=36, n_head=20, n_embd=1280, optimizer_device="cpu", dtype="bfloat16")
    card = Device(torch.device("cuda", 0), "a card", "bfloat16")
    monkeypatch.setattr(Device, "free_memory_bytes", lambda self: 10**11)
    monkeypatch.setattr(Device, "held_bytes", lambda self: 0)
    monkeypatch.setattr(climb, "free_host_bytes", lambda: 4 * 1024**3)
    with pytest.raises(
        RunError, match=r"keeps 5\.8 GiB in main memory, of which 4\.0 GiB are free; use optimizer_state"
    ):
        climb.config_that_fits(config, config.shape(), card)
    monkeypatch.setattr(climb, "free_host_bytes", lambda: 8 * 1024**3)
    assert climb.config_that_fits(config, config.shape(), card) == (config, None)
    # Eight processes of one machine share its memory; of four machines each has two.
    monkeypatch.setattr(climb, "free_host_bytes", lambda: 16 * 1024**3)
    with pytest.raises(RunError, match=r"keeps 8 x 5\.8 GiB = 46\.\d GiB in main memory, of which 16\.0 GiB are free"):
        climb.config_that_fits(config, config.shape(), card, processes=8)
    assert climb.config_that_fits(config, config.shape(), card, processes=8, machines=4) == (config, None)
    divided = config.replace(parallel="fsdp")
    assert climb.config_that_fits(divided, config.shape(), card, processes=8) == (divided, None)


def test_by_prediction_a_run_starts_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(n_layer=12, n_head=4, n_embd=256, batch_size=32, memory="auto", device="cpu", dtype="float32")
    shape, device = config.shape(), find_device(config)
    monkeypatch.setattr(Device, "held_bytes", lambda self: 0)
    needed = memory.predict(setting_of(config, shape, Place("cpu", "float32"))).allocated.value
    monkeypatch.setattr(Device, "free_memory_bytes", lambda self: int(needed / 3))
    fitting, words = climb.config_that_fits(config, shape, device)
    assert words is not None
    assert "by prediction" in words
    assert fitting.tokens_per_iter() == config.tokens_per_iter()
    assert memory.predict(setting_of(fitting, shape, Place("cpu", "float32"))).allocated.value <= needed / 3
    monkeypatch.setattr(Device, "free_memory_bytes", lambda self: 10**6)
    with pytest.raises(RunError, match=r"memory = 'auto': .* missing with every measure"):
        climb.config_that_fits(config, shape, device)
    monkeypatch.setattr(Device, "free_memory_bytes", lambda self: 10**12)
    assert climb.config_that_fits(config, shape, device) == (config, None)


@dataclass(frozen=True)
class OneOfTwo(Processes):
    """The other of them found what is given here."""

    other: tuple[Any, ...] = ()

    def gather(self, value: Any) -> list[Any]:
        return [value, self.other]


def test_the_process_with_the_least_room_decides_for_all(small_config: MakeConfig) -> None:
    config = small_config(memory="auto")
    shape, device = config.shape(), find_device(config)
    theirs = config.replace(batch_size=1)
    found = climb.config_that_fits_all(config, shape, device, OneOfTwo(0, 2, 0, (1.0, theirs, "told", None)))
    assert found == (theirs, "told")
    found = climb.config_that_fits_all(config, shape, device, OneOfTwo(0, 2, 0, (1e15, theirs, "told", None)))
    assert found == (config, None)
    no_room = RunError("1 GiB are missing")
    with pytest.raises(RunError, match="are missing"):
        climb.config_that_fits_all(config, shape, device, OneOfTwo(0, 2, 0, (1.0, theirs, None, no_room)))
