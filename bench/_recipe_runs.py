"""Runs for bench/recipe.py: stock nanoGPT and gptfit in processes of their own, read back as curves."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from gptfit.config.keys import TrainConfig
from gptfit.config.recipe import adamw_rate, least_tokens_per_step, second_edition, tokens_per_step
from gptfit.logs.runlog import read_run
from gptfit.shape import ModelShape

REPO = Path(__file__).resolve().parent.parent
EVAL_LINE = re.compile(r"^step (\d+): train loss [\d.]+, val loss ([\d.]+)", re.MULTILINE)
ITER_LINE = re.compile(r"^iter (\d+): loss [\d.]+, time ([\d.]+)ms", re.MULTILINE)

TURNS = 40  # of two ways to train, step by step; medians of 14 were up to 1 % from one measurement to the next
VOCABULARY = {"bytes": 257, "gpt2": 50_304}


@dataclass(frozen=True)
class Setup:
    """A model and a horizon both programs get."""

    name: str
    tokenizer: str
    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    batch_size: int
    steps: int  # of nanoGPT
    rates: tuple[float, ...]  # nanoGPT's best of these is what we compare with
    eval_iters: int
    share: float = 4.0  # our horizon is nanoGPT's tokens over this
    our_batch: int = 0  # windows per step of our recipe; 0: nanoGPT's

    @property
    def with_recipes_batch(self) -> Setup:
        """Ours is what the recipe takes on a CPU for the horizon."""
        tokens = self.tokens / self.share
        least = least_tokens_per_step(self.n_embd, VOCABULARY[self.tokenizer], tokens, is_cpu=True)
        step = tokens_per_step(tokens, least)
        return replace(self, our_batch=step // self.block_size)

    @property
    def ours(self) -> Setup:
        """The same tokens and the same evaluated windows with our batch."""
        times = self.batch_size / (self.our_batch or self.batch_size)
        steps, evals = round(self.steps * times), round(self.eval_iters * times)
        return replace(self, batch_size=round(self.batch_size / times), steps=steps, eval_iters=evals, our_batch=0)

    @property
    def our_steps(self) -> int:
        """Of our batch."""
        return round(self.ours.steps / self.share)

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.block_size

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def keys(self) -> dict[str, Any]:
        """The keys both understand."""
        names = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "eval_iters")
        return {name: getattr(self, name) for name in names} | {"gradient_accumulation_steps": 1, "device": "cpu"}

    def parameters(self, arch: str, edition: int = 1) -> int:
        return self.shape(arch, **(self.edition_keys if edition == 2 else {})).parameters

    def shape(self, arch: str, **keys: Any) -> ModelShape:
        return TrainConfig.unchecked(**self.keys, **keys, arch=arch).shape(VOCABULARY[self.tokenizer])

    @property
    def head_keys(self) -> dict[str, float]:
        """The head's rate, where a step has too few tokens for the whole one."""
        whole, own = (adamw_rate("head", self.shape("modern"), *tokens) for tokens in ((), (self.tokens_per_step,)))
        return {} if own == whole else {"head_lr": round(own, 4)}

    @property
    def edition_keys(self) -> dict[str, Any]:
        """What the second edition sets for this model and our horizon."""
        return second_edition(self.shape("modern"), max_iters=self.our_steps)


@dataclass(frozen=True)
class Point:
    tokens: int
    val_loss: float


@dataclass(frozen=True)
class Curve:
    points: tuple[Point, ...]
    ms_per_step: float  # median; training alone: no evaluation, no checkpoint, no compilation
    how: str  # the number format it was trained in, and "as printed" where the last point is nanoGPT's own evaluation
    other_seconds: float | None = None  # of the whole command: start, compilation, checkpoints

    @property
    def final(self) -> float:
        return self.points[-1].val_loss

    def reach(self, loss: float) -> int | None:
        """The tokens after which the curve is down at `loss`, on a straight line between evaluations, if it ever is."""
        for before, after in zip(self.points, self.points[1:], strict=False):
            if after.val_loss <= loss:
                share = (before.val_loss - loss) / (before.val_loss - after.val_loss)
                return round(before.tokens + min(1.0, max(0.0, share)) * (after.tokens - before.tokens))
        return None


class Kept:
    """Curves by name in a file, so that a bench of hours goes on where it was stopped."""

    def __init__(self, path: Path | None) -> None:
        self.path, self._lock = path, Lock()
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path and path.exists() else []  # no torn last one
        if path and path.exists():
            os.truncate(path, sum(len(line.encode()) + 1 for line in lines))
        self._curves = {entry["run"]: curve_of(entry["curve"]) for entry in map(json.loads, lines)}

    def find(self, run: str) -> Curve | None:
        return self._curves.get(run)

    def get(self, run: str, make: Callable[[], Curve]) -> Curve:
        curve = self._curves.get(run) or make()
        with self._lock:
            if run not in self._curves and self.path:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"run": run, "curve": asdict(curve)}) + "\n")
            self._curves[run] = curve
        print(f"  {run}: {curve.final:.4f}, {curve.how}, {curve.ms_per_step:.0f} ms per step", flush=True)
        return curve


def fingerprint(keys: dict[str, Any]) -> str:
    """A few digits that change with any of the keys, so that a kept run is never taken for one of other settings."""
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:6]


def curve_of(facts: dict[str, Any]) -> Curve:
    return Curve(**{**facts, "points": tuple(Point(**point) for point in facts["points"])})


def replaced(source: str, old: str, new: str) -> str:
    if old not in source:
        raise SystemExit(f"nanoGPT's train.py has no {old!r}; this bench knows the one of 2023 and later")
    return source.replace(old, new)


class Runner:
    """Starts programs on the same data."""

    def __init__(self, folder: Path, data: Path, nanogpt: Path | None = None) -> None:
        self.folder, self.data, self.nanogpt = folder, data, nanogpt
        self.environment = dict(os.environ)
        self.forget_compiled_code()

    def sharing_cores(self, jobs: int) -> Runner:
        """For that many runs at a time."""
        runner = Runner(self.folder, self.data, self.nanogpt)
        if jobs > 1:
            runner.environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
        return runner

    def forget_compiled_code(self) -> None:
        """From here on the first run compiles everything, as on a new machine, and the next ones find it done.

        Torch keeps compiled headers in the temporary folder, wherever the rest is.
        """
        place = str(self._new_folder("inductor"))
        self.environment |= {"TORCHINDUCTOR_CACHE_DIR": place, "TMPDIR": place}

    def nanogpt_losses(self, setup: Setup, learning_rate: float, seed: int, dtype: str, **changes: Any) -> Curve:
        """Its own train.py to the end, its last checkpoint measured on the windows gptfit evaluates.

        What it prints is the mean over a few windows drawn anew every time: at 30M, 0.1 up or down by chance.
        """
        place = self._new_folder("nanogpt")
        keys = changes | {"always_save_checkpoint": True}  # otherwise it would be the best that was printed
        curve = self.nanogpt_curve(setup, learning_rate, seed, place=place, dtype=dtype, **keys)
        checkpoint = place / "out" / "ckpt.pt"
        last = replace(curve.points[-1], val_loss=self.measured_loss(setup, checkpoint))
        checkpoint.unlink()
        return replace(curve, points=(*curve.points[:-1], last), how=dtype)

    def nanogpt_curve(
        self,
        setup: Setup,
        learning_rate: float,
        seed: int,
        *,
        place: Path | None = None,
        dtype: str = "float32",
        **changes: Any,
    ) -> Curve:
        """What its own train.py prints, by default in float32 and without the compiler, as it runs on a CPU.

        Its seed is replaced and, for another number format, the line that has it use one on a card only.
        """
        assert self.nanogpt is not None
        kept, place = place, place or self._new_folder("nanogpt")
        source = (self.nanogpt / "train.py").read_text(encoding="utf-8")
        source = replaced(source, "manual_seed(1337 ", f"manual_seed({seed} ")
        if dtype != "float32":
            source = replaced(source, "ctx = nullcontext() if device_type == 'cpu' else ", "ctx = ")
        (place / "train.py").write_text(source, encoding="utf-8")
        (place / "configurator.py").write_bytes((self.nanogpt / "configurator.py").read_bytes())
        (place / "data").mkdir()
        (place / "data" / "bench").symlink_to(self.data.resolve())
        steps = changes.get("max_iters", setup.steps)
        keys = setup.keys | {
            "dataset": "bench",
            "out_dir": str(place / "out"),
            "max_iters": steps,
            "lr_decay_iters": steps,
            "warmup_iters": steps // 10,
            "learning_rate": learning_rate,
            "min_lr": learning_rate / 10,
            "eval_interval": max(1, steps // 8),
            "log_interval": 1,
            "always_save_checkpoint": False,
            "compile": False,
            "dtype": dtype,
        }
        keys |= changes
        words = [sys.executable, str(place / "train.py"), *(f"--{key}={value}" for key, value in keys.items())]
        text, seconds = self._run(words, place, {"PYTHONPATH": str(self.nanogpt)})
        if not kept:
            shutil.rmtree(place)
        times = [(int(step), float(ms)) for step, ms in ITER_LINE.findall(text)]
        # nanoGPT counts an evaluation into the iteration that follows it.
        clean = [ms for step, ms in times if step % keys["eval_interval"]]
        points = tuple(Point(int(step) * setup.tokens_per_step, float(loss)) for step, loss in EVAL_LINE.findall(text))
        other_seconds = seconds - sum(ms for _, ms in times) / 1000
        return Curve(points, statistics.median(clean), f"{dtype}, as printed", other_seconds)

    def gptfit_curve(self, setup: Setup, seed: int, *, place: Path | None = None, **changes: Any) -> Curve:
        """`gptfit train` with the setup's model and batch; `changes` are more keys.

        In a `place` where it was stopped before, it goes on from its last checkpoint.
        """
        kept, place = place, place or self._new_folder("gptfit")
        out = place / "out"
        keys = {"out_dir": str(out), "seed": seed} | changes
        if goes_on := (out / "ckpt.pt").exists():
            keys |= {"init_from": "resume"}
        words = [sys.executable, "-m", "gptfit", "train", *self._words(setup, keys)]
        _, seconds = self._run(words, place, {"PYTHONPATH": str(REPO)})
        log = read_run(out / "run.jsonl")
        if not log.end or log.end.reason != "max_iters":
            raise SystemExit(f"{' '.join(words)}\nwas stopped")
        if not kept:
            shutil.rmtree(place)  # checkpoints of 1.5 GB at 30M
        points = tuple(
            Point(int(e.tokens), e.val_loss) for e in log.evals if e.tokens is not None and e.val_loss is not None
        )
        times = [step.ms for step in log.steps]
        other_seconds = seconds - (sum(times) + sum(e.ms or 0.0 for e in log.evals)) / 1000
        return Curve(points, statistics.median(times), log.header.device.dtype, None if goes_on else other_seconds)

    def ms_in_turns(self, setup: Setup, programs: dict[str, dict[str, Any]], steps: int) -> dict[str, float]:
        """Median time of a step of several ways to train that take turns, step by step."""
        started: dict[str, subprocess.Popen[str]] = {}
        places = {name: self._new_folder("turns") for name in programs}
        ms: dict[str, list[float]] = {name: [] for name in programs}
        try:
            for name, changes in programs.items():
                words = self._words(setup, changes | {"out_dir": str(places[name])})
                words = [sys.executable, str(REPO / "bench" / "_recipe_turns.py"), *words]
                pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
                pipes |= {"cwd": places[name], "env": self.environment | {"PYTHONPATH": str(REPO)}}
                started[name] = subprocess.Popen(words, **pipes)
                ms[name].append(self._ms_of(started[name]))  # before the next one starts
            for _ in range(steps - 1):
                for name, run in started.items():
                    ms[name].append(self._next_ms(run))
        finally:
            for run in started.values():
                run.kill()
                run.communicate()
            for place in places.values():
                shutil.rmtree(place)
        return {name: statistics.median(times) for name, times in ms.items()}

    def _next_ms(self, run: subprocess.Popen[str]) -> float:
        assert run.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which reading tells
            print(file=run.stdin, flush=True)
        return self._ms_of(run)

    def _ms_of(self, run: subprocess.Popen[str]) -> float:
        assert run.stdout is not None
        line = run.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(map(str, run.args))}\nwas stopped")  # type: ignore[arg-type]
        return float(line)

    def _words(self, setup: Setup, changes: dict[str, Any]) -> list[str]:
        """Of a command line of `gptfit train`."""
        changes = dict(changes)
        recipe = changes.pop("recipe", "modern")
        keys = setup.keys | {"dataset": str(self.data)} | changes
        return ["--recipe", recipe, *(f"--{key}={value}" for key, value in keys.items())]

    def measured_loss(self, setup: Setup, checkpoint: Path) -> float:
        """Of nanoGPT's checkpoint, as every run of ours evaluates: its windows, the number format of this CPU."""
        place = self._new_folder("measured")
        keys = setup.keys | {"dataset": self.data, "out_dir": place / "out", "init_from": checkpoint.resolve()}
        options = [f"--{key}={value}" for key, value in keys.items()]
        words = [sys.executable, "-m", "gptfit", "train", *options, "--eval_only=True", "--compile=False"]
        self._run(words, place, {"PYTHONPATH": str(REPO)})
        return float(read_run(place / "out" / "run.jsonl").evals[-1].val_loss)

    def place_of(self, run: str) -> Path:
        """Where a long run of this name is made, so that the next start of the bench finds what it left."""
        place = self.folder / f"run-{fingerprint({'run': run})}"
        place.mkdir(exist_ok=True)
        return place

    def _new_folder(self, program: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"{program}-", dir=self.folder))

    def _run(self, words: list[str], place: Path, more: dict[str, str]) -> tuple[str, float]:
        """What it printed, and the seconds it took."""
        began = time.perf_counter()
        done = subprocess.run(words, cwd=place, env=self.environment | more, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}\n{done.stderr[-2000:]}")
        return done.stdout, time.perf_counter() - began
