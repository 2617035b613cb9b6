"""More commands under test: those that only read, those that write a small file, and pages that are asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from .commands import MANY_JOURNALS, MODEL, contents, small_data, stories, two_runs, write_parquet
from .harness import Command, Server

# What `doctor --card` does after its minutes of measuring, with one check that is quick and a calibration made up.
CARD_SCRIPT = """
import sys
import gptfit.doctor.card as card
from gptfit.doctor.card_checks import ALL
from gptfit.plan.calibration import Calibration

card.ALL = [check for check in ALL if check.name == "spilling"]  # on a CPU it is skipped with a reason
card._calibrate = lambda *_: (
    card.CardLine(card.CALIBRATION, card.Verdict("ok", "made up"), 0.0),
    Calibration("cpu", "2", {}, {}, time=1.0),
)
card._plan_against_runs = lambda *_: card.CardLine(card.PLAN, card.Verdict("ok", "made up"), 0.0)
from gptfit.cli import main
sys.exit(main(["doctor", "--card", "--device=cpu", "--compile=False", "--out=" + sys.argv[1]]))
"""
# `prepare --engine ray` with tasks that run where they are ordered, one after another: four shards with journals, locks
# and token files of their own. Ray's processes would be other machines, whose disks are not disturbed.
SHARDS_SCRIPT = """
import sys, types

class TaskError(Exception):
    def __init__(self, cause):
        self.cause = cause

class Task:
    def __init__(self, function, *words):
        self.answer, self.error = None, None
        try:
            self.answer = function(*words)
        except Exception as error:
            self.error = TaskError(error)

def get(task):
    if task.error:
        raise task.error
    return task.answer

ray = types.ModuleType("ray")
ray.exceptions = types.SimpleNamespace(RayTaskError=TaskError, RayError=TaskError)
ray.is_initialized, ray.put, ray.get = lambda: True, lambda value: value, get
ray.wait = lambda tasks, timeout: (tasks, [])
ray.cancel = lambda task, force: None
ray.remote = lambda **_: lambda function: types.SimpleNamespace(remote=lambda *words: Task(function, *words))
sys.modules["ray"] = ray
from gptfit.cli import main
folder = sys.argv[1]
sources = [folder + "/a.parquet", folder + "/b.parquet"]
sys.exit(main(["prepare", *sources, "--out=" + folder + "/out", "--tokenizer=bytes", "--workers=1", "--engine=ray"]))
"""
# Every page of `watch`, once. An answer that is not one of ours is an exception here.
WATCH_SCRIPT = """
import sys
from pathlib import Path
from starlette.testclient import TestClient
from gptfit.pages.live import watch_app

client = TestClient(watch_app(Path(sys.argv[1]), ("testserver",)))
for address in ("/", "/api/runs", "/run?id=out", "/compare?id=out&id=other", "/api/news?id=out&from=0", "/page/charts.js"):
    for _ in range(2):
        try:
            answer = client.get(address)
        except KeyboardInterrupt:  # as the server of `gptfit watch` takes it
            sys.exit(130)
        assert answer.status_code in (200, 404), f"{address}: {answer.status_code}"
"""

Words = Callable[[Path], list[str]]
Make = Callable[[Path, Server], None]


def other_commands() -> list[Command]:
    return [
        Command(
            "prepare several shards",
            _script("shards.py", ""),
            _with_parquet(SHARDS_SCRIPT, "shards.py"),
            contents,
            settings=MANY_JOURNALS,
            needs_torch=False,
        ),
        Command("prepare chat", _prepare_chat, _chat, contents, settings=MANY_JOURNALS, needs_torch=False),
        Command("inspect FILE", lambda f: ["inspect", str(f / "a.parquet")], _parquet, contents, needs_torch=False),
        Command("inspect FOLDER", lambda f: ["inspect", str(f / "tiny")], small_data, contents, needs_torch=False),
        Command(
            "tokenizer train",
            _tokenizer,
            _parquet,
            contents,
            again=_unless(_tokenizer, "new/bpe.json"),
            needs_torch=False,
        ),
        Command("plan --write", _plan, small_data, contents, again=_unless(_plan, "new/mine.py"), needs_torch=False),
        Command(
            "propose --write",
            _propose,
            _enough_data,
            contents,
            again=_unless(_propose, "new/mine.py"),
            needs_torch=False,
        ),
        Command(
            "configs --out", _configs, _nothing, contents, again=_unless(_configs, "new/mine.py"), needs_torch=False
        ),
        Command("doctor", lambda f: ["doctor", *_small(f), *MODEL], small_data, contents, report="^error "),
        Command("doctor --card", _script("card.py", "card.json"), _with(CARD_SCRIPT, "card.py"), _names),
        Command("watch", _script("watch.py", ""), _with_runs(WATCH_SCRIPT, "watch.py"), contents),
        Command("runs", lambda f: ["runs", str(f)], two_runs, contents),
        Command("compare to a file", _compare, two_runs, contents, is_heard=True),
        Command("plan to a file", lambda f: _plan(f)[:-1], small_data, contents, is_heard=True, needs_torch=False),
    ]


def _nothing(folder: Path, server: Server) -> None:
    pass


def _parquet(folder: Path, server: Server) -> None:
    write_parquet(folder / "a.parquet", stories(60, 0))


def _with_parquet(script: str, name: str) -> Make:
    def prepare(folder: Path, server: Server) -> None:
        for number, source in enumerate(("a.parquet", "b.parquet")):
            write_parquet(folder / source, stories(40, number))
        _with(script, name)(folder, server)

    return prepare


def _chat(folder: Path, server: Server) -> None:
    told = stories(60, 0)
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in zip(told[::2], told[1::2], strict=True)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _prepare_chat(folder: Path) -> list[str]:
    words = ["--chat", "--tokenizer=bytes", "--workers=1"]
    return ["prepare", str(folder / "chat.jsonl"), f"--out={folder / 'out'}", *words]


def _enough_data(folder: Path, server: Server) -> None:
    """For which some model can be proposed."""
    small_data(folder, server, 30_000)


def _unless(argv: Words, made: str) -> Words:
    """A file that has its name is whole, and is not written over."""
    return lambda folder: ["keys", "batch_size"] if (folder / made).exists() else argv(folder)


def _small(folder: Path) -> list[str]:
    return [f"--dataset={folder / 'tiny'}", "--device=cpu", "--compile=False", f"--out_dir={folder / 'out'}"]


def _tokenizer(folder: Path) -> list[str]:
    return ["tokenizer", "train", str(folder / "a.parquet"), "--vocab-size=280", f"--out={folder / 'new' / 'bpe.json'}"]


def _plan(folder: Path) -> list[str]:
    return ["plan", "--gpu=4070", f"--dataset={folder / 'tiny'}", f"--write={folder / 'new' / 'mine.py'}"]


def _propose(folder: Path) -> list[str]:
    words = ["--gpu=4070", "--hours=2", f"--data={folder / 'tiny'}"]
    return ["propose", *words, f"--write={folder / 'new' / 'mine.py'}"]


def _configs(folder: Path) -> list[str]:
    return ["configs", "modern_cpu", f"--out={folder / 'new' / 'mine.py'}"]


def _compare(folder: Path) -> list[str]:
    return ["compare", str(folder / "out"), str(folder / "other")]


def _with(script: str, name: str) -> Make:
    def prepare(folder: Path, server: Server) -> None:
        (folder.parent / name).write_text(script, encoding="utf-8")

    return prepare


def _with_runs(script: str, name: str) -> Make:
    def prepare(folder: Path, server: Server) -> None:
        two_runs(folder, server)
        _with(script, name)(folder, server)

    return prepare


def _script(name: str, argument: str) -> Words:
    """Beside the folder, so that reading it is no call of the command."""
    return lambda folder: ["run-script", str(folder.parent / name), str(folder / argument)]


def _names(folder: Path) -> list[str]:
    return sorted(contents(folder))
