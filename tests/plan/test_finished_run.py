"""A finished run becomes two measured facts; anything less becomes fewer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gptfit.config.keys import TrainConfig
from gptfit.logs.events import DataSaid, DeviceSaid, End, Eval, Header, Message, Step
from gptfit.logs.runlog import RunLog
from gptfit.measured import MeasuredLoss, MeasuredSpeed
from gptfit.plan.finished_run import of_run
from gptfit.plan.resolve import Place, setting_of
from gptfit.plan.setting import speed_key

CONFIG = TrainConfig(n_layer=2, n_head=2, n_embd=64, block_size=64, batch_size=4, gradient_accumulation_steps=8)
SHAPE = CONFIG.shape(65)


CARD = DeviceSaid(name="NVIDIA GeForce RTX 4070", kind="cuda", dtype="bfloat16")
HEADER = Header(
    name="mine",
    config=CONFIG.as_dict(),
    shape=SHAPE,
    tokens_per_step=2048,
    device=CARD,
    dataset=DataSaid(folder="data/notes", tokenizer="gpt2", train_tokens=1000),
    versions={"torch": "2.9.0"},
)


def log(**changes: Any) -> RunLog:
    run = RunLog(
        path=Path("out/run.jsonl"),
        header=HEADER,
        steps=[Step(0, ms=9000.0)] + [Step(n, ms=80.0, memory_gib=2.0) for n in range(1, 60)],
        evals=[Eval(60, val_loss=3.5, tokens=122_880)],
        end=End("max_iters", time=7.0),
    )
    return replace(run, **changes)


def test_a_finished_run_teaches_speed_and_loss() -> None:
    speed, loss = of_run(log())
    assert isinstance(speed, MeasuredSpeed)
    assert isinstance(loss, MeasuredLoss)
    assert speed.ms_per_micro_step == 10.0  # the first step, with the compiler in it, does not count
    assert speed.ms_per_update == 0.0
    assert (speed.allocated_gib, speed.source, speed.time) == (2.0, "train", 7.0)
    assert speed.key.device == "NVIDIA GeForce RTX 4070"
    assert loss == MeasuredLoss(
        "notes", "gpt2", SHAPE.tied_parameters, 122_880, 1000, "gpt2", "adamw", 3.5, "mine", 7.0
    )


def test_a_run_that_had_to_shrink_its_micro_batch_says_nothing_about_the_configs() -> None:
    kinds = [type(record) for record in of_run(log(messages=[Message("oom", step=3, batch_size=2)]))]
    assert kinds == [MeasuredLoss]


def test_on_a_cpu_the_memory_is_that_of_the_process() -> None:
    cpu = DeviceSaid(name="Xeon, 2 threads", kind="cpu", dtype="float32")
    speed = of_run(log(header=replace(HEADER, device=cpu)))[0]
    assert isinstance(speed, MeasuredSpeed)
    assert (speed.allocated_gib, speed.device_gib) == (None, 2.0)


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"end": None}, []),
        ({"end": End("SIGINT")}, [MeasuredSpeed]),
        ({"steps": ()}, [MeasuredLoss]),
        ({"evals": ()}, [MeasuredSpeed]),
        ({"evals": [Eval(1, tokens=5)]}, [MeasuredSpeed]),
        ({"header": Header()}, []),
        ({"header": replace(HEADER, config={})}, []),
        ({"header": replace(HEADER, device=DeviceSaid())}, [MeasuredLoss]),
    ],
)
def test_less_than_a_finished_run_teaches_less(changes: dict[str, Any], kinds: list[type]) -> None:
    assert [type(record) for record in of_run(log(**changes))] == kinds


def test_what_was_left_open_is_kept_as_the_device_decided_it() -> None:
    """`auto` was kept as whole logits, so plan believed a timing of another way to compute the loss."""
    assert CONFIG.chunked_loss == "auto"
    for decided in (True, False):
        header = replace(HEADER, device=replace(CARD, chunked_loss=decided))
        compiled = [Message("compile", "compiled in 9 s", 0)]
        speed = of_run(log(header=header, messages=compiled))[0]
        assert isinstance(speed, MeasuredSpeed)
        assert (speed.key.chunked_loss, speed.key.compile, speed.key.dtype) == (decided, True, "bfloat16")
        place = Place(dtype="bfloat16")
        planned = setting_of(CONFIG.replace(chunked_loss=decided), SHAPE, place)
        assert speed.key == speed_key(planned, CARD.name or "")
