"""The command a verb prints as the next one runs as it is printed, wherever the files are."""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gptfit.cli import main
from gptfit.config.read import load_config
from gptfit.config.write import render
from gptfit.dataset import read_dataset
from gptfit.estimate import Estimate
from gptfit.gpus import find
from gptfit.logs.events import DataSaid, Header, event_json
from gptfit.plan.candidates import Wish
from gptfit.plan.propose import Proposal, propose
from gptfit.plan.result import DataFacts
from gptfit.shape import ModelShape
from gptfit.shell import command
from gptfit.units import si
from gptfit.verbs.common import load
from gptfit.verbs.next_commands import after_propose, after_train, after_tune, to_compare


@pytest.fixture(autouse=True)
def no_local_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without a card, on which nothing was measured: what other tests timed would change the advice."""
    monkeypatch.setenv("GPTFIT_CACHE", str(tmp_path / "cache"))
    for module in ("verbs.gpu_and_data", "device.local_gpu"):
        monkeypatch.setattr(f"gptfit.{module}.local_gpu", lambda: None)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a blank in its name, to type commands in."""
    folder = tmp_path / "my texts"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


Say = Callable[..., str]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """What a command prints; it must succeed."""

    def run(line: str, code: int = 0) -> str:
        program, *words = shlex.split(line)
        assert program == "gptfit"
        assert main(words) == code, capsys.readouterr().err
        return capsys.readouterr().out

    return run


def write_parquet(path: Path, column: str) -> Path:
    """Half a megabyte of made-up words, enough for a vocabulary of thousands."""
    rng = random.Random(1)
    syllables = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "ar", "en", "is")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(9000)]
    pq.write_table(pa.table({column: [" ".join(rng.choices(words, k=70)) for _ in range(1200)]}), path)
    return path


def commands(printed: str) -> list[str]:
    """The indented lines after `Next:`."""
    return [line.strip() for line in printed.split("Next:\n")[1].splitlines() if line.strip()]


def _next(printed: str) -> list[str]:
    return [line.removeprefix("next: ") for line in printed.splitlines() if line.startswith("next: ")]


def test_inspect_propose_prepare_and_plan_each_name_the_next_without_a_card(here: Path, say: Say) -> None:
    source = write_parquet(here / "a few pages.parquet", "body")
    printed = say(command(["gptfit", "inspect", source, "--text-column", "body"]))
    assert "no card here" in " ".join(printed.split())  # a long folder's name moves the line's end
    (named,) = _next(printed)
    assert named.startswith("gptfit propose --gpu 4070 ")
    printed = say(f"{named.replace('--hours 12', '--hours 1')} --write mine.py")
    *lines, last = commands(printed)
    assert last == "gptfit train mine.py", "half a megabyte is read in minutes: nothing to tune"
    assert lines[-1].startswith("gptfit prepare ")
    for line in lines:
        printed = say(line)
    assert _next(printed) == [last], "the config is waiting for the tokens"
    config = load_config([here / "mine.py"]).config
    assert (here / "data" / config.dataset / "train.bin").is_file(), "where `train mine.py` looks"
    assert _next(say("gptfit plan mine.py --gpu 4070")) == [last]


def test_a_text_file_leads_to_tokens_a_proposal_a_config_and_the_run(here: Path, say: Say) -> None:
    (here / "a.txt").write_text("To fit a model to a card, know the card.\n\n" * 400)
    (prepare,) = _next(say("gptfit inspect a.txt"))
    assert prepare == "gptfit prepare a.txt"
    printed = say(prepare)
    assert "no card here" in printed
    (propose,) = _next(printed)
    assert propose == "gptfit propose --gpu 4070 --data data/a --hours 12"
    assert _next(say("gptfit inspect data/a")) == [propose]
    (write,) = _next(say(propose))
    assert write == f"{propose} --write configs/mine.py"
    printed = say(write)
    assert commands(printed) == ["gptfit train configs/mine.py"]
    assert _next(say("gptfit inspect data/a")) == commands(printed), "the config is waiting"
    assert _next(say(propose)) == [f"{propose} --write configs/mine-2.py"], "no file is written over"
    assert _next(say(prepare)) == commands(printed)
    say(f"{propose} --write configs/mine-2.py")
    assert _next(say(prepare)) == [propose], "which of two is not for us to say"


def test_every_option_of_a_proposal_is_kept_when_it_is_written(here: Path, say: Say) -> None:
    words = "gptfit propose --gpu 4070 --data openwebtext --gpus 2 --hours 24 --block_size 512 --only nanogpt"
    (write,) = _next(say(words))
    assert write == f"{words} --write configs/mine.py"


def test_a_plan_to_read_a_few_pages_a_million_times_leads_to_a_proposal(here: Path, say: Say) -> None:
    """nanoGPT's defaults are for OpenWebText: on a small file they would run for two months and be tuned first."""
    (here / "a.txt").write_text("To fit a model to a card, know the card.\n\n" * 400)
    say("gptfit prepare a.txt --tokenizer bytes")
    assert _next(say("gptfit plan --dataset=a --gpu 4090")) == ["gptfit propose --gpu 4090 --data data/a --hours 12"]
    (here / "mine.py").write_text("dataset = 'a'\n")
    assert _next(say("gptfit plan mine.py --gpu 4090")) == ["gptfit tune mine.py"], "somebody wrote that down"


def test_a_config_whose_data_is_missing_says_where_it_belongs(here: Path, say: Say) -> None:
    say("gptfit configs modern_cpu --out tiny.py")
    printed = say("gptfit plan tiny.py")
    assert printed.endswith("next, with text of your own: gptfit prepare FILE.parquet --out data/bytes\n")
    (here / "a.txt").write_text("To fit a model to a card, know the card.\n\n" * 400)
    say("gptfit prepare a.txt --tokenizer bytes --out data/bytes")
    assert "a comment says" not in say("gptfit plan tiny.py"), "of a file that we wrote"


def test_one_text_is_one_document_and_its_proposal_can_be_trained(here: Path, say: Say) -> None:
    """Many epochs of it: there is no order of documents to change."""
    (here / "a.txt").write_text("To fit a model to a card, know the card; then the text, and the hours.\n\n" * 2000)
    say("gptfit prepare a.txt")
    say("gptfit propose --gpu 4070 --data data/a --hours 1 --write mine.py")
    config = load_config([here / "mine.py"]).config
    assert not config.shuffle_documents
    assert config.weight_decay > 0.1, "made for many epochs"


def test_a_plan_names_what_comes_before_training(here: Path, say: Say) -> None:
    source = write_parquet(here / "pages.parquet", "body")
    words = f"gptfit plan --gpu 4070 --data {source.name} --text-column body"
    (prepare,) = _next(say(words))
    assert prepare == "gptfit prepare pages.parquet --text-column body --out data/pages"
    say(prepare)
    assert _next(say(f"{words} --dataset=pages --max_iters=9 --lr_decay_iters=9 --warmup_iters=1")) != [prepare], "done"
    assert say("gptfit plan --gpu 4070").endswith("next, with text of your own: gptfit inspect FILE.parquet\n")
    assert "next" not in say("gptfit plan --gpu 4070 --batch_size=8 --program nanogpt")
    assert "next" not in say("gptfit plan --gpu 4070 --batch_size=64 --n_embd=1536 --program nanogpt", code=1)


def test_a_plan_that_does_not_fit_leads_to_one_that_does(here: Path, say: Say) -> None:
    (write,) = _next(say("gptfit plan --gpu 4070 --batch_size=64 --n_layer=24 --n_embd=1024 --n_head=16", code=1))
    assert write.endswith(" --gpu 4070 --write fitting.py")
    printed = say(write, code=1)
    assert "Wrote fitting.py, with what makes it fit." in printed
    (plan,) = _next(printed)
    assert plan == "gptfit plan fitting.py --gpu 4070"
    assert "inspect FILE.parquet" in say(plan), "it fits, and text is what is missing"


def test_a_long_run_is_tuned_first_and_takes_what_was_found(here: Path, say: Say) -> None:
    (here / "data" / "a").mkdir(parents=True)
    for name in ("train", "val"):
        np.zeros(100_000, dtype=np.uint16).tofile(here / "data" / "a" / f"{name}.bin")
    (here / "mine.py").write_text("dataset = 'a'\n")
    config = "gptfit plan mine.py --gpu 4070 --gradient_accumulation_steps=64"
    assert _next(say(f"{config} --batch_size=8")) == [
        "gptfit tune mine.py --gradient_accumulation_steps=64 --batch_size=8"
    ]
    assert _next(say("gptfit inspect data/a")) == ["gptfit tune mine.py"], "two months, and it is the one config for it"
    short = "--max_iters=20 --lr_decay_iters=20 --warmup_iters=2"
    assert _next(say(f"{config} --batch_size=8 {short}"))[0].startswith("gptfit train mine.py ")
    args = argparse.Namespace(configs=["a.py", "b.py"], overrides=["--batch_size=4", "--seed=2"], recipe="modern")
    assert after_tune(args, None) == (
        "next: gptfit train a.py b.py --batch_size=4 --seed=2 --recipe modern --batch_size=auto"
    )
    assert after_tune(args, Path("b_tuned.py")) == "next: gptfit train a.py b_tuned.py --seed=2 --recipe modern"


def test_conversations_teach_the_newest_run_and_are_talked_with(here: Path, say: Say) -> None:
    turns = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello."}]
    (here / "talk.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 40)
    assert _next(say("gptfit prepare --chat talk.jsonl"))[0].startswith("gptfit propose "), "there is nobody to teach"
    mine = read_dataset("data/talk").tokenizer_sha256
    shape = ModelShape(2, 2, 64, 256, 50304)
    runs = {"out-stopped-at-once": mine, "out-bytes": "other", "out-new": mine, "out-old": mine}
    for number, (name, sha) in enumerate(runs.items()):
        said = {"dataset": "data/talk" if name == "out-old" else "pages"}
        header = Header(name=name, config=said, dataset=DataSaid(tokenizer_sha256=sha), shape=shape)
        (here / name).mkdir()
        (here / name / "run.jsonl").write_text(f"{json.dumps(event_json(header))}\n")
        if number:
            (here / name / "ckpt.pt").touch()
        os.utime(here / name / "run.jsonl", (1e9, 1e9 - number))
    (line,) = _next(say("gptfit prepare --chat talk.jsonl"))
    assert line.startswith("gptfit train --init_from=out-new --dataset=data/talk --out_dir=out-new-chat ")
    taught = load(argparse.Namespace(configs=[], overrides=shlex.split(line)[2:], options=[])).config
    assert (taught.max_iters, taught.warmup_iters, taught.eval_interval) == (50, 0, 10)
    assert taught.block_size == 256, "what the model knows; the default would not start"
    plan = line.replace("gptfit train", "gptfit plan --gpu 4070")
    assert _next(say(plan)) == [line], "no proposal: there is a model already"
    assert after_train(taught) == "next: gptfit chat out-new-chat"
    assert after_train(taught.replace(dataset="gone")) == "next: gptfit sample out-new-chat"
    assert to_compare(taught) == ["to compare: gptfit compare out-old out-new-chat"], "the newest on the same data"
    assert to_compare(taught.replace(out_dir="elsewhere/a")) == []


@pytest.fixture(scope="module")
def own_vocabulary() -> tuple[Proposal, Wish]:
    """A choice whose text is to be prepared in a vocabulary of its own."""
    data = DataFacts("web_mdn", Estimate.exact(14.7e6), tokenizer="gpt2", bytes_per_token=3.34)
    wish = Wish(find("4070"), 0.02, data, 50304, recipes=("modern",), source="my pages.parquet", column="body")
    choice = propose(wish).choice
    assert choice.vocabulary
    return choice, wish


def test_a_vocabulary_of_its_own_is_trained_before_it_is_used(own_vocabulary: tuple[Proposal, Wish]) -> None:
    pytest.importorskip("tokenizers")
    choice, _ = own_vocabulary
    train, prepare, last = (shlex.split(line) for line in after_propose(*own_vocabulary, Path("mine.py")))
    tokenizer = f"data/web_mdn-{choice.vocabulary}.json"
    source = ["my pages.parquet", "--text-column", "body"]
    assert train == [
        "gptfit",
        "tokenizer",
        "train",
        *source,
        "--vocab-size",
        str(choice.vocabulary),
        "--out",
        tokenizer,
    ]
    assert prepare == ["gptfit", "prepare", *source, "--tokenizer", tokenizer, "--out", tokenizer.removesuffix(".json")]
    assert last == ["gptfit", "train", "mine.py"]


def test_without_the_extra_the_first_line_installs_it(
    own_vocabulary: tuple[Proposal, Wish], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptfit.verbs.next_commands.find_spec", lambda name: None)
    lines = after_propose(*own_vocabulary, Path("mine.py"))
    assert lines[0] == "pip install 'gptfit[hf]'"
    assert lines[1].startswith("gptfit tokenizer train ")


def test_propose_knows_public_data_by_its_name_as_plan_does(here: Path, say: Say) -> None:
    printed = say("gptfit propose --data openwebtext --gpu 4070 --hours 24 --write mine.py")
    assert "openwebtext: 9.04B tokens" in printed
    assert commands(printed)[0].startswith("gptfit prepare SOURCE --out data/openwebtext")
    assert load_config([here / "mine.py"]).config.dataset == "openwebtext"
    assert "openwebtext: 9.04B tokens" in say("gptfit plan --data openwebtext --gpu 4070")


@pytest.mark.parametrize(
    ("name", "line"),
    [("posix", "gptfit prepare 'my text.txt' 8"), ("nt", 'gptfit prepare "my text.txt" 8')],
)
def test_words_are_quoted_as_the_system_wants(name: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "name", name)
    assert command(["gptfit", "prepare", "my text.txt", 8]) == line


def test_a_windows_path_is_left_as_it_is_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "name", "nt")
    assert command(["gptfit", "train", r"C:\Users\me\mine.py"]) == r"gptfit train C:\Users\me\mine.py"


def test_a_stopped_run_prints_a_command_with_nothing_behind_it() -> None:
    """`(goes on at step 60)` behind it was a syntax error when pasted."""
    from gptfit.config.keys import TrainConfig
    from gptfit.train.train import TrainResult
    from gptfit.verbs.train_view import summary_lines

    config = TrainConfig(out_dir="my runs/a", max_hours=2.0)
    result = TrainResult("max_hours", 60, Path("my runs/a"), None, 3.0, None, 1000, 7200.0, None, None, 0, 8)
    last = summary_lines(config, result)[-1]
    said, _, line = last.partition(": ")
    assert said == "to go on at step 60"
    assert shlex.split(line) == [
        "gptfit", "train", "--init_from=resume", "--out_dir=my runs/a", "--max_hours=4",
    ]  # fmt: skip


def test_a_written_proposal_counts_its_own_vocabulary(own_vocabulary: tuple[Proposal, Wish]) -> None:
    """It said 86.1M of a model of 43.0M, with a vocabulary that it would not have."""
    plan = own_vocabulary[0].plan
    text = render(plan.config, vocab_size=plan.shape.vocab_size)
    counted = f"{si(plan.shape.parameters)} parameters as nanoGPT counts them (vocabulary {plan.shape.vocab_size:,})"
    assert counted in text
    assert "max_hours = 0.02  # stop after 1 min 12 s; gptfit only; stock nanoGPT ignores it" in text


def test_a_cpu_that_nobody_timed_is_said_before_a_large_file_is_read(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPTFIT_CACHE", str(here / "empty"))
    monkeypatch.setattr("gptfit.verbs.propose.find_data", lambda *_, **__: pytest.fail("it was read"))
    monkeypatch.setattr("gptfit.device.cpu_rate.product_rate", lambda: None)
    assert main(["propose", "--data", "pages.parquet", "--hours", "1"]) == 1
    assert "no speed of this machine's CPU is known yet" in capsys.readouterr().err
