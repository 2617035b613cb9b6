"""A checkpoint changed in one place and put back into an engine: it takes a step with it, or it is refused in one line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gptfit.checkpoint.format import LAST, Checkpoint, load_checkpoint
from gptfit.checkpoint.resume import check_resume
from gptfit.config.keys import TrainConfig
from gptfit.device.device import find_device
from gptfit.errors import GptfitError
from gptfit.schedule import knobs
from gptfit.train.batches import EpochSampler, RandomSampler, Sampler
from gptfit.train.engine import Engine, build_engine
from gptfit.train.order import EpochOrder
from gptfit.train.progress import Progress, StepStart
from gptfit.train.randomness import rng_state
from gptfit.train.restore import restore_from, resume_position, saved_progress
from tests.checkpoint.test_mutated_checkpoint import ODD_TENSORS
from tests.small_runs import SMALL
from tests.test_mutated_files import ODD_VALUES, changed, either_way, no_hang, places

HUNDREDS = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
TOKENS = 3000
HUGE = torch.zeros(1).expand(10**7, 1000)
TINY: dict[str, Any] = {**SMALL, "n_layer": 1, "n_embd": 8, "vocab_size": 16, "max_iters": 4, "warmup_iters": 0}
MUON = {"optimizer": "muon", "normuon": True, "lookahead": 0.5, "average_tail": 0.9, "sampling": "random"}
CONFIGS = {
    "adamw": TrainConfig(**TINY),
    "muon": TrainConfig(**TINY, **MUON),
}


def engine_of(config: TrainConfig) -> Engine:
    torch.manual_seed(0)
    return build_engine(config, config.shape(), find_device(config))


def sampler_of(config: TrainConfig) -> Sampler:
    if config.sampling == "random":
        return RandomSampler(TOKENS, config.block_size, config.batch_size)
    return EpochSampler(EpochOrder(TOKENS, config.block_size, config.seed), config.windows_until)


def take_step(engine: Engine, sampler: Sampler, step: int) -> None:
    """An update and an evaluation's exchange of weights, as the loop has them."""
    starts = torch.from_numpy(sampler.starts(step, 0, engine.config.batch_size))
    ids = (starts[:, None] + torch.arange(engine.config.block_size)) % 16
    engine.begin_step(knobs(engine.config, step))
    loss = engine.forward_micro_step((ids, ids), is_last=True)
    engine.backward_micro_step(loss, 1)
    engine.ready_optimizer()
    engine.update(loss.detach(), 1, knobs(engine.config, step))
    with engine.tail.in_place():
        engine.mean_loss([(ids, ids)])


def checkpoint_of(engine: Engine, progress: Progress, sampler: Sampler) -> Checkpoint:
    start = StepStart(rng_state(engine.device), sampler.state())
    shape = engine.model.shape
    keys = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")
    return Checkpoint(
        model=engine.saved_weights(),
        optimizer=engine.saved_optimizer(),
        model_args={key: getattr(shape, key) for key in keys},
        iter_num=progress.step,
        best_val_loss=progress.best_val_loss,
        config=engine.config.as_dict(),
        progress={**saved_progress(progress, start, engine, sampler), "paces": [1.0], "start": "here"},
        average=engine.saved_average(),
        averaged=engine.tail.count,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a checkpoint of each kind holds after two updates, as torch.load gives it."""
    path, found = tmp_path_factory.mktemp("saved") / LAST, {}
    for name, config in CONFIGS.items():
        engine, sampler = engine_of(config), sampler_of(config)
        for step in range(2):
            take_step(engine, sampler, step)
        torch.save(checkpoint_of(engine, Progress(step=2), sampler).as_saved(), path)
        found[name] = torch.load(path, weights_only=True)
    return found


def resume(path: Path, config: TrainConfig) -> None:
    """What a run does with a checkpoint from its beginning to the next save."""
    checkpoint = load_checkpoint(path)
    engine, sampler = engine_of(config), sampler_of(config)
    check_resume(checkpoint, config, config.shape())
    progress = restore_from(checkpoint, engine)
    resume_position(checkpoint, engine, sampler)
    take_step(engine, sampler, progress.step)
    progress.record_eval(1.0, 1.0)
    torch.save(checkpoint_of(engine, progress, sampler).as_saved(), path)


def other_tensor(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    """The same numbers in another format or form."""
    how = draw(st.sampled_from(["format", "part", "flat", "one more", "turned", "empty", "nan"]))
    if how == "format":
        formats = (
            "float8_e4m3fn",
            "float8_e5m2",
            "float16",
            "bfloat16",
            "float64",
            "int64",
            "uint8",
            "bool",
            "complex64",
        )
        return tensor.to(getattr(torch, draw(st.sampled_from(formats))))
    if how == "nan":
        return torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor
    changes: dict[str, Callable[[], Tensor]] = {
        "part": lambda: tensor.flatten()[: tensor.numel() // 2].clone(),
        "flat": lambda: tensor.flatten(),
        "one more": lambda: tensor[None],
        "turned": lambda: tensor.T if tensor.dim() == 2 else tensor,
        "empty": lambda: tensor.new_zeros(0),
    }
    return changes[how]()


@st.composite
def mutated(draw: st.DrawFn, whole: dict[str, Any]) -> dict[str, Any]:
    """One place replaced, removed, renamed or, where it is a tensor, in another form."""
    area = draw(st.sampled_from(["optimizer", "gptfit", *whole]))  # these two most: the rest is for opening it too
    place = draw(st.sampled_from([place for place in places(whole) if place[:1] == (area,)]))
    how = draw(st.sampled_from(["replace", "remove", "rename", "other form"]))
    if how != "other form":
        names = ("lm_head.weight", "step", "row_squares", 0, 99)
        return changed(whole, place, draw(st.sampled_from((*ODD_VALUES, *ODD_TENSORS, *names))), how)
    inner: Any = whole
    for key in place:
        inner = inner[key]
    return changed(whole, place, other_tensor(draw, inner) if isinstance(inner, Tensor) else None, "replace")


@pytest.mark.timeout(1200)  # ten seconds on an idle core
@pytest.mark.parametrize("name", CONFIGS)
@HUNDREDS
@given(data=st.data())
def test_a_changed_state_takes_a_step_or_is_refused(
    saved: dict[str, Any], tmp_path: Path, name: str, data: st.DataObject
) -> None:
    torch.save(data.draw(mutated(saved[name])), tmp_path / LAST)
    either_way(lambda: resume(tmp_path / LAST, CONFIGS[name]))


def lacking(whole: dict[str, Any], *place: Any) -> dict[str, Any]:
    return changed(whole, place, None, "remove")


def muon_matrix(whole: dict[str, Any]) -> int:
    return next(number for number, entry in whole["optimizer"]["state"].items() if "row_squares" in entry)


def with_tied_average(whole: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(whole)
    found["gptfit"]["average"]["lm_head.weight"] = found["model"]["lm_head.weight"].clone()
    return found


def with_narrow_step(whole: dict[str, Any]) -> dict[str, Any]:
    step = torch.tensor(2.0).to(torch.float8_e4m3fn)
    return changed(whole, ("optimizer", "state", 0, "step"), step, "replace")


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("adamw", lambda whole: lacking(whole, "optimizer", "state"), "state"),
        ("adamw", with_narrow_step, "step"),
        ("muon", lambda whole: lacking(whole, "optimizer", "state", muon_matrix(whole), "row_squares"), "row_squares"),
        ("muon", with_tied_average, "lm_head.weight"),
        ("muon", lambda whole: changed(whole, ("gptfit", "progress", "paces"), ["x"], "replace"), "paces"),
        ("muon", lambda whole: changed(whole, ("gptfit", "progress", "paces"), [0.0], "replace"), "paces"),
        (
            "adamw",
            lambda whole: changed(whole, ("gptfit", "progress", "last_val_loss"), HUGE, "replace"),
            "last_val_loss",
        ),
    ],
    ids=[
        "no state",
        "a step in eight bits",
        "no row squares",
        "a tied average",
        "words for paces",
        "no pace",
        "a loss of forty gigabytes by its word",
    ],
)
def test_a_state_that_lacks_something_is_refused_by_name(
    saved: dict[str, Any], tmp_path: Path, name: str, change: Callable[[Any], Any], problem: str
) -> None:
    torch.save(change(saved[name]), tmp_path / LAST)
    with no_hang(), pytest.raises(GptfitError, match=problem):
        resume(tmp_path / LAST, CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_state_that_nobody_changed_takes_a_step(saved: dict[str, Any], tmp_path: Path, name: str) -> None:
    torch.save(saved[name], tmp_path / LAST)
    resume(tmp_path / LAST, CONFIGS[name])
    assert load_checkpoint(tmp_path / LAST).iter_num == 2


@pytest.mark.parametrize("way", ["float32", "8bit"])
def test_a_resumed_run_may_begin_to_even_its_rows(tmp_path: Path, way: str) -> None:
    """normuon may change on resume; the squares of rows then begin at zero, as in a new run."""
    before = TrainConfig(**TINY, optimizer="muon")
    engine, sampler = engine_of(before), sampler_of(before)
    take_step(engine, sampler, 0)
    torch.save(checkpoint_of(engine, Progress(step=1), sampler).as_saved(), tmp_path / LAST)
    resume(tmp_path / LAST, before.replace(normuon=True, optimizer_state=way))
    state = load_checkpoint(tmp_path / LAST).optimizer
    assert state is not None
    assert any(entry["row_squares"].any() for entry in state["state"].values() if "row_squares" in entry)


def test_windows_that_the_data_has_no_more_are_drawn_anew() -> None:
    sampler = RandomSampler(100, 10, 2)
    sampler.restore([5, 89, 90, 2**50])
    assert sampler.state() == [5, 89]
    assert sampler.starts(0, 0, 4).max() < 90


def test_an_average_in_another_number_format_goes_on_in_that_of_the_weights(
    saved: dict[str, Any], tmp_path: Path
) -> None:
    place = ("gptfit", "average", "transformer.wte.weight")
    narrow = saved["muon"]["gptfit"]["average"]["transformer.wte.weight"].to(torch.float16)
    torch.save(changed(saved["muon"], place, narrow, "replace"), tmp_path / LAST)
    resume(tmp_path / LAST, CONFIGS["muon"])
    assert load_checkpoint(tmp_path / LAST).average["transformer.wte.weight"].dtype == torch.float32
