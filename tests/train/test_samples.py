"""Samples kept while training: by step, without a trace in the weights, and never the end of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptfit.checkpoint.format import load_checkpoint
from gptfit.config.keys import TrainConfig
from gptfit.data.options import PrepareOptions
from gptfit.data.prepare import prepare
from gptfit.data.token_files import open_split
from gptfit.data.tokenizer import load_tokenizer
from gptfit.dataset import read_dataset
from gptfit.device.device import Device
from gptfit.logs.events import Event, Sample
from gptfit.logs.runlog import assemble, parse_event, read_run
from gptfit.train import samples
from gptfit.train.train import train
from gptfit.verbs.train_view import event_lines
from tests.small_runs import told

MakeConfig = Callable[..., TrainConfig]


@pytest.fixture
def byte_config(tmp_path: Path, small_config: MakeConfig) -> MakeConfig:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"document {i} of the folder"}) + "\n" for i in range(60)))
    prepare(PrepareOptions((str(text),), tmp_path / "bytes", tokenizer="bytes", val_fraction=0.3))
    return lambda **changes: small_config(dataset=str(tmp_path / "bytes"), **changes)


def weights(config: TrainConfig) -> dict[str, torch.Tensor]:
    return load_checkpoint(Path(config.out_dir) / "ckpt.pt").model


@pytest.mark.parametrize(
    "keys",
    [
        {"dropout": 0.2},
        {"sampling": "random", "dropout": 0.2},
        {"residual_dtype": "bfloat16", "dtype": "bfloat16"},
        {"arch": "modern", "optimizer": "muon", "average_tail": 0.5},
        {"arch": "modern", "optimizer": "muon", "lookahead": 0.5, "schedule": "wsd"},
    ],
    ids=lambda keys: "-".join(keys),
)
def test_a_run_with_samples_has_the_weights_of_one_without(
    byte_config: MakeConfig, tmp_path: Path, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A CPU without 16-bit units takes a minute to time a large product.
    monkeypatch.setattr(Device, "peak_rate", lambda self: (1.0, "not measured"))
    plain = byte_config(out_dir=str(tmp_path / "plain"), **keys)
    sampled = byte_config(out_dir=str(tmp_path / "sampled"), sample_interval=3, **keys)
    train(plain)
    train(sampled)
    found, wanted = weights(sampled), weights(plain)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert [sample.step for sample in read_run(sampled.out_dir).samples] == [3, 3, 3, 6, 6, 6, 8, 8, 8]


def test_prompts_are_those_of_the_config_or_from_validation(byte_config: MakeConfig) -> None:
    train(byte_config(sample_interval=8, sample_prompts="doc|the"))
    assert [sample.prompt for sample in read_run(byte_config().out_dir).samples] == ["doc", "the"]
    train(byte_config(sample_interval=8))
    prompts = [sample.prompt for sample in read_run(byte_config().out_dir).samples]
    assert prompts[:3] == ["", *prompts[1:3]]
    assert all(prompts[1:3])


def test_an_alphabet_without_line_ends_has_no_new_document_to_begin(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("all of it on one line, " * 200)
    prepare(PrepareOptions((str(tmp_path / "text.txt"),), tmp_path / "chars", tokenizer="chars"))
    info = read_dataset(tmp_path / "chars")
    found = samples.find_prompts(load_tokenizer(info), "", open_split(info, "val", 8, 256))
    assert len(found) == 2
    assert all(prompt.text for prompt in found)


def test_a_resumed_run_repeats_no_sample(byte_config: MakeConfig) -> None:
    train(byte_config(sample_interval=4, sample_prompts="doc", max_iters=4))
    train(byte_config(sample_interval=4, sample_prompts="doc", init_from="resume"))
    assert [sample.step for sample in read_run(byte_config().out_dir).samples] == [4, 8]


def test_a_sample_that_fails_does_not_end_the_run(
    byte_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    plain = byte_config(out_dir=str(tmp_path / "plain"))
    train(plain)
    monkeypatch.setattr(samples, "generate", broken)
    events: list[Event] = []
    config = byte_config(sample_interval=2)
    result = train(config, events.append)
    assert result.reason == "max_iters"
    assert [event.message for event in told(events, "note") if "samples" in event.message] == [
        "no more samples: MemoryError"
    ]
    assert all(torch.equal(tensor, weights(plain)[name]) for name, tensor in weights(config).items())


def test_samples_compile_nothing(byte_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every length would be a piece of code of its own, in the middle of a run."""
    stances = []

    def watched(*_: object) -> list[list[int]]:
        stances.append(torch._dynamo.eval_frame._stance.stance)
        return [[1]]

    monkeypatch.setattr(samples, "generate", watched)
    train(byte_config(sample_interval=8))
    assert stances == ["force_eager"] * 3
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_a_data_set_without_its_tokenizer_trains_without_samples(small_config: MakeConfig) -> None:
    events: list[Event] = []
    assert train(small_config(sample_interval=4), events.append).reason == "max_iters"
    assert any(
        "no more samples: the tokenizer (gpt2) has 50,257 tokens" in event.message for event in told(events, "note")
    )


def test_a_line_of_the_log_is_a_typed_event_with_nothing_odd_in_it() -> None:
    line = json.dumps({"event": "sample", "step": 4, "prompt": 7, "text": "x" * 200_000, "other": 1})
    found = parse_event(line)
    assert isinstance(found, Sample)
    assert (found.prompt, len(found.text)) == ("", 100_000)
    assert parse_event(json.dumps({"event": "sample", "step": -1, "text": "x"})) is None


def test_a_run_that_went_back_shows_no_samples_of_what_was_lost() -> None:
    lines = [
        {"event": "step", "step": 9},
        {"event": "sample", "step": 10, "text": "lost"},
        {"event": "step", "step": 10},
        {"event": "step", "step": 5},
        {"event": "sample", "step": 6, "text": "kept"},
    ]
    run = assemble(Path("x"), filter(None, (parse_event(json.dumps(line)) for line in lines)), [])
    assert run is not None
    assert [sample.text for sample in run.samples] == ["kept"]


def test_the_terminal_shows_one_line_without_control_characters() -> None:
    (line,) = event_lines(Sample(5, "once", "upon\n\x1b[31ma time" + "y" * 200))
    assert line.startswith("sample at step 5: once ... upon ?[31ma time")
    assert line.endswith("y ...")
    assert len(line) < 130
