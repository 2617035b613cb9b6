"""A small model is taught an answer and gives it: on the terminal, through a pipe, exported, and to the chat page."""

from __future__ import annotations

import io
import itertools
import json
import os
import pty
import queue
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from gptfit.checkpoint.loaded_model import LoadedModel, open_model
from gptfit.cli import main
from gptfit.conversation import ANSWER_MARK, JINJA, Turn
from gptfit.data.chat import conversation_tokens
from gptfit.data.tokenizer import load_tokenizer
from gptfit.generate import chat
from gptfit.generate.chat import _prompt, answer
from gptfit.generate.pick import Picking
from gptfit.logs.runlog import read_run
from gptfit.pages import chat_page
from gptfit.pages.chat_child import ChatChild
from gptfit.pages.live import watch_app
from gptfit.verbs import chat_lines
from tests.generate.test_evaluate import make_byte_run

ANSWERS = {"Who are you?": "A toy.", "What is the sky?": "Blue."}
SMALL = ["--n_layer=2", "--n_head=2", "--n_embd=64", "--block_size=64", "--batch_size=16", "--eval_iters=2"]
SMALL += ["--gradient_accumulation_steps=1", "--device=cpu", "--dtype=float32", "--compile=False", "--dropout=0.0"]
SMALL += ["--learning_rate=5e-3", "--min_lr=5e-4", "--warmup_iters=5", "--log_interval=10"]
LIKELIEST = Picking(temperature=0)


def steps(count: int) -> list[str]:
    return [f"--max_iters={count}", f"--lr_decay_iters={count}", f"--eval_interval={count}"]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on text, then the same model on conversations, each with the commands a person types."""
    folder = tmp_path_factory.mktemp("toy")
    text, chat = folder / "text.jsonl", folder / "chat.jsonl"
    text.write_text(
        "".join(json.dumps({"text": f"{word} is a word. " * 3}) + "\n" for word in ["sky", "toy", "blue"] * 40)
    )
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": said}]}
        for question, said in ANSWERS.items()
    ]
    chat.write_text("".join(json.dumps(row) + "\n" for row in rows * 60))
    common = ["--tokenizer", "bytes", "--val-fraction", "0.1"]
    assert main(["prepare", str(text), "--out", str(folder / "text"), *common]) == 0
    assert main(["prepare", "--chat", str(chat), "--out", str(folder / "chat"), *common]) == 0
    base, out = f"--out_dir={folder / 'base'}", f"--out_dir={folder / 'runs' / 'toy'}"
    assert main(["train", f"--dataset={folder / 'text'}", base, *SMALL, *steps(10)]) == 0
    begin = [f"--init_from={folder / 'base'}", f"--dataset={folder / 'chat'}", "--sample_interval=60"]
    assert main(["train", *begin, out, *SMALL, *steps(120)]) == 0
    return folder / "runs" / "toy"


@pytest.fixture(scope="module")
def opened(taught: Path) -> LoadedModel:
    return open_model(str(taught))


@pytest.mark.parametrize("question", ANSWERS)
def test_a_small_model_learns_to_answer(opened: LoadedModel, question: str) -> None:
    assert "".join(answer(opened, [Turn("user", question)], 40, LIKELIEST)) == ANSWERS[question]


def test_samples_of_a_chat_run_are_answers(taught: Path) -> None:
    samples = read_run(taught).samples
    assert {sample.step for sample in samples} == {0, 60, 120}
    last = [sample for sample in samples if sample.step == 120]
    assert all(sample.prompt.endswith("Assistant:") for sample in last)
    assert {sample.text.strip() for sample in last} & set(ANSWERS.values())


def test_one_question_prints_the_answer_alone(taught: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(taught), "--prompt", "Who are you?", "--temperature", "0"]) == 0
    said = capsys.readouterr()
    assert said.out == "A toy.\n"
    assert "bytes tokenizer" in said.err


def test_a_pipe_is_answered_line_by_line(
    taught: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who are you?\n\n/new\nWhat is the sky?\n"))
    assert main(["chat", str(taught), "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "A toy.\nBlue.\n"


def test_what_was_said_before_is_read_again_and_the_oldest_is_forgotten(opened: LoadedModel) -> None:
    turns = [Turn("system", "S"), Turn("user", "first"), Turn("assistant", "one"), Turn("user", "second")]
    text = opened.tokenizer.decode(_prompt(opened, turns, 1000))
    assert text == (
        "<|endoftext|>System: S<|endoftext|>User: first<|endoftext|>Assistant: one<|endoftext|>"
        "User: second<|endoftext|>Assistant:"
    )
    short = opened.tokenizer.decode(_prompt(opened, turns, 45))
    assert short == "<|endoftext|>System: S<|endoftext|>User: second<|endoftext|>Assistant:"


def test_bad_wishes_are_one_line(taught: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(taught), "--prompt", " "]) == 1
    assert main(["chat", str(taught), "--tokens", "0"]) == 1
    assert main(["chat", str(tmp_path / "nothing")]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gptfit: ")]
    assert len(lines) == 3
    assert main(["chat", str(make_byte_run(tmp_path, 40)), "--prompt", "Hi", "--tokens", "2"]) == 0
    assert "not trained on conversations" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_on_a_terminal_ctrl_c_ends_an_answer_and_ctrl_d_the_conversation(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    endless = make_byte_run(tmp_path, 40)  # its end of text is as likely as any of 257 tokens
    command = [sys.executable, "-m", "gptfit", "chat", str(endless), "--tokens", "1000000", "--temperature", "0"]
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    try:
        read_until(ours, b"you> ")
        os.write(ours, b"Who are you?\n")
        read_until(ours, b"\n")
        begun = b""
        while len(begun) < 400:  # the answer has begun and does not end by itself
            begun += os.read(ours, 4096)
        assert child.poll() is None
        child.send_signal(signal.SIGINT)
        assert read_until(ours, b"you> ").endswith(b"\r\nyou> ")
        os.write(ours, b"\x04")
        assert child.wait(timeout=60) == 0
    finally:
        child.kill()  # where something above failed; ended ones do not mind
        child.wait()
        os.close(ours)


def read_until(descriptor: int, ending: bytes) -> bytes:
    found, patience = b"", time.monotonic() + 120
    while not found.endswith(ending) and time.monotonic() < patience:
        if select.select([descriptor], [], [], 1)[0]:
            found += os.read(descriptor, 4096)
    return found


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send")
def test_ctrl_c_through_a_pipe_ends_the_program(taught: Path) -> None:
    command = [sys.executable, "-m", "gptfit", "chat", str(taught)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    assert "bytes tokenizer" in child.stderr.readline()
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    assert said.strip().splitlines()[-1] == "gptfit: stopped"


def test_the_exported_template_gives_the_tokens_of_prepare(taught: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    assert main(["export", str(taught), "--to", "hf", "--out", str(tmp_path / "hf")]) == 0
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    messages = [{"role": "user", "content": " Who\n are you? "}, {"role": "assistant", "content": "é, 2 (two)"}]
    ids = loaded.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    turns = [Turn(one["role"], one["content"].strip()) for one in messages]
    tokenizer = load_tokenizer("bytes")
    assert list(ids) == conversation_tokens(turns, tokenizer)
    text = loaded.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert text == "<|endoftext|>User: Who\n are you?<|endoftext|>" + ANSWER_MARK


def test_the_template_is_in_a_gguf_file_too(taught: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    assert main(["export", str(taught), "--to", "gguf", "--out", str(tmp_path / "toy.gguf")]) == 0
    field = gguf.GGUFReader(tmp_path / "toy.gguf").fields["tokenizer.chat_template"]
    assert bytes(field.parts[field.data[0]]).decode() == JINJA


@pytest.fixture
def client(taught: Path) -> Iterator[TestClient]:
    begun = taught.parent / "begun"
    begun.mkdir(exist_ok=True)
    for name in ("run.jsonl", "ckpt.pt"):
        (begun / name).touch()
    app = watch_app(taught.parent, ("testserver",))
    yield TestClient(app)
    app.state.chat.end()


def test_the_page_streams_an_answer_and_refuses_what_it_should(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Chat with toy" in client.get("/chat?id=toy/run.jsonl").text
    assert "/chat?id=toy/run.jsonl" in client.get("/run?id=toy/run.jsonl").text
    asked = {"id": "toy/run.jsonl", "messages": [{"role": "user", "content": "Who are you?"}]}
    assert client.post("/api/chat", json=asked, headers={"host": "evil.example"}).status_code == 421
    assert (
        client.post("/api/chat", content=json.dumps(asked), headers={"content-type": "text/plain"}).status_code == 415
    )
    assert client.post("/api/chat", json={"id": "toy/run.jsonl"}).status_code == 400
    assert client.post("/api/chat", json={**asked, "id": "../../x/run.jsonl"}).status_code == 404
    assert client.get("/chat?id=nothing/run.jsonl").status_code == 404
    assert "Chat with begun" in client.get("/chat?id=begun/run.jsonl").text  # its log has no line yet
    lines = [json.loads(line) for line in client.post("/api/chat", json=asked).text.splitlines()]
    assert "ready" in lines[0]
    assert "".join(line.get("text", "") for line in lines)
    assert lines[-1] == {"end": True}
    wrong = {**asked, "messages": [{"role": "tool", "content": "x"}]}
    (line,) = client.post("/api/chat", json=wrong).text.splitlines()
    assert "turn 1 has role 'tool'" in json.loads(line)["error"]
    monkeypatch.setattr(chat_page, "LONGEST_SILENCE", 0.0)
    (line,) = client.post("/api/chat", json=asked).text.splitlines()
    assert "the model said nothing for" in json.loads(line)["error"]


ENDLESS = """
import json, sys, threading, time
def read():
    for line in sys.stdin:
        said.append(json.loads(line))
said = []
threading.Thread(target=read, daemon=True).start()
print(json.dumps({"ready": "endless"}), flush=True)
while not any(one.get("stop") for one in said):
    print(json.dumps({"text": "on and "}), flush=True)
    time.sleep(0.01)
print(json.dumps({"end": True}), flush=True)
time.sleep(60)
"""


def test_an_answer_that_nobody_reads_is_stopped_and_one_is_made_at_a_time(tmp_path: Path) -> None:
    child = ChatChild(lambda run: [sys.executable, "-c", ENDLESS], idle_seconds=0.1)
    first = child.ask(tmp_path, [])
    assert first is not None
    assert child.ask(tmp_path, []) is None
    while (line := first.next(30)) is None or "text" not in line:
        pass
    process = child._process
    assert process is not None
    first.close()
    assert child._timer is not None
    child._timer.join(30)  # the end of its thread, not of the process alone: until then the child is not asked
    assert process.poll() is not None  # nobody asked again within the idle time
    again = child.ask(tmp_path, [])
    assert again is not None
    again.close()
    child.end()


def test_a_stop_said_while_the_model_is_loaded_ends_that_answer_and_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"id": 1}\n{"stop": true}\n{"id": 2}\n'))
    monkeypatch.setattr(chat_lines.os, "_exit", lambda code: None)
    asked: chat_lines.Questions = queue.Queue()
    chat_lines._read(asked)
    (first, stopped), (second, other) = asked.get(), asked.get()
    assert (first, stopped.is_set(), second, other.is_set()) == ({"id": 1}, True, {"id": 2}, False)
    monkeypatch.setattr(chat, "answer", lambda *_: itertools.repeat("on and "))
    chat_lines._answer(None, [], 1, Picking(), stopped)  # type: ignore[arg-type]
    assert capsys.readouterr().out == '{"end": true}\n'


def test_a_child_that_cannot_load_says_why_in_one_line(tmp_path: Path) -> None:
    words = "import sys; print('Traceback', file=sys.stderr); sys.exit('gptfit: torch is not installed; pip install x')"
    child = ChatChild(lambda run: [sys.executable, "-c", words])
    asked = child.ask(tmp_path, [])
    assert asked is not None
    assert asked.next(60) == {"error": "torch is not installed; pip install x"}
    asked.close()
    child.end()
