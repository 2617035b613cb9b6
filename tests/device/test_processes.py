"""Two processes under torchrun's environment train as one would."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gptfit.checkpoint.format import load_checkpoint
from gptfit.config.keys import TrainConfig
from gptfit.device.device import Device
from gptfit.device.processes import Processes, find_processes, join
from gptfit.errors import ConfigError, DeviceError
from gptfit.logs.runlog import read_run
from gptfit.model.build import build_model
from gptfit.shape import ModelShape
from gptfit.train.parallel import Passes, Replicated
from gptfit.train.setup import check_processes
from gptfit.train.train import train
from tests.several import free_port
from tests.small_runs import fork_gptfit

MakeConfig = Callable[..., TrainConfig]


def train_with_two(config: TrainConfig) -> list[str]:
    """What torchrun --nproc_per_node=2 does, without its waiting times."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    ranks = [fork_gptfit(config, {**common, "RANK": rank, "LOCAL_RANK": rank}) for rank in ("0", "1")]
    outputs = [process.communicate(timeout=180) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    return [output for output, _ in outputs]


def test_two_processes_write_one_output_and_resume_nanogpts_random_windows(
    small_config: MakeConfig, tmp_path: Path
) -> None:
    """That they take the steps of one is in tests/train/test_several.py; these windows depend on the process by design."""
    two = tmp_path / "two"
    common: dict[str, Any] = {"gradient_accumulation_steps": 4, "sampling": "random", "out_dir": str(two)}
    outputs = train_with_two(small_config(**common, max_iters=3))
    assert outputs[0].count("iter ") == 3
    assert outputs[1] == ""
    assert [step.step for step in read_run(two).steps] == list(range(3))
    train_with_two(small_config(init_from="resume", **common, max_iters=4))
    assert load_checkpoint(two).iter_num == 4


@pytest.mark.slow
def test_two_compiling_processes_take_the_steps_of_one(small_config: MakeConfig, tmp_path: Path) -> None:
    common: dict[str, Any] = {"gradient_accumulation_steps": 4, "max_iters": 4, "arch": "modern"}
    two = tmp_path / "two"
    assert "compiled in" in train_with_two(small_config(out_dir=str(two), compile=True, **common))[0]
    train(small_config(out_dir=str(tmp_path / "alone"), **common))
    one, both = load_checkpoint(tmp_path / "alone"), load_checkpoint(two)
    assert both.best_val_loss == pytest.approx(one.best_val_loss, rel=1e-3)


RIGHT = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("RANK", text) for text in ("abc", "-2", "2", "5", "1e0", "٣")),
        *(("WORLD_SIZE", text) for text in ("", "0", "-3", "two")),
        *(("LOCAL_RANK", text) for text in ("", "-1", "x")),
    ],
)
def test_a_variable_that_torchrun_does_not_set_so_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    for key, value in {**RIGHT, name: text}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(DeviceError, match=name):
        find_processes()


def test_an_empty_rank_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some schedulers set them all, empty."""
    for key in RIGHT:
        monkeypatch.setenv(key, "")
    assert find_processes() == Processes()


@pytest.mark.parametrize(("name", "text"), [("MASTER_ADDR", None), ("MASTER_PORT", "abc"), ("MASTER_PORT", None)])
def test_processes_that_cannot_meet_say_why(monkeypatch: pytest.MonkeyPatch, name: str, text: str | None) -> None:
    for key, value in {**RIGHT, name: text}.items():
        monkeypatch.delenv(key, raising=False) if value is None else monkeypatch.setenv(key, value)
    with pytest.raises(DeviceError, match="the 2 processes cannot meet"):
        join(find_processes(), "gloo", Device(torch.device("cpu"), "cpu", "float32", None))


def test_accumulation_must_divide_among_the_processes(small_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="gradient_accumulation_steps 3 is not divisible by the 2 processes"):
        check_processes(small_config(gradient_accumulation_steps=3), Processes(0, 2, 0))


@pytest.mark.parametrize(
    ("has_nccl", "expected"),
    [(True, {"backend": "nccl", "device_id": torch.device("cuda", 1)}), (False, {"backend": "gloo"})],
)
def test_nccl_is_bound_to_its_card_and_windows_talks_through_gloo(
    monkeypatch: pytest.MonkeyPatch, has_nccl: bool, expected: dict[str, object]
) -> None:
    called: list[dict[str, object]] = []
    signature = inspect.signature(dist.init_process_group)

    def init(*args: object, **keys: object) -> None:
        called.append(dict(signature.bind(*args, **keys).arguments))

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    join(Processes(1, 2, 1), "nccl", Device(torch.device("cuda", 1), "a card", "bfloat16", None))
    assert called == [expected]


def test_gradients_are_views_into_what_is_exchanged_and_stay_there(tmp_path: Path) -> None:
    """Else every process would hold them twice, which plan does not count."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = build_model(ModelShape(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64))
        device = Device(torch.device("cpu"), "cpu", "float32", None)
        parallel = Replicated(model, dict(model.named_parameters()), device, Processes(0, 1, 0))
        ids = torch.arange(32).view(2, 16)
        for _ in range(3):  # the second backward pass sorts the buckets anew
            parallel.begin(Passes(updates=1))
            parallel.forward(ids, ids.clone(), is_last=True).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            parallel.forget_gradients(torch.optim.SGD(model.parameters()))
        storages = {gradient.untyped_storage().data_ptr() for gradient in gradients}
        held = sum({g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in gradients}.values())
        assert len(storages) < len(gradients), "each gradient has memory of its own"
        assert held == pytest.approx(4 * model.shape.n_weights, rel=0.02)
        assert all(p.grad is not None for p in model.parameters()), "forgotten in place"
    finally:
        dist.destroy_process_group()
