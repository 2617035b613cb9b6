"""Files that somebody may have been sent, changed in one place: read, or refused in one line; never a traceback or a hang."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import re
import signal
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptfit import measured
from gptfit.config.keys import TrainConfig
from gptfit.config.read import read_config
from gptfit.config.start_model import known_shape, with_model_of
from gptfit.data.describe import describe_folder
from gptfit.data.journal import read_journal
from gptfit.data.options import PrepareOptions
from gptfit.data.prepare import prepare
from gptfit.data.sources import find_sources
from gptfit.data.tokenizer import alphabet_table, char_tokenizer, load_tokenizer
from gptfit.data.tokenizer_formats import to_tokenizer_json
from gptfit.data.train_bpe import train_tokenizer
from gptfit.dataset import read_dataset
from gptfit.errors import GptfitError
from gptfit.generate.eval_file import read_results
from gptfit.gpus import find
from gptfit.logs.open_run import open_run
from gptfit.plan.calibration import calibration_from_json, record_of
from gptfit.plan.plan import plan
from gptfit.plan.resolve import on_card, setting_of
from gptfit.plan.setting import speed_key
from gptfit.shape import ModelShape
from gptfit.verbs.inspect import folder_json, folder_lines
from tests.plan.test_calibration import made as made_calibration

HANG_SECONDS = 2.0
HANG_WITH_SYSTEM_SECONDS = 20.0  # a host that has to find memory first took 12 s for half a gigabyte
# Of a file's size: JSON of small numbers takes some thirty as python's objects; a table of all characters takes 9 MB.
MOST_TIMES, SPARE_BYTES = 50, 16 * 2**20
MANY = settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
SOME = settings(MANY, max_examples=60)  # where what is read is also used
ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 10**9, 10**30, 2**63, float("nan"), float("inf"), "", "x" * 2000, "\ud800", "../../etc/passwd",
    [], [None], [[]] * 50, {}, {"a": {"b": []}}, b"".hex(), "\x00",
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a nest of dictionaries and lists; of long lists the first few."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def changed(value: Any, path: tuple[Any, ...], odd: Any, how: str) -> Any:
    """A copy with one place replaced, removed or renamed."""
    if not path:
        return odd
    whole = copy.deepcopy(value)
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    if how == "remove":
        del inner[path[-1]]
    elif how == "rename" and isinstance(inner, dict):
        inner[str(odd)[:50]] = inner.pop(path[-1])
    else:
        inner[path[-1]] = odd
    return whole


def mutations(whole: Any) -> st.SearchStrategy[Any]:
    return st.builds(
        changed,
        st.just(whole),
        st.sampled_from(list(places(whole))),
        st.sampled_from(ODD_VALUES),
        st.sampled_from(["replace", "remove", "rename"]),
    )


@st.composite
def torn(draw: st.DrawFn, whole: bytes) -> bytes:
    """Cut, with a byte changed, or with a piece doubled."""
    place = draw(st.integers(0, max(0, len(whole) - 1)))
    how = draw(st.sampled_from(["cut", "flip", "double", "drop"]))
    if how == "cut":
        return whole[:place]
    if how == "flip":
        return whole[:place] + bytes([whole[place] ^ 1 << draw(st.integers(0, 7))]) + whole[place + 1 :]
    stop = place + draw(st.integers(1, 40))
    return whole[:stop] + whole[place:] if how == "double" else whole[:place] + whole[stop:]


@contextmanager
def no_hang() -> Iterator[None]:
    """Two seconds of this process's own computing, and twenty with what the system does for it: a busy machine takes nothing."""
    if sys.platform == "win32":
        yield
        return

    def hangs(*_: object) -> None:
        raise AssertionError("hangs")

    timers = (
        (signal.SIGVTALRM, signal.ITIMER_VIRTUAL, HANG_SECONDS),
        (signal.SIGPROF, signal.ITIMER_PROF, HANG_WITH_SYSTEM_SECONDS),
    )
    before = [signal.signal(name, hangs) for name, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (name, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(name, handler)


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Half a gigabyte more than now: a file of kilobytes must never ask for more."""
    if sys.platform != "linux":
        yield
        return
    import resource

    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**29, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def within(file: Path) -> Iterator[None]:
    """What python allocates meanwhile is a small multiple of the file."""
    tracemalloc.start()
    try:
        with no_hang(), bounded_memory():
            yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= MOST_TIMES * file.stat().st_size + SPARE_BYTES, (
        f"{peak:,} bytes for a file of {file.stat().st_size:,}"
    )


def either_way(read: Callable[[], object], file: Path | None = None) -> None:
    """It is read, or refused with one line that a person can act on; in no more time and memory than it is worth."""
    try:
        with within(file) if file else no_hang():
            read()
    except GptfitError as error:
        assert len(str(error).splitlines()) == 1
        assert len(str(error)) < 3000
        assert not re.search(r"Traceback|object at 0x", str(error))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    load_tokenizer("gpt2")  # the fallback, kept in memory: its megabytes belong to no file
    (folder / "a.txt").write_text("to be or not to be, that is the question\n" * 200)
    prepare(PrepareOptions((str(folder / "a.txt"),), folder / "out", tokenizer="chars"))
    return folder / "out"


@MANY
@given(data=st.data())
def test_a_changed_manifest(prepared: Path, data: st.DataObject) -> None:
    whole = json.loads((prepared / "manifest.json").read_text())
    copy_of = prepared.parent / "copy"
    copy_of.mkdir(exist_ok=True)
    for file in prepared.glob("*.*"):
        (copy_of / file.name).write_bytes(file.read_bytes())
    text = json.dumps(data.draw(mutations(whole)))
    content = data.draw(st.one_of(st.just(text.encode()), torn(text.encode())))
    (copy_of / "manifest.json").write_bytes(content)

    def read() -> None:
        info = read_dataset(copy_of)
        load_tokenizer(info)
        assert info.bytes_per_token is None or info.bytes_per_token >= 0
        found = describe_folder(copy_of)
        assert folder_lines(found)
        json.dumps(folder_json(found))

    either_way(read, copy_of / "train.bin")


@MANY
@given(data=st.data())
def test_a_changed_meta_pkl(prepared: Path, data: st.DataObject) -> None:
    whole = pickle.loads((prepared / "meta.pkl").read_bytes())
    folder = prepared.parent / "bare"
    folder.mkdir(exist_ok=True)
    for name in ("train.bin", "val.bin"):
        (folder / name).write_bytes((prepared / name).read_bytes())
    content = pickle.dumps(data.draw(mutations(whole)))
    (folder / "meta.pkl").write_bytes(data.draw(st.one_of(st.just(content), torn(content))))
    either_way(lambda: load_tokenizer(read_dataset(folder)), folder / "meta.pkl")


@pytest.fixture(scope="module")
def tokenizers(prepared: Path) -> list[dict[str, Any]]:
    """A table of characters, and pairs of bytes as `gptfit tokenizer train` writes them."""
    pairs = prepared.parent / "bpe.json"
    train_tokenizer([str(prepared.parent / "a.txt")], pairs, 270)
    table = to_tokenizer_json(char_tokenizer(alphabet_table(set("abcdefgh\n"))))
    return [json.loads(table), json.loads(pairs.read_bytes())]


@MANY
@given(data=st.data())
def test_a_changed_tokenizer_json(tokenizers: list[dict[str, Any]], tmp_path: Path, data: st.DataObject) -> None:
    text = json.dumps(data.draw(mutations(data.draw(st.sampled_from(tokenizers))))).encode()
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data.draw(st.one_of(st.just(text), torn(text))))
    either_way(lambda: load_tokenizer(path).encode("abc"), path)


STARTING_MODEL = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 16, "vocab_size": 65}


@MANY
@given(data=st.data())
def test_a_changed_config_json_of_a_model_to_start_from(tmp_path: Path, data: st.DataObject) -> None:
    """`plan` looks at no more than this of it."""
    text = json.dumps(data.draw(mutations(STARTING_MODEL))).encode()
    path = tmp_path / "config.json"
    path.write_bytes(data.draw(st.one_of(st.just(text), torn(text))))

    def read() -> None:
        shape = known_shape(str(tmp_path))
        if shape is not None:
            config = with_model_of(CONFIG, shape).replace(block_size=16)
            json.dumps(plan(config, shape, find("RTX 4070")).as_json(), allow_nan=False)

    either_way(read, path)


HEADER = {
    "event": "header",
    "name": "run",
    "config": {"n_layer": 2, "max_iters": 10, "learning_rate": 1e-3, "batch_size": 4, "dataset": "x"},
    "shape": {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 65, "bias": False},
    "parameters": 1000,
    "flops_per_token": 6000.0,
    "tokens_per_step": 64,
    "device": {"name": "cpu", "kind": "cpu", "dtype": "float32", "peak_tflops": 0.1, "peak_basis": "measured"},
    "dataset": {"folder": "x", "train_tokens": 5000, "val_tokens": 1000},
}
STEPS = [
    {"event": "step", "step": i, "loss": 4.0 - i / 10, "ms": 5.0, "tokens": 64 * i, "seconds": i / 10}
    for i in range(12)
]
EVALS = [{"event": "eval", "step": i, "train_loss": 4.0, "val_loss": 4.1 - i / 10, "seconds": i / 10} for i in (0, 6)]


@SOME
@given(data=st.data())
def test_a_changed_run_log(tmp_path: Path, data: st.DataObject) -> None:
    from gptfit.compare.comparison import compare_runs
    from gptfit.compare.comparison_json import comparison_json
    from gptfit.compare.sentences import explain

    events = data.draw(mutations([HEADER, *STEPS, *EVALS, {"event": "end", "reason": "max_iters", "step": 12}]))
    lines = events if isinstance(events, list) else [events]
    text = "\n".join(json.dumps(event) for event in lines).encode() + b"\n"
    path = tmp_path / "run.jsonl"
    path.write_bytes(data.draw(st.one_of(st.just(text), torn(text))))

    def read() -> None:
        run = open_run(path)
        comparison = compare_runs([run, run])
        json.dumps(comparison_json(comparison, explain(comparison)), allow_nan=False)

    either_way(read, path)


SHAPE = ModelShape(n_layer=4, n_head=4, n_embd=256, block_size=256, vocab_size=1024)
CONFIG = TrainConfig(n_layer=4, n_head=4, n_embd=256, block_size=256, vocab_size=1024, batch_size=8, compile=False)


def facts() -> list[dict[str, Any]]:
    """One of each kind, of the setting that is planned below."""
    setting = setting_of(CONFIG.replace(dtype="float32"), SHAPE, on_card(None, None), 1)
    speed = measured.MeasuredSpeed(speed_key(setting, "cpu"), "2", 1e4, 20.0, 5.0, 1.0, 1.0, 1.0, "tune", 1.0)
    loss = measured.MeasuredLoss("x", "gpt2", 1000, 5000, 5000, "gpt2", "adamw", 3.2, "run", 1.0)
    kinds = (("speed", speed), ("loss", loss), ("device", record_of(made_calibration())))
    return [json.loads(json.dumps({"measured": kind, "version": 1, **asdict(fact)})) for kind, fact in kinds]


FACTS = facts()


@SOME
@given(data=st.data())
def test_a_changed_cache_of_measured_facts(tmp_path: Path, data: st.DataObject) -> None:
    """Read, and used by a plan: a fact that makes no sense is left out, and no number of it makes the plan fail."""
    at = data.draw(st.sampled_from(range(len(FACTS))))
    changed_facts = [*FACTS[:at], data.draw(mutations(FACTS[at])), *FACTS[at + 1 :]]
    text = "\n".join(json.dumps(fact) for fact in changed_facts).encode() + b"\n"
    path = tmp_path / "measured.jsonl"
    path.write_bytes(data.draw(st.one_of(st.just(text), torn(text))))

    def read() -> None:
        found = measured.read(path)
        assert all(isinstance(fact.dataset, str) and fact.val_loss > 0 for fact in found.losses)
        for gpu in (None, find("RTX 4070")):
            answer = plan(CONFIG, SHAPE, gpu, measurements=found, device_name="cpu" if gpu else None)
            json.dumps(answer.as_json(), allow_nan=False)

    either_way(read, path)


@SOME
@given(data=st.data())
def test_a_changed_card_json(data: st.DataObject) -> None:
    """What somebody reports of a card: its calibration is one, or is refused as the reader says it refuses."""
    checks = [{"check": "calibration", "level": "ok", "seconds": 100.0}]
    whole = json.loads(json.dumps({"gptfit": "1", "checks": checks, "calibration": made_calibration().as_json()}))
    text = json.dumps(data.draw(mutations(whole))).encode()
    with no_hang(), contextlib.suppress(ValueError, KeyError, TypeError):
        found = calibration_from_json(json.loads(data.draw(st.one_of(st.just(text), torn(text))))["calibration"])
        known = measured.Measurements(devices=(record_of(found),))
        try:
            answer = plan(CONFIG, SHAPE, None, measurements=known, device_name=None).as_json()
        except GptfitError:
            return
        except (ValueError, KeyError, TypeError) as error:
            raise AssertionError(f"a plan with it fails: {error!r}") from None
        json.dumps(answer, allow_nan=False)


@MANY
@given(data=st.data())
def test_a_changed_eval_json(tmp_path: Path, data: st.DataObject) -> None:
    opened = SimpleNamespace(path=tmp_path, checkpoint=SimpleNamespace(iter_num=3), shape=SHAPE)
    identity = {"file": tmp_path.name, "step": 3, "weights": SHAPE.n_weights}
    whole = {"checkpoint": identity, "results": {"val_loss": {"loss": 3.2, "tokens": 100, "bits_per_byte": None}}}
    text = json.dumps(data.draw(mutations(whole))).encode()
    path = tmp_path / "eval.json"
    path.write_bytes(data.draw(st.one_of(st.just(text), torn(text))))

    def read() -> None:
        for values in (read_results(opened) or {}).values():  # type: ignore[arg-type]
            assert all(value is None or abs(value) <= 1e18 for value in values.values())

    either_way(read, path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
@pytest.mark.parametrize(
    "name",
    ["manifest.json", "meta.pkl", "tokenizer.json", "measured.jsonl", "config.json", "mine.py", "a.jsonl", "log.txt"],
)
def test_a_pipe_where_a_file_should_be_is_not_waited_for(tmp_path: Path, name: str) -> None:
    """Nobody writes into it, and nobody should wait for that."""
    os.mkfifo(tmp_path / name)
    (tmp_path / "train.bin").write_bytes(bytes(100))
    readers: dict[str, Callable[[], object]] = {
        "tokenizer.json": lambda: load_tokenizer(tmp_path / name),
        "measured.jsonl": lambda: measured.read(tmp_path / name),
        "config.json": lambda: known_shape(str(tmp_path)),
        "mine.py": lambda: read_config([str(tmp_path / name)]),
        "a.jsonl": lambda: find_sources([str(tmp_path / name)]),
        "log.txt": lambda: open_run(tmp_path / name),
    }
    either_way(readers.get(name, lambda: read_dataset(tmp_path)))


@MANY
@given(data=st.data())
def test_a_changed_journal(tmp_path: Path, data: st.DataObject) -> None:
    from gptfit.data.journal import Journal

    whole = json.loads(Journal({"tokenizer": "gpt2"}, ({"path": "a", "size": 1, "stamp": "1"},), unit=3).as_json())
    path = tmp_path / "prepare.journal.json"
    text = json.dumps(data.draw(mutations(whole))).encode()
    path.write_bytes(data.draw(st.one_of(st.just(text), torn(text))))
    either_way(lambda: read_journal(path), path)
