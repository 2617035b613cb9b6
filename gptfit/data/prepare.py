"""Prepare: sources to train.bin, val.bin and manifest.json; can be killed at any instant and run again."""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from gptfit.conversation import TEMPLATE
from gptfit.data.bins import remove_file, write_error, write_file
from gptfit.data.chat import check_chat_tokenizer
from gptfit.data.documents import read_unit
from gptfit.data.engines import TokenizerSpec, Written, write_local, write_ray
from gptfit.data.forecast import WorkPlan, free_bytes, lay_out
from gptfit.data.journal import Journal
from gptfit.data.options import Forecast, PrepareOptions, PrepareProgress, PrepareReport, Silent
from gptfit.data.parquet import OpenFiles
from gptfit.data.shard import ShardOptions
from gptfit.data.tokenizer import Tokenizer, alphabet_table, char_tokenizer, load_tokenizer, nanogpt_meta
from gptfit.dataset import FORMAT, MANIFEST, DatasetInfo, read_dataset
from gptfit.errors import DataError
from gptfit.files import FolderLock, remove_leftovers
from gptfit.units import gib

# The names of what prepare makes, as a regular expression.
OURS = r"(?:(?:train|val)(?:-\d{5})?(?:_mask)?\.bin|prepare\.journal(?:\.\d+-of-\d+)?\.json|manifest\.json|meta\.pkl|tokenizer\.json|train\.documents)"
MOST_NOTES = 5  # lines about bad rows of one kind that are passed on; the manifest counts all


def forecast(options: PrepareOptions, report: PrepareReport | None = None) -> Forecast:
    """What prepare would do, without doing it."""
    return lay_out(options, _known_tokenizer(options), report or Silent()).forecast


def prepare(options: PrepareOptions, report: PrepareReport | None = None) -> DatasetInfo:
    """Make the data folder, or finish making it; a folder already made with these options is left as it is."""
    report = report or Silent()
    tokenizer = _known_tokenizer(options)
    laid = lay_out(options, tokenizer, report)
    with _only_one(options.out):
        remove_leftovers(options.out, OURS, is_ours_alone=True)
        if options.restart:
            _remove_old(options.out)
        tokenizer = tokenizer or _char_tokenizer(laid, report)
        fresh = Journal(options.fingerprint(tokenizer.sha256), _stamps(laid))
        if _already_done(options.out, fresh):
            report.note(f"{options.out}: already prepared with these options; nothing to do")
            return read_dataset(options.out)
        _check_space(options.out, laid.forecast)
        report.forecast(laid.forecast)
        _finish(options, laid, tokenizer, _write(options, laid, tokenizer, fresh, report))
    return read_dataset(options.out)


def _only_one(folder: Path) -> FolderLock:
    """The folder, made if need be, and nobody else preparing in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FolderLock(folder, "preparing data in", "wait for it or use another --out", DataError)
    except OSError as error:
        raise write_error(folder, error) from None


def _known_tokenizer(options: PrepareOptions) -> Tokenizer | None:
    tokenizer = None if options.tokenizer == "chars" else load_tokenizer(options.tokenizer)
    return check_chat_tokenizer(tokenizer) if options.chat else tokenizer


def _char_tokenizer(laid: WorkPlan, report: PrepareReport) -> Tokenizer:
    """All characters of all documents, found by reading everything once."""
    report.note("reading everything once to find its characters")
    characters: set[str] = set()
    with closing(OpenFiles()) as files:
        for unit in laid.units:
            for batch in read_unit(laid.reading, unit, files):
                characters.update(*batch.texts)
    if laid.reading.split.kind == "hash":
        characters.add("\n")  # ends each document
    return char_tokenizer(alphabet_table(characters))


def _stamps(laid: WorkPlan) -> tuple[dict[str, Any], ...]:
    return tuple({"path": s.name, "size": s.size, "stamp": s.stamp} for s in laid.reading.sources)


def _remove_old(folder: Path) -> None:
    for path in list(folder.iterdir()):
        if re.fullmatch(rf"{OURS}(?:\.part)?", path.name):
            remove_file(path)


def _already_done(folder: Path, fresh: Journal) -> bool:
    """True for the same work; an error for anything else that would be overwritten."""
    if any(folder.glob("prepare.journal*.json")):
        return False
    if not (folder / MANIFEST).exists():
        foreign = [name for name in ("train.bin", "val.bin", "meta.pkl") if (folder / name).exists()]
        if foreign:
            raise DataError(
                f"{folder}: already holds {foreign[0]}", fix="use another --out, or --restart to replace it"
            )
        return False
    read_dataset(folder)
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    sources = [{key: entry.get(key) for key in ("path", "size", "stamp")} for entry in manifest.get("sources", ())]
    if manifest.get("options") == fresh.options and sources == list(fresh.sources):
        return True
    raise DataError(
        f"{folder}: already holds a data set made otherwise", fix="use another --out, or --restart to replace it"
    )


def _check_space(folder: Path, plan: Forecast) -> None:
    written = sum(path.stat().st_size for path in folder.glob("*.part"))
    if plan.disk_needed - written > free_bytes(folder):
        raise DataError(
            f"{folder}: needs about {gib(plan.disk_needed - written)} but {gib(free_bytes(folder))} is free",
            fix="free some space or use --limit",
        )


def _write(
    options: PrepareOptions, laid: WorkPlan, tokenizer: Tokenizer, fresh: Journal, report: PrepareReport
) -> Written:
    job = ShardOptions(
        laid.reading,
        separator(tokenizer, laid),
        options.n_workers,
        options.limit_documents,
        options.limit_tokens,
        tokenizer.dtype if options.chat else None,
    )
    passing = _ProgressRelay(report)
    is_chars = tokenizer.name == "chars"
    alphabet = {piece.decode(): token for token, piece in enumerate(tokenizer.pieces)} if is_chars else None
    spec = TokenizerSpec(options.tokenizer, alphabet)
    if options.engine == "local":
        return write_local(job, laid.units, options.out, fresh, spec, passing)
    return write_ray(job, laid.units, options.out, fresh, spec, passing, options.workers)


def separator(tokenizer: Tokenizer, laid: WorkPlan) -> int | None:
    """The token after each document: end-of-text, a newline for characters, none within one continuous text."""
    if laid.reading.split.kind == "tail":
        return None
    return tokenizer.encode("\n")[0] if tokenizer.name == "chars" else tokenizer.end_of_text


class _ProgressRelay:
    """Passes states on as progress, and the first few lines of each kind of problem."""

    def __init__(self, report: PrepareReport) -> None:
        self._report = report
        self._told: Counter[str] = Counter()

    def __call__(self, state: Journal, problems: list[str]) -> None:
        for line in problems:
            kind = line.rsplit(":", 1)[-1]
            self._told[kind] += 1
            if self._told[kind] <= MOST_NOTES:
                self._report.note(line)
        counts = state.counts
        self._report.progress(
            PrepareProgress(
                source_bytes=state.source_bytes,
                tokens=counts["train.tokens"] + counts["val.tokens"],
                documents=counts["train.documents"] + counts["val.documents"],
                seconds=state.seconds,
                counts=counts,
            )
        )


def _finish(options: PrepareOptions, laid: WorkPlan, tokenizer: Tokenizer, written: Written) -> None:
    """The vocabulary's files, then the manifest, then the journal goes: from here the folder is a data set."""
    out, counts = options.out, written.state.counts
    if counts["train.documents"] + counts["val.documents"] + counts["train.tokens"] == 0:
        _remove_old(out)
        raise DataError(f"no documents in {', '.join(options.sources)}: all {counts['rows']:,} rows were empty or bad")
    vocabulary = None
    if tokenizer.source is not None:
        vocabulary = "tokenizer.json"
        write_file(out / vocabulary, tokenizer.source.read_bytes())
    if tokenizer.name != "gpt2":
        vocabulary = vocabulary or "meta.pkl"
        write_file(out / "meta.pkl", pickle.dumps(nanogpt_meta(tokenizer)))
    manifest = {
        "format": FORMAT,
        "version": 1,
        "tokenizer": tokenizer.manifest_entry(vocabulary),
        "dtype": tokenizer.dtype,
        **({"chat": TEMPLATE} if options.chat else {}),
        "splits": {name: _split_entry(name, files, counts) for name, files in written.files.items() if files},
        "skipped": _section("skipped", counts),
        "replaced": _section("replaced", counts),
        "skipped_files": laid.skipped_files,
        "split_rule": laid.reading.split.as_json(),
        "options": written.state.options,
        "sources": [entry | {"rows": laid.rows.get(i)} for i, entry in enumerate(_stamps(laid))],
    }
    write_file(out / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False).encode())
    for journal in [*out.glob("prepare.journal*.json"), *out.glob("prepare.journal.*-of-*.lock")]:
        remove_file(journal)


def _split_entry(name: str, files: list[str], counts: Counter[str]) -> dict[str, Any]:
    entry = {key: counts[f"{name}.{key}"] for key in ("tokens", "documents", "bytes")}
    if counts["train.counted"] + counts["val.counted"]:
        entry["counted"] = counts[f"{name}.counted"]
    return entry | {"files": files}


def _section(name: str, counts: Counter[str]) -> dict[str, int]:
    return {key.split(".", 1)[1]: n for key, n in sorted(counts.items()) if key.startswith(f"{name}.")}
