"""The compiled loop trains like the eager one. Compiling takes a minute, so this is a slow test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gptfit.config import TrainConfig
from gptfit.run import compiler
from gptfit.run.device import find_device
from gptfit.run.engine import Engine, build_engine
from gptfit.run.train import train

MakeConfig = Callable[..., TrainConfig]
# Both from inside torch's own compiler.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Torch gives up on a function after a few versions of it, whoever compiled them."""
    torch.compiler.reset()
    yield
    torch.compiler.set_stance("default")
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"chunked_loss": False}, {"chunked_loss": True}, {"checkpoint_activations": True}, {"arch": "modern"}]
)
def test_compiled_losses_are_the_eager_ones(small_config: MakeConfig, tmp_path: Any, changes: dict[str, Any]) -> None:
    losses = {}
    for compiled in (False, True):
        events: list[dict[str, Any]] = []
        out = str(tmp_path / f"out-{compiled}")
        train(small_config(compile=compiled, out_dir=out, max_iters=4, **changes), events.append)
        losses[compiled] = [event["loss"] for event in events if event["event"] == "step"]
        assert any(event.get("kind") == "compile" for event in events) == compiled
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "versions"),
    [
        ({}, 1),
        ({"arch": "modern"}, 1),
        ({"arch": "modern", "dtype": "bfloat16", "chunked_loss": True}, 1),
        ({"dropout": 0.1}, 2),  # evaluation is without
    ],
)
def test_on_a_cpu_neither_depth_nor_evaluation_compiles_more(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], versions: int
) -> None:
    compiled: list[int] = []
    ran: list[int] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        version = len(compiled)
        compiled.append(version)
        return lambda *tensors: ran.append(version) or graph.forward(*tensors)

    real = torch.compile
    monkeypatch.setattr(compiler.torch, "compile", lambda model, **keys: real(model, backend=counting, **keys))
    config = small_config(compile=True, n_layer=4, **changes)
    engine = build_engine(config, config.shape(), find_device(config))
    compiled.clear()
    ids = torch.zeros(4, config.block_size, dtype=torch.int64)
    assert engine.compile_now(ids, with_backward=True) is None
    assert len(compiled) == versions
    engine.mean_loss([(ids[:3], ids[:3])])  # the last rows of the data
    assert len(compiled) == versions + 1
    ran.clear()
    engine.forward_micro_step((ids, ids), is_last=True)
    assert ran == [0] * 4, "training goes on with the code made for its batch"


def test_without_a_compiler_training_is_eager_and_says_why(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    events: list[dict[str, Any]] = []
    assert train(small_config(compile=True), events.append).step == 8
    messages = [event.get("message", "") for event in events]
    assert "not compiled: there is no C++ compiler; install g++; training eagerly" in messages


def test_a_model_the_compiler_cannot_do_is_trained_eagerly(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe passes; the model's own graph is refused by a backend, as Triton refuses some cards."""

    def picky(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        if len(graph.graph.nodes) > 10:
            raise RuntimeError("out of resource: shared memory\nand a page of details")
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(compiler.torch, "compile", lambda model, **keys: real(model, backend=picky, **keys))
    events: list[dict[str, Any]] = []
    assert train(small_config(compile=True), events.append).step == 8
    assert any("shared memory" in event.get("message", "") for event in events)
    assert any("training eagerly" in event.get("message", "") for event in events)


@pytest.mark.parametrize(
    ("failing", "warm_ups"), [(3, [True, False, False, False, True]), (0, [True, True, False, False, False])]
)
def test_after_running_out_of_memory_the_smaller_size_compiles_once_and_outside_the_steps(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, failing: int, warm_ups: list[bool]
) -> None:
    original, attempts = Engine.forward_micro_step, []

    def failing_once(self: Engine, batch: Any, is_last: bool) -> torch.Tensor:
        is_warm_up = not bool(batch[0].any())
        attempts.append(is_warm_up)
        if len(attempts) == failing + 1:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:132] DefaultCPUAllocator: can't allocate memory")
        return original(self, batch, is_last)

    real = torch.compile
    monkeypatch.setattr(compiler.torch, "compile", lambda model, **keys: real(model, backend="eager", **keys))
    monkeypatch.setattr(Engine, "forward_micro_step", failing_once)
    events: list[dict[str, Any]] = []
    train(small_config(compile=True, batch_size=4, gradient_accumulation_steps=1), events.append)
    kinds = [event.get("kind", event["event"]) for event in events]
    failed = kinds.index("oom")
    assert kinds[failed + 1] == "compile", "the new graph is made before the step is tried again"
    assert kinds[failed:].count("compile") == 1
    assert attempts[:5] == warm_ups
