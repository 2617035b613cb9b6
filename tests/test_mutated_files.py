"""Files that somebody may have been sent, changed in one place: read, or refused in one line; never a traceback or a hang."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptfit import measured
from gptfit.data.journal import read_journal
from gptfit.data.options import PrepareOptions
from gptfit.data.prepare import prepare
from gptfit.data.tokenizer import alphabet_table, char_tokenizer, load_tokenizer
from gptfit.data.tokenizer_formats import to_tokenizer_json
from gptfit.dataset import read_dataset
from gptfit.errors import GptfitError
from gptfit.logs.open_run import open_run

MANY = settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
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


def either_way(read: Callable[[], object]) -> None:
    """It is read, or refused with one line that a person can act on."""
    try:
        read()
    except GptfitError as error:
        assert len(str(error).splitlines()) == 1
        assert len(str(error)) < 3000
        assert not re.search(r"Traceback|object at 0x", str(error))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
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

    either_way(read)


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
    either_way(lambda: load_tokenizer(read_dataset(folder)))


@MANY
@given(data=st.data())
def test_a_changed_tokenizer_json(tmp_path: Path, data: st.DataObject) -> None:
    tokenizer = char_tokenizer(alphabet_table(set("abcdefgh\n")))
    whole = json.loads(to_tokenizer_json(tokenizer))
    text = json.dumps(data.draw(mutations(whole))).encode()
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data.draw(st.one_of(st.just(text), torn(text))))
    either_way(lambda: load_tokenizer(path).encode("abc"))


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


@MANY
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

    either_way(read)


@MANY
@given(data=st.data())
def test_a_changed_cache_of_measured_facts(tmp_path: Path, data: st.DataObject) -> None:
    loss = measured.MeasuredLoss("x", "gpt2", 1000, 5000, 5000, "gpt2", "adamw", 3.2, "run", 1.0)
    whole = [json.loads(json.dumps(measured._to_json(loss)))]
    text = "\n".join(json.dumps(fact) for fact in [*whole, data.draw(mutations(whole[0]))]).encode() + b"\n"
    path = tmp_path / "measured.jsonl"
    path.write_bytes(data.draw(st.one_of(st.just(text), torn(text))))
    found = measured.read(path)
    for fact in found.losses:
        assert isinstance(fact.val_loss, int | float)
        assert isinstance(fact.dataset, str)
        assert isinstance(fact.tokens, int)


@MANY
@given(data=st.data())
def test_a_changed_journal(tmp_path: Path, data: st.DataObject) -> None:
    from gptfit.data.journal import Journal

    whole = json.loads(Journal({"tokenizer": "gpt2"}, ({"path": "a", "size": 1, "stamp": "1"},), unit=3).as_json())
    path = tmp_path / "prepare.journal.json"
    text = json.dumps(data.draw(mutations(whole))).encode()
    path.write_bytes(data.draw(st.one_of(st.just(text), torn(text))))
    either_way(lambda: read_journal(path))
