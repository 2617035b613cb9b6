"""Data, timing and training for bench/propose.py, in this process and on one core."""

from __future__ import annotations

import itertools
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from _recipe_runs import Curve, Kept, Point, fingerprint

from gptfit.config.keys import DEFAULTS, TrainConfig
from gptfit.dataset import read_dataset
from gptfit.device.device import cpu_name
from gptfit.estimate import Estimate
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
EVAL_TOKENS = 32_768
# Keys that are not of what is trained: files, evaluations, and the horizon, which the seconds decide.
OTHER = {
    "dataset", "out_dir", "wandb_run_name", "eval_interval", "eval_iters", "max_hours", "early_stop_evals", "device",
    "compile", "max_iters", "lr_decay_iters", "warmup_iters",
}  # fmt: skip
OWN_SIZES = (2048, 4096, 8192)  # vocabularies that are tried on the pages


@dataclass(frozen=True)
class Folder:
    """One vocabulary of one text."""

    path: Path
    label: str
    size: int | None  # of a vocabulary of its own
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

    def folder_of(self, size: int | None) -> Folder:
        return next(folder for folder in self.folders if folder.size == size)


@dataclass(frozen=True)
class Run:
    config: TrainConfig
    folder: Folder

    @classmethod
    def of(cls, config: TrainConfig, folder: Folder) -> Run:
        return cls(config, folder)

    @property
    def keys(self) -> dict[str, Any]:
        return {
            key: value for key, value in self.config.as_dict().items() if value != DEFAULTS[key] and key not in OTHER
        }

    @property
    def name(self) -> str:
        c = self.config
        rows = c.batch_size * c.gradient_accumulation_steps
        return f"{c.n_layer}x{c.n_embd} {rows}x{c.block_size} dropout {c.dropout:g} {self.folder.label}"

    @property
    def nats_per_bit(self) -> float:
        return math.log(2) * (self.folder.facts.bytes_per_token or 1.0)


@dataclass
class Timer:
    """Runs things and keeps what they gave."""

    folder: Path
    kept: Kept
    speeds: list[MeasuredSpeed] = field(default_factory=list)
    ms_per_step: dict[str, float] = field(default_factory=dict)
    core: str = field(default_factory=lambda: f"{cpu_name()} {torch.backends.cpu.get_cpu_capability()}")

    def knows(self, run: Run) -> bool:
        return run.name in self.ms_per_step

    def time(self, run: Run) -> None:
        """Milliseconds a step takes of its core."""
        if self.knows(run):
            return
        name = f"timing {run.name}, {fingerprint(run.keys)}, {self.core}"
        curve = self.kept.get(name, lambda: self._timed(run))
        self.ms_per_step[run.name] = curve.ms_per_step
        config = run.config
        micro_ms = curve.ms_per_step / config.gradient_accumulation_steps
        setting = Setting(
            config.shape(run.folder.vocab_size), config.batch_size, compile=False, optimizer=config.optimizer
        )
        tokens_per_s = 1e3 * config.batch_size * config.block_size / micro_ms
        self.speeds.append(MeasuredSpeed(speed_key(setting, "one core"), "", tokens_per_s, micro_ms, ms_per_update=0.0))

    def steps(self, run: Run, seconds: float) -> int:
        return max(8, int(seconds * 1e3 / self.ms_per_step[run.name]))

    def train(self, run: Run, seconds: float) -> float:
        """Bits per byte of validation text at the end."""
        steps = self.steps(run, seconds)
        curve = self.kept.get(f"{run.name} {steps} steps, {fingerprint(run.keys)}", lambda: self._trained(run, steps))
        return curve.final / run.nats_per_bit

    def _timed(self, run: Run) -> Curve:
        clock: list[float] = []

        def listen(event: Event) -> None:
            if isinstance(event, Step):
                clock.append(time.process_time())

        curve = self._curve(run, TIMED_STEPS, eval_iters=1, reporter=listen, log_interval=1)
        steps = [1e3 * (after - before) for before, after in itertools.pairwise(clock[WARM_UP:])]
        return replace(curve, ms_per_step=statistics.median(steps), how="timing")

    def _trained(self, run: Run, steps: int) -> Curve:
        rows = run.config.batch_size * run.config.block_size
        return self._curve(run, steps, eval_iters=max(1, EVAL_TOKENS // rows))

    def _curve(
        self, run: Run, steps: int, eval_iters: int, reporter: Reporter = ignore, log_interval: int = 10
    ) -> Curve:
        place = Path(tempfile.mkdtemp(dir=self.folder))
        keys = run.keys | {
            "dataset": str(run.folder.path),
            "out_dir": str(place / "out"),
            "device": "cpu",
            "compile": False,
            "eval_interval": steps,
            "eval_iters": eval_iters,
            "log_interval": log_interval,
            "always_save_checkpoint": False,
            "max_iters": steps,
            "lr_decay_iters": steps,
            "warmup_iters": 0 if run.config.arch == "modern" else usual_warmup(steps),
        }
        ended = train(TrainConfig(**keys), reporter)
        if ended.reason != "max_iters":
            raise SystemExit("stopped; run it again to go on")
        log = read_run(place / "out" / "run.jsonl")
        shutil.rmtree(place)
        points = tuple(
            Point(int(e.tokens), e.val_loss) for e in log.evals if e.tokens is not None and e.val_loss is not None
        )
        return Curve(points, 0.0, log.header.device.dtype)


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
        tokenizer = folder / f"mdn-{size}.json"
        if not tokenizer.exists():
            _gptfit("tokenizer", "train", str(source), "--vocab-size", str(size), "--out", str(tokenizer))
        folders.append(_folder(_prepare(source, folder / f"mdn-{size}", str(tokenizer)), f"own {size:,}", size))
    return Prepared("web_mdn", source, tuple(folders))


def _folder(path: Path, label: str, size: int | None) -> Folder:
    info = read_dataset(path)
    assert info.train is not None
    facts = DataFacts(
        path.name, Estimate.exact(float(info.train.tokens)), info.model_vocab_size, info.tokenizer, info.bytes_per_token
    )
    return Folder(path, label, size, facts, info.model_vocab_size or TrainConfig().shape().vocab_size)


def _prepare(source: Path, out: Path, tokenizer: str, share: str = "0.02") -> Path:
    if not (out / "manifest.json").exists():
        _gptfit("prepare", str(source), "--tokenizer", tokenizer, "--out", str(out), "--val-fraction", share)
    return out


def _gptfit(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "gptfit", *words], check=True, capture_output=True, cwd=REPO)
