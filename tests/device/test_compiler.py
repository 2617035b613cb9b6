"""The compiled loop trains like the eager one. Compiling takes a minute, so this is a slow test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.config as inductor

from gptfit.config.keys import TrainConfig
from gptfit.device import compiler
from gptfit.device.device import Device, find_device
from gptfit.logs.events import Event, Message, Step
from gptfit.model.head import fused_losses
from gptfit.train import engine as engine_module
from gptfit.train.engine import Engine, build_engine
from gptfit.train.evaluation import Evaluator
from gptfit.train.parallel import Alone
from gptfit.train.train import train
from gptfit.tune.trial import measure
from tests.small_runs import messages_in, told

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
        events: list[Event] = []
        out = str(tmp_path / f"out-{compiled}")
        train(small_config(compile=compiled, out_dir=out, max_iters=4, **changes), events.append)
        losses[compiled] = [event.loss for event in events if isinstance(event, Step)]
        assert bool(told(events, "compile")) == compiled
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
    batch = two_of(config)
    assert engine.compile_now(batch, with_backward=True) is None
    assert len(compiled) == versions
    ran.clear()
    engine.mean_loss([(batch[0][:3], batch[1][:3])])  # the last rows of the data
    assert len(compiled) == versions
    assert not ran, "they run eagerly"
    engine.forward_micro_step(batch, is_last=True)
    assert ran == [0] * 4, "training goes on with the code made for its batch"


def compile_as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph, with the look-ups and their gradients in it."""
    monkeypatch.setattr(engine_module, "compile_model", lambda model, *_: compiler.compile_whole(model))
    monkeypatch.setattr(Alone, "keep_gradients_of", lambda *_: None)


def two_of(config: TrainConfig) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(4, config.block_size, dtype=torch.int64), torch.ones(4, config.block_size, dtype=torch.int64)


@pytest.mark.parametrize(
    ("chunked", "batch_size", "arch", "dropout"),
    [(False, 4, "gpt2", 0.0), (False, 1, "gpt2", 0.0), (False, 4, "modern", 0.1), (True, 4, "modern", 0.0)],
)
def test_as_on_a_card_nothing_is_compiled_after_the_warm_up(
    small_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    chunked: bool,
    batch_size: int,
    arch: str,
    dropout: float,
) -> None:
    """A card's one graph, here with a backend that counts; the eval has a smaller last batch."""
    compiled: list[int] = []
    compiled_then: list[int] = []  # how much had been compiled when the warm-up was done

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(len(graph.graph.nodes))
        return graph.forward

    def reporter(event: Event) -> None:
        if isinstance(event, Message) and event.kind == "compile":
            compiled_then.append(len(compiled))

    real = torch.compile
    monkeypatch.setattr(compiler.torch, "compile", lambda model, **keys: real(model, backend=counting, **keys))
    compile_as_on_a_card(monkeypatch)
    fused_losses.cache_clear()
    keys: dict[str, Any] = {"batch_size": batch_size, "eval_iters": 3, "eval_interval": 4, "arch": arch}
    config = small_config(compile=True, chunked_loss=chunked, dropout=dropout, **keys)
    monkeypatch.setattr(Evaluator, "_fixed_starts", lambda self, split: np.arange(batch_size * 2 + 1) * 16)
    assert train(config, reporter).step == 8
    fused_losses.cache_clear()
    assert len(compiled_then) == 1
    assert len(compiled) == compiled_then[0], "something was compiled in the middle of the run"


def test_without_a_compiler_training_is_eager_and_says_why(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    events: list[Event] = []
    assert train(small_config(compile=True), events.append).step == 8
    messages = messages_in(events)
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
    events: list[Event] = []
    assert train(small_config(compile=True), events.append).step == 8
    assert any("shared memory" in message for message in messages_in(events))
    assert any("training eagerly" in message for message in messages_in(events))


def test_a_trial_survives_what_training_survives(small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model the compiler cannot do is measured as it would train: eagerly."""

    def picky(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        if len(graph.graph.nodes) > 10:
            raise RuntimeError("out of resource: shared memory")
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(compiler.torch, "compile", lambda model, **keys: real(model, backend=picky, **keys))
    config = small_config(compile=True)
    engine = build_engine(config, config.shape(), find_device(config))
    assert engine.compiled
    request = {"vocab_size": config.shape().vocab_size, "timed_s": 0.05, "has_eval": True, "used_bytes": {}}
    timing = measure(engine, request, lambda event, **values: None)
    assert not timing.compiled
    assert timing.ms_per_eval is not None


@pytest.mark.parametrize(
    ("failing", "warm_ups"), [(3, [True, False, False, False, True]), (0, [True, True, False, False, False])]
)
def test_after_running_out_of_memory_the_smaller_size_compiles_once_and_outside_the_steps(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, failing: int, warm_ups: list[bool]
) -> None:
    original, attempts = Engine.forward_micro_step, []
    warming, warm_up = [False], Engine.compile_now

    def marked(self: Engine, *args: Any, **keys: Any) -> str | None:
        warming.append(True)
        try:
            return warm_up(self, *args, **keys)
        finally:
            warming.pop()

    def failing_once(self: Engine, batch: Any, is_last: bool) -> torch.Tensor:
        attempts.append(warming[-1])
        if len(attempts) == failing + 1:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:132] DefaultCPUAllocator: can't allocate memory")
        return original(self, batch, is_last)

    real = torch.compile
    monkeypatch.setattr(compiler.torch, "compile", lambda model, **keys: real(model, backend="eager", **keys))
    monkeypatch.setattr(Engine, "forward_micro_step", failing_once)
    monkeypatch.setattr(Engine, "compile_now", marked)
    events: list[Event] = []
    train(small_config(compile=True, batch_size=4, gradient_accumulation_steps=1), events.append)
    kinds = [getattr(event, "kind", "") for event in events]
    failed = kinds.index("oom")
    assert kinds[failed + 1] == "compile", "the new graph is made before the step is tried again"
    assert kinds[failed:].count("compile") == 1
    assert attempts[:5] == warm_ups


@pytest.mark.parametrize(
    ("platform", "text", "remedy"),
    [
        ("linux", "fatal error: Python.h: No such file or directory", "python3-dev"),
        ("linux", "RuntimeError: Failed to find C compiler. Please specify via CC", "apt install gcc"),
        ("win32", "Cannot find a working triton installation", "pip install triton-windows"),
    ],
)
def test_a_failed_start_of_the_compiler_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, platform: str, text: str, remedy: str
) -> None:
    monkeypatch.setattr(compiler.sys, "platform", platform)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: name)

    def broken(*args: object, **keys: object) -> None:
        raise RuntimeError(f"backend='inductor' raised:\n{text}")

    monkeypatch.setattr(compiler.torch, "compile", lambda function: broken)
    before = (inductor.cpp.vec_isa_ok, inductor.cpp.simdlen)
    problem = compiler.find_compile_problem(find_device(TrainConfig(device="cpu")))
    assert problem is not None
    assert problem.endswith(remedy)
    assert (inductor.cpp.vec_isa_ok, inductor.cpp.simdlen) == before


def test_the_probe_is_the_only_program_that_is_built_to_try_the_vector_units(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And where it fails, the plainer units that every compiler knows are tried before training goes without."""
    monkeypatch.setattr(compiler.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(compiler.shutil, "which", lambda name: name)
    monkeypatch.setattr(inductor.cpp, "vec_isa_ok", None)
    monkeypatch.setattr(inductor.cpp, "simdlen", None)
    tried: list[tuple[bool | None, int | None]] = []

    def probe(function: object) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            tried.append((inductor.cpp.vec_isa_ok, inductor.cpp.simdlen))
            if inductor.cpp.simdlen != compiler.AVX2_BITS:
                raise RuntimeError("unrecognized command-line option '-mavx512f'")
            return x

        return run

    monkeypatch.setattr(compiler.torch, "compile", probe)
    assert compiler.find_compile_problem(find_device(TrainConfig(device="cpu"))) is None
    assert tried == [(True, None), (True, 256)]


@pytest.mark.parametrize(("platform", "remedy"), [("win32", "pip install triton-windows"), ("linux", "CUDA build")])
def test_a_card_without_triton_says_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, platform: str, remedy: str
) -> None:
    monkeypatch.setattr(compiler.sys, "platform", platform)
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    problem = compiler.find_compile_problem(Device(torch.device("cuda"), "a card", "bfloat16"))
    assert problem is not None
    assert remedy in problem


def test_memory_that_runs_out_while_compiling_is_no_compile_problem(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training eagerly would need more memory, not less: the batch is halved and compiled again."""

    def hungry(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        if len(graph.graph.nodes) > 10 and any(t.shape[:1] == (4,) for t in inputs if isinstance(t, torch.Tensor)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(compiler.torch, "compile", lambda model, **keys: real(model, backend=hungry, **keys))
    compile_as_on_a_card(monkeypatch)
    events: list[Event] = []
    result = train(small_config(compile=True), events.append)
    assert (result.step, result.micro_batch) == (8, 2)
    assert told(events, "compile")
    assert not any("eagerly" in message for message in messages_in(events))


def test_compiled_code_is_kept_where_gptfit_keeps_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTFIT_CACHE", str(tmp_path))
    monkeypatch.setenv(compiler.CACHE_VARIABLE, "mine")
    compiler.keep_compiled_code()
    assert os.environ[compiler.CACHE_VARIABLE] == "mine"
    monkeypatch.delenv(compiler.CACHE_VARIABLE)
    compiler.keep_compiled_code()
    assert os.environ[compiler.CACHE_VARIABLE] == str(tmp_path / "inductor")
