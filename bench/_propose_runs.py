"""Data, timing and training for bench/propose.py: each run is a process of one thread."""

from __future__ import annotations

import itertools
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from _recipe_runs import Curve, Kept, Point, fingerprint

from gptfit.checkpoint.loaded_model import open_model
from gptfit.config.keys import DEFAULTS, TrainConfig
from gptfit.dataset import read_dataset
from gptfit.device.device import cpu_name
from gptfit.estimate import Estimate
from gptfit.generate.exact_loss import split_loss
from gptfit.logs.events import Event, Step
from gptfit.logs.runlog import read_run
from gptfit.measured import MeasuredSpeed
from gptfit.plan.result import DataFacts
from gptfit.plan.setting import Setting, speed_key
from gptfit.schedule import usual_warmup
from gptfit.train.sinks import Reporter, ignore
from gptfit.train.train import train

REPO = Path(__file__).resolve().parent.parent
TIMED_STEPS, WARM_UP = 9, 3
PASSES = 2  # over everything that is timed; the lesser is kept, since other programs only ever make a step longer
# Keys that are not of what is trained: files, evaluations, and the horizon, which the seconds decide.
OTHER = {
    "dataset", "out_dir", "wandb_run_name", "eval_interval", "eval_iters", "max_hours", "early_stop_evals", "device",
    "compile", "max_iters", "lr_decay_iters", "warmup_iters",
}  # fmt: skip
TIMELESS = {"learning_rate", "min_lr", "weight_decay", "momentum", "momentum_end"}  # a step takes as long with any
OWN_SIZES = (2048, 4096, 8192)  # vocabularies that are tried on the pages
LITTLE_SIZES = (2048,)  # and on little text


@dataclass(frozen=True)
class Folder:
    """One vocabulary of one text."""

    path: Path
    label: str
    size: int | None  # of a vocabulary of its own; 0: characters
    facts: DataFacts
    vocab_size: int


@dataclass(frozen=True)
class Prepared:
    name: str
    source: Path
    folders: tuple[Folder, ...]  # the usual vocabulary first

    @property
    def shares(self) -> dict[int, float]:
        """Bytes per token of the own vocabularies over those of the usual one."""
        usual = self.folders[0].facts.bytes_per_token or 1.0
        return {folder.size: (folder.facts.bytes_per_token or usual) / usual for folder in self.folders if folder.size}

    @property
    def smallest(self) -> Folder:
        return min(self.folders, key=lambda folder: folder.vocab_size)

    def folder_of(self, size: int | None) -> Folder:
        return next(folder for folder in self.folders if folder.size == size)


@dataclass(frozen=True)
class Run:
    config: TrainConfig
    folder: Folder

    @property
    def keys(self) -> dict[str, Any]:
        return {
            key: value for key, value in self.config.as_dict().items() if value != DEFAULTS[key] and key not in OTHER
        }

    @property
    def timed_keys(self) -> dict[str, Any]:
        return {key: value for key, value in self.keys.items() if key not in TIMELESS}

    @property
    def name(self) -> str:
        c = self.config
        rows = c.batch_size * c.gradient_accumulation_steps
        recipe = "" if c.arch == "modern" else f" {c.arch}"
        return f"{c.n_layer}x{c.n_embd}{recipe} {rows}x{c.block_size} dropout {c.dropout:g} {self.folder.label}"

    @property
    def nats_per_bit(self) -> float:
        return math.log(2) * (self.folder.facts.bytes_per_token or 1.0)


@dataclass
class Timer:
    """Runs things, several at a time where it may, and keeps what they gave."""

    folder: Path
    kept: Kept
    jobs: int = 1
    timings: Kept = field(init=False)  # of this machine and this hour: kept with the tokens, not with the runs
    speeds: list[MeasuredSpeed] = field(default_factory=list)
    ms_per_step: dict[str, float] = field(default_factory=dict)
    core: str = field(default_factory=lambda: f"{cpu_name()} {torch.backends.cpu.get_cpu_capability()}")

    def __post_init__(self) -> None:
        self.timings = Kept(self.folder / "timings.jsonl")

    def knows(self, run: Run) -> bool:
        return run.name in self.ms_per_step

    def time(self, *runs: Run) -> None:
        """Milliseconds a step takes of its core; as many at a time as later train, so that they share caches alike."""
        new = [run for run in runs if not self.knows(run)]
        names = [f"timing {run.name}, {fingerprint(run.timed_keys)}, {self.core}" for run in new]
        passes = [
            self._kept_or_made(
                self.timings, [f"{name}, {i}" for name in names], [(timed, (run, self.folder)) for run in new]
            )
            for i in range(PASSES)
        ]
        for run, curves in zip(new, zip(*passes, strict=True), strict=True):
            self._remember(run, min(curve.ms_per_step for curve in curves))

    def _remember(self, run: Run, ms_per_step: float) -> None:
        self.ms_per_step[run.name] = ms_per_step
        config = run.config
        micro_ms = ms_per_step / config.gradient_accumulation_steps
        setting = Setting(
            config.shape(run.folder.vocab_size), config.batch_size, compile=False, optimizer=config.optimizer
        )
        tokens_per_s = 1e3 * config.batch_size * config.block_size / micro_ms
        self.speeds.append(MeasuredSpeed(speed_key(setting, "one core"), "", tokens_per_s, micro_ms, ms_per_update=0.0))

    def steps(self, run: Run, seconds: float) -> int:
        return max(8, int(seconds * 1e3 / self.ms_per_step[run.name]))

    def train(self, runs: Sequence[Run], seconds: float) -> list[float]:
        """Bits per byte of the whole validation text at the end of each."""
        steps = [self.steps(run, seconds) for run in runs]
        names = [
            f"{run.name} {count} steps, bits per byte, {fingerprint(run.keys)}"
            for run, count in zip(runs, steps, strict=True)
        ]
        jobs = [(trained, (run, count, self.folder)) for run, count in zip(runs, steps, strict=True)]
        return [curve.final for curve in self._kept_or_made(self.kept, names, jobs)]

    def _kept_or_made(
        self, kept: Kept, names: Sequence[str], jobs: Sequence[tuple[Callable[..., Curve], tuple[Any, ...]]]
    ) -> list[Curve]:
        """Each in a process of its own with one thread, kept as soon as it ends."""
        waiting = [
            (name, make, words) for name, (make, words) in zip(names, jobs, strict=True) if kept.find(name) is None
        ]
        with get_context("spawn").Pool(self.jobs, torch.set_num_threads, (1,), maxtasksperchild=1) as pool:
            for name, curve in pool.imap_unordered(_named, waiting):
                kept.get(name, lambda curve=curve: curve)
        found = [kept.find(name) for name in names]
        return [curve for curve in found if curve is not None]

    def train_as_proposed(self, runs: Sequence[Run]) -> list[float]:
        """Bits per byte of each run's best checkpoint, after as many steps as its config says or its early stop allows."""
        names = [f"{run.name} as proposed, bits per byte, {fingerprint(_proposed_keys(run))}" for run in runs]
        jobs = [(as_proposed, (run, self.folder)) for run in runs]
        return [curve.final for curve in self._kept_or_made(self.kept, names, jobs)]


def _named(job: tuple[str, Callable[..., Curve], tuple[Any, ...]]) -> tuple[str, Curve]:
    name, make, words = job
    return name, make(*words)


def timed(run: Run, folder: Path) -> Curve:
    """The median of a few steps, in time of the core."""
    clock: list[float] = []

    def listen(event: Event) -> None:
        if isinstance(event, Step):
            clock.append(time.process_time())

    with tempfile.TemporaryDirectory(dir=folder) as place:
        _train(run, TIMED_STEPS, Path(place), listen, log_interval=1)
    steps = [1e3 * (after - before) for before, after in itertools.pairwise(clock[WARM_UP:])]
    return Curve((Point(0, 0.0),), statistics.median(steps), "timing")


def trained(run: Run, steps: int, folder: Path) -> Curve:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        number_format = _train(run, steps, Path(place))
        found = split_loss(open_model(place), read_dataset(run.folder.path))
    assert found.bits_per_byte is not None
    return Curve((Point(steps * run.config.tokens_per_iter(), found.bits_per_byte),), 0.0, number_format)


def as_proposed(run: Run, folder: Path) -> Curve:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        ended = train(TrainConfig(**_proposed_keys(run), dataset=str(run.folder.path), out_dir=place), ignore)
        found = split_loss(open_model(place), read_dataset(run.folder.path))
        number_format = read_run(Path(place) / "run.jsonl").header.device.dtype
    assert found.bits_per_byte is not None
    return Curve((Point(ended.step * run.config.tokens_per_iter(), found.bits_per_byte),), 0.0, number_format)


def _proposed_keys(run: Run) -> dict[str, Any]:
    """All of the config but its files and where it trains."""
    files = ("dataset", "out_dir", "wandb_run_name", "max_hours")
    kept = {key: value for key, value in run.config.as_dict().items() if value != DEFAULTS[key] and key not in files}
    return kept | {"device": "cpu", "compile": False}


def _train(run: Run, steps: int, place: Path, reporter: Reporter = ignore, log_interval: int = 10) -> str:
    """The number format it trained in."""
    keys = run.keys | {
        "dataset": str(run.folder.path),
        "out_dir": str(place),
        "device": "cpu",
        "compile": False,
        "eval_interval": steps,
        "eval_iters": 1,
        "log_interval": log_interval,
        "always_save_checkpoint": True,
        "max_iters": steps,
        "lr_decay_iters": steps,
        "warmup_iters": 0 if run.config.arch == "modern" else usual_warmup(steps),
    }
    ended = train(TrainConfig(**keys), reporter)
    if ended.reason != "max_iters":
        raise SystemExit("stopped; run it again to go on")
    return read_run(place / "run.jsonl").header.device.dtype


def shakespeare(shared: Path, folder: Path) -> Prepared:
    """By characters."""
    text = shared / "tinyshakespeare.txt"
    chars = _prepare(text, folder / "shakespeare", "chars", "0.1")
    return Prepared("tinyshakespeare", text, (_folder(chars, "characters", None),))


def pages(shared: Path, folder: Path) -> Prepared:
    """MDN's, in GPT-2's vocabulary and in smaller ones of their own."""
    source = shared / "web_mdn.parquet"
    folders = [_folder(_prepare(source, folder / "mdn", "gpt2"), "GPT-2's 50,257", None)]
    for size in OWN_SIZES:
        tokenizer = _own_tokenizer(source, folder / f"mdn-{size}.json", size)
        folders.append(_folder(_prepare(source, folder / f"mdn-{size}", str(tokenizer)), f"own {size:,}", size))
    return Prepared("web_mdn", source, tuple(folders))


def little(shared: Path, folder: Path) -> Prepared:
    """The first 120,000 characters of Shakespeare, over and over: data is what is short."""
    text = folder / "little.txt"
    text.write_bytes((shared / "tinyshakespeare.txt").read_bytes()[:120_000])
    folders = [_folder(_prepare(text, folder / "little", "gpt2", "0.1"), "GPT-2's 50,257 of 120k", None)]
    for size in LITTLE_SIZES:
        tokenizer = _own_tokenizer(text, folder / f"little-{size}.json", size)
        folders.append(
            _folder(_prepare(text, folder / f"little-{size}", str(tokenizer), "0.1"), f"own {size:,} of 120k", size)
        )
    folders.append(_folder(_prepare(text, folder / "little-chars", "chars", "0.1"), "characters of 120k", 0))
    return Prepared("120,000 characters of tinyshakespeare", text, tuple(folders))


def _own_tokenizer(source: Path, out: Path, size: int) -> Path:
    if not out.exists():
        _gptfit("tokenizer", "train", str(source), "--vocab-size", str(size), "--out", str(out))
    return out


def _folder(path: Path, label: str, size: int | None) -> Folder:
    info = read_dataset(path)
    assert info.train is not None
    facts = DataFacts(
        path.name,
        Estimate.exact(float(info.train.tokens)),
        info.model_vocab_size,
        info.tokenizer,
        info.bytes_per_token,
        rows=info.train.documents,
    )
    return Folder(path, label, size, facts, info.model_vocab_size or TrainConfig().shape().vocab_size)


def _prepare(source: Path, out: Path, tokenizer: str, share: str = "0.01") -> Path:
    if not (out / "manifest.json").exists():
        _gptfit("prepare", str(source), "--tokenizer", tokenizer, "--out", str(out), "--val-fraction", share)
    return out


def _gptfit(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "gptfit", *words], check=True, capture_output=True, cwd=REPO)
