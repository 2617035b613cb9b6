"""Signals, power cuts, memory that runs out, numbers that are not finite: the work is still there."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptfit.checkpoint.format import LAST, load_checkpoint
from gptfit.config.keys import TrainConfig
from gptfit.device.device import Device
from gptfit.device.out_of_memory import is_out_of_memory
from gptfit.errors import RunError
from gptfit.logs.events import Eval, Event, Step
from gptfit.logs.runlog import read_run
from gptfit.train import engine as engine_module
from gptfit.train import muon
from gptfit.train import saver as saver_module
from gptfit.train.engine import Engine
from gptfit.train.out_of_memory import smaller_micro_batch
from gptfit.train.train import TrainResult, train
from tests.small_runs import fork_gptfit, start_gptfit, told

MakeConfig = Callable[..., TrainConfig]
posix_only = pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")


def assert_same_weights(left: Path, right: Path) -> None:
    a, b = load_checkpoint(left), load_checkpoint(right)
    assert a.iter_num == b.iter_num
    assert [name for name, tensor in a.model.items() if not torch.equal(tensor, b.model[name])] == []


@posix_only
def test_killed_at_random_moments_a_run_ends_with_the_same_weights(small_config: MakeConfig, tmp_path: Path) -> None:
    """The saves are so frequent that several of the kills fall into one."""
    common: dict[str, Any] = {
        "max_iters": 40,
        "lr_decay_iters": 40,
        "eval_interval": 2,
        "eval_iters": 1,
        "dropout": 0.1,
    }
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(small_config(out_dir=str(whole), **common))
    moments = random.Random(7)
    for _ in range(3):
        start = "resume" if (killed / LAST).is_file() else "scratch"
        process = fork_gptfit(small_config(out_dir=str(killed), init_from=start, **common))
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("iter"):
                break
        time.sleep(moments.uniform(0, 0.3))
        process.kill()
        process.communicate()
    start = "resume" if (killed / LAST).is_file() else "scratch"
    result = train(small_config(out_dir=str(killed), init_from=start, **common))
    assert result.reason == "max_iters"
    assert_same_weights(whole, killed)
    assert not list(killed.glob("*.tmp"))


@posix_only
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_says_how_to_resume(small_config: MakeConfig, tmp_path: Path, number: int) -> None:
    process = fork_gptfit(small_config(max_iters=100_000, lr_decay_iters=100_000, eval_interval=100_000))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("iter 3:"):
            break
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert errors == ""
    saved = load_checkpoint(tmp_path / "out")
    assert f"stopped by {signal.Signals(number).name} at step {saved.iter_num}" in output
    assert f"--init_from=resume --out_dir={tmp_path / 'out'}" in output


def test_a_signal_in_the_middle_of_a_step_loses_nothing(small_config: MakeConfig, tmp_path: Path) -> None:
    """The step is given up at the next micro-step and done again from its beginning after the resume."""
    common: dict[str, Any] = {"dropout": 0.2, "sampling": "random", "gradient_accumulation_steps": 4}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(small_config(out_dir=str(whole), **common))

    def interrupt(event: Event) -> None:
        if isinstance(event, Step) and event.step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    result = train(small_config(out_dir=str(parts), **common), interrupt)
    assert (result.reason, result.step) == ("SIGINT", 6)
    train(small_config(out_dir=str(parts), init_from="resume", **common))
    assert_same_weights(whole, parts)


def fail_in(monkeypatch: pytest.MonkeyPatch, method: str, largest: int) -> list[int]:
    """Let the named method of Engine run out of memory for batches of more than `largest` rows."""
    original, seen = getattr(Engine, method), []

    def limited(self: Engine, batches: Any, *rest: Any, **options: Any) -> Any:
        def check(batch: Any) -> Any:
            seen.append(len(batch[0]))
            if len(batch[0]) > largest:
                raise RuntimeError("[enforce fail at alloc_cpu.cpp:132] DefaultCPUAllocator: can't allocate memory")
            return batch

        checked = check(batches) if method == "forward_micro_step" else (check(batch) for batch in batches)
        return original(self, checked, *rest, **options)

    monkeypatch.setattr(Engine, method, limited)
    return seen


@pytest.mark.parametrize("method", ["forward_micro_step", "loss_and_tokens"])
@pytest.mark.parametrize("sampling", ["epoch", "random"])
def test_out_of_memory_shrinks_the_micro_batch_and_keeps_the_step(
    small_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, sampling: str
) -> None:
    train(small_config(out_dir=str(tmp_path / "whole"), batch_size=8, gradient_accumulation_steps=1, sampling=sampling))
    fail_in(monkeypatch, method, largest=2)
    events: list[Event] = []
    config = small_config(batch_size=8, gradient_accumulation_steps=1, sampling=sampling)
    result = train(config, events.append)
    assert result.micro_batch == 2
    assert [event.batch_size for event in told(events, "oom")] == [4, 2]
    whole, shrunk = load_checkpoint(tmp_path / "whole"), load_checkpoint(tmp_path / "out")
    for name, tensor in whole.model.items():
        torch.testing.assert_close(shrunk.model[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("chunked_loss", "rows"), [("auto", [8]), (False, [4])])
def test_out_of_memory_chunks_the_loss_before_it_halves_the_batch(
    small_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chunked_loss: str | bool,
    rows: list[int],
) -> None:
    """Whole logits of more than four rows run out; a config that wants them whole gets a smaller batch."""
    monkeypatch.setattr(engine_module, "CHUNK_TOKENS", 32)
    common: dict[str, Any] = {"batch_size": 8, "gradient_accumulation_steps": 1, "chunked_loss": chunked_loss}
    train(small_config(out_dir=str(tmp_path / "whole"), **common))
    original = Engine.forward_micro_step

    def limited(self: Engine, batch: Any, is_last: bool) -> torch.Tensor:
        if not self.model.loss_chunk_tokens and len(batch[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(self, batch, is_last)

    monkeypatch.setattr(Engine, "forward_micro_step", limited)
    events: list[Event] = []
    result = train(small_config(**common), events.append)
    assert [event.batch_size for event in told(events, "oom")] == rows == [result.micro_batch]
    whole, chunked = load_checkpoint(tmp_path / "whole"), load_checkpoint(tmp_path / "out")
    for name, tensor in whole.model.items():
        torch.testing.assert_close(chunked.model[name], tensor, rtol=1e-3, atol=1e-4)


def fail_at_calls(monkeypatch: pytest.MonkeyPatch, owner: object, function: str, failing: tuple[int, ...]) -> None:
    """Let the function run out of memory at these calls of it."""
    original, calls = getattr(owner, function), [0]

    def limited(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] in failing:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:132] DefaultCPUAllocator: can't allocate memory")
        return original(*args, **options)

    monkeypatch.setattr(owner, function, limited)


@pytest.mark.parametrize(
    ("optimizer", "owner", "function", "failing", "has_scaler"),
    [
        ("adamw", torch, "zeros_like", (1, 12), True),  # of the first weight, then of one amid the next attempt
        ("adamw", torch, "zeros_like", (21,), False),  # in the second group
        ("adamw", torch.nn.utils, "get_total_norm", (1,), False),
        ("muon", torch, "zeros_like", (1, 12), False),
        ("muon", muon, "orthogonalize", (2, 4), True),  # of the second shape, then of the one after
        ("muon", muon, "orthogonalize", (2, 4), False),
    ],
)
def test_out_of_memory_inside_an_update_does_no_part_of_it_twice(
    small_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: str,
    owner: object,
    function: str,
    failing: tuple[int, ...],
    has_scaler: bool,
) -> None:
    monkeypatch.setattr(Device, "needs_scaler", has_scaler)
    shape: dict[str, Any] = {"arch": "modern"} if optimizer == "muon" else {"bias": True}
    common: dict[str, Any] = {"optimizer": optimizer, "batch_size": 4, "gradient_accumulation_steps": 1} | shape
    train(small_config(out_dir=str(tmp_path / "whole"), **common))
    fail_at_calls(monkeypatch, owner, function, failing)
    result = train(small_config(**common))
    assert (result.step, result.micro_batch) == (8, 4 // 2 ** len(failing))
    whole, shrunk = load_checkpoint(tmp_path / "whole"), load_checkpoint(tmp_path / "out")
    for name, tensor in whole.model.items():
        torch.testing.assert_close(shrunk.model[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("std::bad_alloc"), False),
    ],
)
def test_every_way_a_card_says_that_memory_ran_out_is_known(error: Exception, is_so: bool) -> None:
    assert is_out_of_memory(error) is is_so


def test_out_of_memory_at_a_micro_batch_of_one_gives_advice(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in(monkeypatch, "forward_micro_step", largest=0)
    with pytest.raises(RunError, match=r"out of memory with a micro-batch of 1: about .* needed; --\w+=\w+ brings it"):
        train(small_config())


@pytest.mark.parametrize(("size", "share", "smaller"), [(12, 12, 6), (3, 12, 1), (8, 8, 4), (5, 10, 2), (1, 8, None)])
def test_smaller_micro_batches_divide_the_step(size: int, share: int, smaller: int | None) -> None:
    assert smaller_micro_batch(size, share) == smaller


@pytest.mark.skipif(sys.platform != "linux", reason="address space limits as Linux has them")
def test_a_process_with_a_hard_memory_limit_runs_out_recovers_and_finishes(
    small_config: MakeConfig, tmp_path: Path
) -> None:
    import resource

    limit = 2 * 1024**3

    def limit_memory() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    # 64 x 128 tokens x 20,000 ids x 4 bytes are 0.7 GB of logits, and the loss needs them several times.
    config = small_config(
        batch_size=64,
        block_size=128,
        gradient_accumulation_steps=1,
        vocab_size=20_000,
        chunked_loss=False,
        max_iters=1,
        warmup_iters=1,
        eval_iters=1,
    )
    process = start_gptfit(config, preexec_fn=limit_memory, env={"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"})
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors + output
    log = read_run(tmp_path / "out")
    assert any(event.kind == "oom" for event in log.messages)
    assert [step.step for step in log.steps] == [0]
    assert log.header.tokens_per_step == 64 * 128


def poison(monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[int], bool]) -> None:
    """Turn the loss of chosen micro-steps, counted from 0, into NaN."""
    original, calls = Engine.forward_micro_step, [0]

    def poisoned(self: Engine, *args: Any, **options: Any) -> torch.Tensor:
        loss = original(self, *args, **options)
        calls[0] += 1
        return loss * float("nan") if is_bad(calls[0] - 1) else loss

    monkeypatch.setattr(Engine, "forward_micro_step", poisoned)


def test_checkpointed_blocks_leave_nothing_behind(small_config: MakeConfig) -> None:
    """Eager checkpointing leaves cyclic objects at every block and micro-step, and the collector is off meanwhile."""
    counts: list[int] = []

    def count(event: Event) -> None:
        if isinstance(event, Eval):
            counts.append(len(gc.get_objects()))

    train(small_config(checkpoint_activations=True, eval_interval=2, eval_iters=1), count)
    assert len(counts) == 5
    # Two steps leave 2 x 2 micro-steps x 2 blocks x 7 objects where nobody collects.
    assert counts[-1] - counts[1] < 40, counts


def test_a_loss_that_is_not_finite_never_reaches_the_weights(
    small_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda call: call in (4, 9))  # steps 2 and 4, two micro-steps each
    events: list[Event] = []
    train(small_config(), events.append)
    assert [event.step for event in told(events, "nonfinite")] == [2, 4]
    assert all(tensor.isfinite().all() for tensor in load_checkpoint(tmp_path / "out").model.values())


def test_with_a_loss_scale_too_a_good_step_ends_the_row_of_bad_ones(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a row nothing is saved, so a row that never ended would end all saving."""
    monkeypatch.setattr(Device, "needs_scaler", True)
    poison(monkeypatch, lambda call: call == 2)
    events: list[Event] = []
    train(small_config(), events.append)
    assert [event.step for event in told(events, "nonfinite")] == [1]
    assert 4 in [event.step for event in told(events, "checkpoint")]


def test_five_bad_steps_in_a_row_return_to_the_last_checkpoint_and_go_on_in_the_data(
    small_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda call: 10 <= call < 20)  # steps 5 to 9
    events: list[Event] = []
    result = train(small_config(max_iters=12, lr_decay_iters=12), events.append)
    rollback = next(event for event in told(events, "rollback"))
    assert "checkpoint of step 4" in rollback.message
    assert result.step == 12
    # Step 8 was evaluated inside the row of bad ones; what the run is from then on is evaluated and saved too.
    assert [event.step for event in events if isinstance(event, Eval)] == [0, 4, 8, 8, 12]
    assert [point.step for point in read_run(tmp_path / "out").evals] == [0, 4, 8, 12]
    # 10 steps before the rollback, 8 after it: no window was read twice
    assert load_checkpoint(tmp_path / "out").progress["window"] == 18 * 8
    assert all(tensor.isfinite().all() for tensor in load_checkpoint(tmp_path / "out").model.values())


def test_a_loss_that_never_becomes_finite_ends_the_run_with_advice(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda call: True)
    with pytest.raises(RunError, match=r"not finite since step 0 .* lower learning_rate"):
        train(small_config(max_iters=50, lr_decay_iters=50))


def test_early_stop_and_overfitting_are_said(small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from gptfit.train.evaluation import Evaluator, Losses

    vals = iter([4.0, 3.0, 3.1, 3.2, 3.3, 3.4])
    trains = iter([4.0, 3.0, 2.9, 2.8, 2.7, 2.6])
    monkeypatch.setattr(Evaluator, "losses", lambda *_: Losses(next(trains), next(vals), 100))
    events: list[Event] = []
    result = train(small_config(max_iters=40, lr_decay_iters=40, eval_interval=2, early_stop_evals=4), events.append)
    assert (result.reason, result.step, result.best_val_loss) == ("early_stop", 10, 3.0)
    overfit = told(events, "overfit")
    assert [event.step for event in overfit] == [8]
    assert "dropout" in overfit[0].message


def test_max_hours_stops_saves_and_can_be_resumed(small_config: MakeConfig, tmp_path: Path) -> None:
    result: TrainResult = train(small_config(max_iters=10**6, lr_decay_iters=10**6, max_hours=1e-6))
    assert (result.reason, result.step, result.was_stopped) == ("max_hours", 1, True)
    assert load_checkpoint(tmp_path / "out").iter_num == 1


def test_a_checkpoint_is_written_for_times_sake_between_rare_evals(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module, "SAVE_EVERY_SECONDS", 0)
    events: list[Event] = []
    train(small_config(max_iters=3, eval_interval=1000), events.append)
    assert [event.step for event in told(events, "checkpoint")][:3] == [1, 2, 3]
