"""A trial on an NVIDIA card: its three kinds of memory, its hard limit, and a parent that stays off the card."""

from __future__ import annotations

import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA card", allow_module_level=True)

from gptfit.cli import main  # noqa: E402
from gptfit.config.keys import TrainConfig  # noqa: E402
from gptfit.tune.measuring import _request, find_machine  # noqa: E402
from gptfit.tune.trial_process import run_process  # noqa: E402
from gptfit.tune.trials import timing_from_json  # noqa: E402

SMALL = TrainConfig(
    n_layer=4, n_head=4, n_embd=256, block_size=256, vocab_size=8192, batch_size=8, gradient_accumulation_steps=2,
    device="cuda", compile=False,
)  # fmt: skip


def request(config: TrainConfig, **changes: Any) -> dict[str, Any]:
    """As a session asks, so that this does not go out of date where no card is."""
    return _request("trial", config, vocab_size=config.vocab_size, timed_s=0.5, has_eval=True, **changes)


def test_allocated_reserved_and_device_memory_are_in_that_order() -> None:
    ended = run_process(request(SMALL), 120)
    assert ended.outcome == "ok", ended.message
    timing = timing_from_json(ended.values)
    assert timing.allocated_gib is not None
    assert timing.reserved_gib is not None
    assert timing.device_gib is not None
    assert 0 < timing.allocated_gib <= timing.reserved_gib <= timing.device_gib


def test_the_limit_is_reported_as_out_of_memory() -> None:
    ended = run_process(request(SMALL.replace(batch_size=512), limit_bytes=2**30), 120)
    assert (ended.outcome, ended.message) == ("oom", "out of memory")


def test_the_machine_names_its_card_and_its_free_memory() -> None:
    machine = find_machine(SMALL)
    assert machine.kind == "cuda"
    assert machine.device == torch.cuda.get_device_name(0)
    assert 0 < machine.free_bytes <= machine.total_bytes


def test_a_session_on_the_card_finds_a_winner(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [f"--{key}={getattr(SMALL, key)}" for key in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")]
    assert main(["tune", *keys, "--batch_size=8", "--gradient_accumulation_steps=2", "--minutes=2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["best"]["batch_size"] * answer["best"]["gradient_accumulation_steps"] == 16
    assert answer["best"]["mfu"] > 0
