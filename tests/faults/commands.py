"""The commands under test: what is in the folder before, what is typed, and what must come out equal."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gptfit import measured
from gptfit.logs.runlog import read_run

from .harness import Command, Server

MANY_JOURNALS = {"gptfit.data.shard.JOURNAL_SECONDS": 0.0, "gptfit.data.work.BATCH_BYTES": 6000}
SHORT_TRIALS = {"gptfit.tune.measuring.TIMED_SECONDS": 0.02, "gptfit.tune.search.MOST_ROUNDS": 1}
MODEL = ("--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=4", "--vocab_size=65")
MACHINE = ("--gradient_accumulation_steps=2", "--device=cpu", "--dtype=float32", "--compile=False")
RATES = ("--learning_rate=1e-2", "--min_lr=1e-3", "--warmup_iters=1", "--lr_decay_iters=6")
PACE = ("--max_iters=6", "--eval_interval=2", "--eval_iters=2", "--log_interval=1")

COPIES = r"ckpt-\d+\.pt"
# Three saves: the second makes a copy of the first, the third gives it up.
SHORT = ("--max_iters=3", "--lr_decay_iters=3", "--eval_interval=1", "--eval_iters=1", "--keep_checkpoints=1")


def all_commands() -> dict[str, Command]:
    from .other_commands import other_commands  # which are made of what is here

    found = [
        *(_prepare_command(name, *words) for name, words in PREPARES.items()),
        *(_train_command(name, *words) for name, words in TRAININGS.items()),
        _train_command("train short", *SHORT),
        _over_an_earlier_run(),
        *(_export_command(kind) for kind in ("nanogpt", "hf", "gguf")),
        _compare_command(),
        _eval_command(),
        _sample_command(),
        _tune_command(),
        _resume_command(),
        replace(_train_command("train short to a file", *SHORT), is_heard=True),
        replace(_prepare_command("prepare chars to a file", "--tokenizer=chars"), is_heard=True),
        *other_commands(),
    ]
    return {command.name: command for command in found}


PREPARES = {
    "prepare gpt2": ("--tokenizer=gpt2",),
    "prepare chars": ("--tokenizer=chars", "--shuffle"),
    "prepare limit": ("--tokenizer=gpt2", "--limit=20"),
    "prepare several files": ("--tokenizer=chars", "--val-fraction=0"),
    "prepare text": ("--tokenizer=bytes",),
    "prepare restart": ("--tokenizer=bytes", "--restart"),
}
TRAININGS = {
    "train": ("--keep_checkpoints=2",),
    "train random": ("--sampling=random",),
    "train muon": ("--optimizer=muon", "--keep_checkpoints=1"),
    "train wsd": ("--schedule=wsd", "--keep_checkpoints=1"),
    "train random muon": ("--sampling=random", "--optimizer=muon", "--keep_checkpoints=2"),
}


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder by its digest; folders too, so that an empty one left behind is seen."""
    return {str(path.relative_to(folder)): _content(path) for path in sorted(folder.rglob("*"))}


def _content(path: Path) -> str:
    if path.is_dir():
        return "folder"
    return "lock" if path.name == ".lock" else hashlib.sha256(path.read_bytes()).hexdigest()  # a lock names its process


# prepare


def _prepare_command(name: str, *words: str) -> Command:
    sources = {"prepare several files": ["a.parquet", "b.parquet"], "prepare text": ["a.txt"]}.get(name, ["a.parquet"])

    def prepare(folder: Path, server: Server) -> None:
        for number, source in enumerate(sources):
            if source.endswith(".txt"):
                (folder / source).write_text("\n".join(stories(40, number)), encoding="utf-8")
            else:
                write_parquet(folder / source, stories(40, number))
        if "restart" in name:
            _must(server, folder, [*argv(folder), "--seed=3"])

    def argv(folder: Path) -> list[str]:
        return [
            "prepare",
            *(str(folder / source) for source in sources),
            f"--out={folder / 'out'}",
            *words,
            "--workers=1",
        ]

    def state(folder: Path) -> dict[str, str]:
        return contents(folder / "out")

    return Command(name, argv, prepare, state, settings=MANY_JOURNALS, needs_torch=False)


def stories(n: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    words = ["the", "cat", "sat", "on", "a", "naïve", "mat;", "don't", "42", "times\n\n漢字", "said", "she's"]
    return [f"{seed}/{i} " + " ".join(rng.choices(words, k=rng.randint(20, 90))) for i in range(n)]


def write_parquet(path: Path, texts: list[str]) -> None:
    pq.write_table(pa.table({"text": texts}), path, row_group_size=15)


# train


def _train_words(folder: Path) -> list[str]:
    return [f"--dataset={folder / 'tiny'}", f"--out_dir={folder / 'out'}", *MODEL, *MACHINE, *RATES, *PACE]


def small_data(folder: Path, server: Server, tokens: int = 3000) -> None:
    """A noisy cycle through 65 ids."""
    tiny, of_train = folder / "tiny", tokens * 5 // 6
    tiny.mkdir()
    noise = np.random.default_rng(0)
    ids = (np.arange(tokens) * 7 + noise.integers(0, 3, tokens)) % 65
    ids[:of_train].astype(np.uint16).tofile(tiny / "train.bin")
    ids[of_train:].astype(np.uint16).tofile(tiny / "val.bin")
    letters = [chr(33 + i) for i in range(65)]
    meta = {"vocab_size": 65, "itos": dict(enumerate(letters)), "stoi": {c: i for i, c in enumerate(letters)}}
    (tiny / "meta.pkl").write_bytes(pickle.dumps(meta))


def _train_command(name: str, *extra: str) -> Command:
    def argv(folder: Path) -> list[str]:
        return ["train", *_train_words(folder), *extra]

    def again(folder: Path) -> list[str]:
        """What a person types: go on if there is something to go on from, else start again."""
        is_there = (folder / "out" / "ckpt.pt").is_file()
        return ["train", "--init_from=resume", f"--out_dir={folder / 'out'}"] if is_there else argv(folder)

    return Command(name, argv, small_data, _run_state, again, spare=COPIES, promise=_saved)


def _over_an_earlier_run() -> Command:
    """A start from scratch where a run has been: the earlier one is moved aside, whatever happens meanwhile."""

    def prepare(folder: Path, server: Server) -> None:
        small_data(folder, server)
        _must(server, folder, ["train", *_train_words(folder), "--max_iters=4", "--seed=7"])

    def argv(folder: Path) -> list[str]:
        return ["train", *_train_words(folder)]

    def again(folder: Path) -> list[str]:
        """Resumes only what is this run's; until its first checkpoint the same command again."""
        from gptfit.checkpoint.format import load_checkpoint

        last = folder / "out" / "ckpt.pt"
        is_ours = last.is_file() and load_checkpoint(last).config["seed"] != 7
        return ["train", "--init_from=resume", f"--out_dir={folder / 'out'}"] if is_ours else argv(folder)

    def state(folder: Path) -> dict[str, Any]:
        aside = folder / "out" / "earlier-1"
        earlier = {path.name: _checkpoint_state(path) for path in sorted(aside.glob("*.pt"))}
        return {**_run_state(folder), "earlier": earlier, "its log": len(read_run(aside).steps)}

    return Command("train over an earlier run", argv, prepare, state, again, spare=COPIES, promise=_saved)


def _resume_command() -> Command:
    """The second half of a run; the first is there."""

    def prepare(folder: Path, server: Server) -> None:
        small_data(folder, server)
        _must(server, folder, ["train", *_train_words(folder), "--max_iters=4", "--keep_checkpoints=2"])

    def argv(folder: Path) -> list[str]:
        return ["train", "--init_from=resume", f"--out_dir={folder / 'out'}", "--max_iters=6"]

    return Command("train resume", argv, prepare, _run_state, spare=COPIES, promise=_saved)


def _run_state(folder: Path) -> dict[str, Any]:
    """All of a run that does not depend on the clock."""
    out = folder / "out"
    log = read_run(out)
    facts = measured.read(folder / "cache" / measured.FILE_NAME)  # passes over half a line of a killed writer
    return {
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix != ".pt"),
        "steps": [(step.step, step.loss, step.lr, step.grad_norm) for step in log.steps],
        "evals": [(found.step, found.train_loss, found.val_loss) for found in log.evals],
        "end": log.end and (log.end.reason, log.end.step),
        "notes": [note for note in log.notes if "torn" not in note],
        "remembered": {(fact.parameters, fact.tokens, fact.val_loss) for fact in facts.losses},
        **_saved(folder),
    }


def _saved(folder: Path) -> dict[str, Any]:
    """Of a run that ended with exit code 0: its models. A page or a line for the next plan may be lacking, and is said."""
    return {path.name: _checkpoint_state(path) for path in sorted((folder / "out").glob("*.pt"))}


def _checkpoint_state(path: Path) -> dict[str, Any]:
    from gptfit.checkpoint.format import load_checkpoint  # torch, which commands that need none do without

    found = load_checkpoint(path)
    assert found.optimizer
    # ckpt.pt is written before an eval, or after it when it could not be written before: the best loss may differ.
    return {
        "step": found.iter_num,
        "best": None if path.name.startswith("ckpt") else found.best_val_loss,
        "model": _digest(found.model),
        "optimizer": _digest(found.optimizer["state"]),
    }


def _digest(value: Any) -> str:
    """Of all tensors in a nest of dictionaries, bit for bit."""
    import torch

    total = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            total.update(item.contiguous().numpy().tobytes())
        elif isinstance(item, dict):
            for key in sorted(item, key=str):
                total.update(str(key).encode())
                add(item[key])
        else:
            total.update(repr(item).encode())

    add(value)
    return total.hexdigest()


def _must(server: Server, folder: Path, argv: list[str]) -> None:
    ended = server.run(argv, folder)
    assert ended.code == 0, f"{argv}: {ended}"


# what reads a run


def _with_run(folder: Path, server: Server) -> None:
    small_data(folder, server)
    _must(server, folder, ["train", *_train_words(folder)])


def two_runs(folder: Path, server: Server) -> None:
    _with_run(folder, server)
    _must(server, folder, ["train", *_train_words(folder), f"--out_dir={folder / 'other'}", "--learning_rate=5e-3"])


def _export_command(kind: str) -> Command:
    target = "exported.gguf" if kind == "gguf" else "exported"

    def argv(folder: Path) -> list[str]:
        return ["export", str(folder / "out"), f"--to={kind}", f"--out={folder / target}"]

    def state(folder: Path) -> dict[str, str]:
        found = contents(folder)
        return {name: digest for name, digest in found.items() if not name.startswith("cache")}

    def again(folder: Path) -> list[str]:
        """An export that has its name is whole; a second one needs another name, so there is nothing to do."""
        return ["export", "--help"] if (folder / target).exists() else argv(folder)

    return Command(f"export {kind}", argv, _with_run, state, again)


def _compare_command() -> Command:
    def argv(folder: Path) -> list[str]:
        return ["compare", str(folder / "out"), str(folder / "other"), f"--html={folder / 'pages' / 'page.html'}"]

    return Command("compare --html", argv, two_runs, lambda folder: contents(folder))


def _eval_command() -> Command:
    def argv(folder: Path) -> list[str]:
        return ["eval", str(folder / "out"), "--device=cpu"]

    def state(folder: Path) -> dict[str, Any]:
        kept = json.loads((folder / "out" / "eval.json").read_text(encoding="utf-8"))
        return {"names": sorted(contents(folder)), "kept": kept}

    # The answer is what is on the screen; a file of it that the disk did not take is said there.
    return Command("eval", argv, _with_run, state, promise=lambda folder: None)


def _sample_command() -> Command:
    def argv(folder: Path) -> list[str]:
        return ["sample", str(folder / "out"), "--device=cpu", "--tokens=4", "--n=2", "--prompt=ABC"]

    def state(folder: Path) -> dict[str, Any]:
        """The texts are a set: a command that was done again may have written them twice."""
        log = read_run(folder / "out")
        texts = {sample.text for sample in log.samples}
        return {"names": sorted(contents(folder)), "texts": texts, "steps": len(log.steps), "evals": len(log.evals)}

    # The text is what was asked for; a run whose log may not be written is sampled from all the same.
    return Command("sample", argv, _with_run, state, promise=lambda folder: None)


# tune and the cache of measured facts


def _tune_command() -> Command:
    words = [word for word in (*MODEL, *RATES, *PACE) if "batch_size" not in word]
    config = "\n".join(word.removeprefix("--") for word in words) + "\nbatch_size=2\n"  # so that there are two trials

    def prepare(folder: Path, server: Server) -> None:
        small_data(folder, server)
        lines = f"{config}gradient_accumulation_steps=1\ndevice='cpu'\ndtype='float32'\ncompile=False\n"
        (folder / "toy.py").write_text(f"dataset={str(folder / 'tiny')!r}\n{lines}", encoding="utf-8")

    def argv(folder: Path) -> list[str]:
        words = ["--minutes=1", "--write", f"--html={folder / 'tune.html'}"]
        return ["tune", str(folder / "toy.py"), *words]

    def state(folder: Path) -> dict[str, Any]:
        facts = measured.read(folder / "cache" / measured.FILE_NAME)
        sizes = {speed.key.micro_batch for speed in facts.speeds}
        return {"names": sorted(contents(folder)), "some sizes": bool(sizes & {1, 2})}

    return Command("tune", argv, prepare, state, settings=SHORT_TRIALS)
