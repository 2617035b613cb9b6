"""How well a calibrated plan predicts shapes it never saw, on this machine: tokens/s and peak memory, shape by shape.

    python bench/calibration.py              calibrate, then run every shape; alone on the machine, about 30 minutes
    python bench/calibration.py --minutes 8  as many as end in so long; the same again goes on with the rest
    python bench/calibration.py --card F     the same by the calibration in a card.json of `gptfit doctor --card`
    python bench/calibration.py --predict    predict again from what is kept in bench/calibration.json

Writes bench/calibration.json; bench/accuracy.py puts the table into docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

from _neighbours import Neighbours

from gptfit.config.keys import TrainConfig
from gptfit.plan.calibration import (
    Calibration,
    calibration_from_json,
    micro_seconds,
    place_of,
    process_bytes,
    step_parts,
)
from gptfit.plan.resolve import setting_of
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
from gptfit.units import GIB

if TYPE_CHECKING:
    from gptfit.tune.trials import Machine

RESULTS = Path(__file__).resolve().parent / "calibration.json"
LIMIT_S = 240.0
ACCUMULATION = 4  # micro-steps per update
SHAPES = 24
SEED = 37607
QUIET = 0.03  # of the cores; what was timed beside more than that is timed again
TRIES = 3
# When all shapes have run, all run again, minutes later, and the median of a shape's runs counts: a machine with neighbours
# is a tenth faster in one minute than in another, and how far it is from itself is told with the errors.
PASSES = 4
LONGEST_MICRO_STEP_S = 2.0  # as calibration predicts it
CONDITIONS = (
    f"Shapes are drawn (seed {SEED}), half of them in each number format, and those whose micro-step would take longer than "
    f"{LONGEST_MICRO_STEP_S:g} s left out."
)
AIM = "tokens/s: median 5 %, 90 % within 12 %; peak memory: 90 % within 10 %"


@dataclass(frozen=True)
class Unseen:
    """A shape and a way to run it that calibration does not time."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int
    batch_size: int
    arch: str
    optimizer: str
    dtype: str
    compile: bool

    @property
    def name(self) -> str:
        way = "compiled" if self.compile else "eager"
        size = f"{self.n_layer}x{self.n_embd} T{self.block_size} V{self.vocab_size} B{self.batch_size}"
        return f"{size} {self.arch} {self.optimizer} {self.dtype} {way}"

    def config(self) -> TrainConfig:
        return TrainConfig(**asdict(self), device="cpu", gradient_accumulation_steps=ACCUMULATION)


def drawn() -> Iterator[Unseen]:
    """Shapes without end, float32 and bfloat16 in turns, the ranges those of the aim; calibration times none of them."""
    random = Random(SEED)
    for i in itertools.count():
        width = 64 * random.randint(2, 12)
        heads = [width // size for size in (32, 64, 128) if width % size == 0]
        yield Unseen(
            n_layer=random.randint(2, 12),
            n_head=random.choice(heads),
            n_embd=width,
            block_size=random.choice((128, 192, 256, 384, 512, 768, 1024)),
            vocab_size=random.choice((257, 512, 1000, 3000, 8192, 16000, 24000, 32768, 50304)),
            batch_size=random.choice((1, 2, 3, 4, 6, 8, 12, 16, 24, 32)),
            arch=random.choice(("gpt2", "modern")),
            optimizer=random.choice(("adamw", "muon")),
            dtype=("float32", "bfloat16")[i % 2],
            compile=random.random() < 0.5,
        )


def judged(calibration: Calibration) -> list[Unseen]:
    """The first of them that this machine can run in reasonable time."""
    found: dict[str, list[Unseen]] = {"float32": [], "bfloat16": []}
    for shape in drawn():
        kept = found[shape.dtype]
        if len(kept) < SHAPES // len(found) and _micro_seconds(shape, calibration) <= LONGEST_MICRO_STEP_S:
            kept.append(shape)
        if sum(map(len, found.values())) == SHAPES:
            return [shape for pair in zip(*found.values(), strict=True) for shape in pair]
    raise AssertionError("they have no end")


def _micro_seconds(shape: Unseen, calibration: Calibration) -> float:
    config = shape.config()
    return micro_seconds(setting_of(config, config.shape(), place_of(calibration)), calibration)


@dataclass(frozen=True)
class Row:
    """A shape as measured; `chunked_loss` is what 'auto' meant there."""

    shape: Unseen
    tokens_per_s: float
    peak_gib: float
    chunked_loss: bool
    compiled: bool
    seconds: float = 0.0
    others: float = 0.0  # share of the cores that other programs took meanwhile
    micro_step_ms: float = 0.0
    update_ms: float = 0.0

    def setting(self) -> Setting:
        shape = self.shape
        return Setting(
            ModelShape(shape.n_layer, shape.n_head, shape.n_embd, shape.block_size, shape.vocab_size, arch=shape.arch),
            micro_batch=shape.batch_size,
            accumulation=ACCUMULATION,
            dtype=shape.dtype,
            compile=self.compiled,
            chunked_loss=self.chunked_loss,
            optimizer=shape.optimizer,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--predict", action="store_true", help="measure nothing; use what is kept")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long; the same again goes on")
    parser.add_argument("--again", action="store_true", help="forget what is kept")
    parser.add_argument(
        "--tries", type=int, default=TRIES, help=f"of each, until others took under {QUIET:.0%} of the cores"
    )
    parser.add_argument("--card", type=Path, metavar="FILE", help="a card.json whose calibration is judged")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not args.predict:
        began = time.monotonic()
        kept = _begun(args.out, args.again, args.card)
        _go_on(kept, args.out, began + 60 * args.minutes, args.tries)
    show(*read(args.out))
    print(repeated(args.out))
    return 0


def _begun(out: Path, again: bool, card: Path | None) -> dict[str, Any]:
    """What was calibrated and measured so far, as long as it is not all."""
    if out.is_file() and not again:
        kept: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        if kept.get("seed") != SEED:
            kept = {"tried": [None] * SHAPES, "rows": []}  # of other shapes: as good as done
        if len(kept["tried"]) < SHAPES or len(kept.get("again", ())) < (PASSES - 1) * len(kept["rows"]):
            return kept
    if card is not None:
        sent = json.loads(card.read_text(encoding="utf-8"))
        seconds = next(check["seconds"] for check in sent["checks"] if check["check"] == "calibration")
        return {"seed": SEED, "seconds": seconds, "calibration": sent["calibration"], "rows": [], "tried": []}
    from gptfit.doctor.calibration import calibrate  # here, as the page of errors is written without torch

    began = time.monotonic()
    found = calibrate(TrainConfig(device="cpu"), lambda stage: print(f"  {stage}", file=sys.stderr))
    seconds = time.monotonic() - began
    return {"seed": SEED, "seconds": seconds, "calibration": found.as_json(), "rows": [], "tried": []}


def _go_on(kept: dict[str, Any], out: Path, until: float, tries: int) -> None:
    """Kept after every row, so that nothing is measured twice."""
    tried = [Unseen(**shape) for shape in kept["tried"]]
    shapes = [shape for shape in judged(calibration_from_json(kept["calibration"])) if shape not in tried]
    _keep(kept, out)
    for shape in itertools.takewhile(lambda _: time.monotonic() < until, shapes):
        row = measure(shape, tries)
        if row is not None:
            print(
                f"  {shape.name}: {row.tokens_per_s:,.0f} tokens/s, {row.seconds:.0f} s, others {row.others:.0%}",
                file=sys.stderr,
            )
            kept["rows"].append(asdict(row))
        kept["tried"].append(asdict(shape))
        _keep(kept, out)

    again = kept.setdefault("again", [])
    for row in (kept["rows"] * (PASSES - 1))[len(again) :]:
        if time.monotonic() >= until or len(kept["tried"]) < SHAPES:
            break
        found = measure(Unseen(**row["shape"]), tries)
        again.append(found and found.tokens_per_s)
        print(f"  {Unseen(**row['shape']).name}: again {again[-1] or math.nan:,.0f} tokens/s", file=sys.stderr)
        _keep(kept, out)


def _keep(kept: dict[str, Any], out: Path) -> None:
    out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def read(path: Path = RESULTS) -> tuple[Calibration, list[Row], float]:
    """(calibration, rows, seconds that calibrating took)."""
    values = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        Row(**{**row, "shape": Unseen(**row["shape"]), "tokens_per_s": median(runs)})
        for row, runs in zip(values["rows"], _runs(values), strict=True)
    ]
    return calibration_from_json(values["calibration"]), rows, values["seconds"]


def _runs(values: dict[str, Any]) -> list[list[float]]:
    """Tokens/s of every run of each shape."""
    rows, again = values["rows"], values.get("again", [])
    return [[row["tokens_per_s"], *filter(None, again[i :: len(rows)])] for i, row in enumerate(rows)]


def repeated(path: Path = RESULTS) -> str:
    """How far the same shapes were from themselves."""
    several = [runs for runs in _runs(json.loads(path.read_text(encoding="utf-8"))) if len(runs) > 1]
    if not several:
        return ""
    middle, most = spread([run / median(runs) - 1 for runs in several for run in runs])
    widest = max(max(runs) / min(runs) - 1 for runs in several)
    count = max(map(len, several))
    return (
        f"The shapes were run up to {count} times each, minutes apart, and the median counts: the runs are {middle:.1%} from their "
        f"shape's median at the median, 90 % within {most:.1%}; one shape's fastest run is {widest:.0%} faster than its slowest."
    )


def note(path: Path = RESULTS) -> str:
    """What the one who measured has to say about it."""
    return str(json.loads(path.read_text(encoding="utf-8")).get("note", ""))


def measure(shape: Unseen, tries: int) -> Row | None:
    """The quietest of a few trials, the first that is quiet."""
    quietest: Row | None = None
    for _ in range(tries):
        row = _trial(shape)
        if row is None:
            break
        quietest = row if quietest is None or row.others < quietest.others else quietest
        if quietest.others <= QUIET:
            break
    return quietest


@functools.cache
def _machine(dtype: str, compile: bool) -> Machine:
    from gptfit.tune.measuring import find_machine

    return find_machine(TrainConfig(device="cpu", dtype=dtype, compile=compile))


def _trial(shape: Unseen) -> Row | None:
    """A real trial in a process of its own, as `tune` runs it."""
    from gptfit.tune.measuring import make_measure
    from gptfit.tune.space import base_variant
    from gptfit.tune.trials import Candidate, timing_from_json

    began, config = time.monotonic(), shape.config()
    machine = _machine(shape.dtype, shape.compile)
    run = make_measure(config, config.shape(), machine)
    candidate = Candidate(shape.batch_size, base_variant(config, machine))
    with Neighbours() as others:
        ended = run(candidate, False, LIMIT_S, lambda stage: others.start() if stage == "timing" else None)
    if ended.outcome != "ok":
        print(f"  {shape.name}: {ended.outcome} {ended.message}", file=sys.stderr)
        return None
    timing = timing_from_json(ended.values)
    step_ms = timing.ms_per_micro_step * ACCUMULATION + timing.ms_per_update
    tokens = shape.batch_size * shape.block_size * ACCUMULATION
    return Row(
        shape,
        tokens_per_s=1e3 * tokens / step_ms,
        peak_gib=timing.device_gib or math.nan,
        chunked_loss=timing.chunked_loss,
        compiled=timing.compiled,
        seconds=time.monotonic() - began,
        others=others.share,
        micro_step_ms=timing.ms_per_micro_step,
        update_ms=timing.ms_per_update,
    )


@dataclass(frozen=True)
class Predicted:
    row: Row
    tokens_per_s: float
    peak_gib: float

    @property
    def speed_error(self) -> float:
        return self.tokens_per_s / self.row.tokens_per_s - 1

    @property
    def memory_error(self) -> float:
        return self.peak_gib / self.row.peak_gib - 1


def predict(calibration: Calibration, rows: list[Row]) -> list[Predicted]:
    found = []
    for row in rows:
        setting = row.setting()
        seconds = sum(step_parts(setting, calibration).values())
        found.append(Predicted(row, setting.tokens_per_step / seconds, process_bytes(setting, calibration) / GIB))
    return found


def spread(errors: list[float]) -> tuple[float, float]:
    """The median, and what nine of ten stay within."""
    sizes = sorted(map(abs, errors))
    return sizes[len(sizes) // 2], sizes[max(0, math.ceil(0.9 * len(sizes)) - 1)]


def summary(found: list[Predicted]) -> str:
    speed, memory = (spread([getattr(p, name) for p in found]) for name in ("speed_error", "memory_error"))
    return f"{len(found)} shapes: tokens/s median error {speed[0]:.1%}, 90 % within {speed[1]:.1%}; peak memory median {memory[0]:.1%}, 90 % within {memory[1]:.1%}"


def show(calibration: Calibration, rows: list[Row], seconds: float) -> None:
    found = predict(calibration, rows)
    if not found:
        return
    for p in found:
        print(
            f"{p.row.shape.name:<66} {p.row.tokens_per_s:>9,.0f} {p.tokens_per_s:>9,.0f} {p.speed_error:>+7.1%}"
            f"   {p.row.peak_gib:6.2f} {p.peak_gib:6.2f} {p.memory_error:>+7.1%}"
        )
    print(f"calibrated in {seconds:.0f} s; {summary(found)}")
    print(f"to reach: {AIM}")


if __name__ == "__main__":
    sys.exit(main())
