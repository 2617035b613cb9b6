"""Fit the CUDA context to the compiled rows of tests/measured.csv and cross-validate three ways to predict memory.

    python bench/fit_memory.py           prints the constant and errors, updates bench/cross_validation.json

`counted` is gptfit/plan/memory.py: tensors counted at the peak, and what the allocator holds besides. `replayed` runs the
allocator's rules over every tensor of a step (bench/replay.py). Of both only the context is fitted. `fitted term` is what
stood in their place until then, four constants fitted to these rows; its errors are kept as they were.

The published compiled rows are almost all of one model, so the hard question is another micro-batch: each micro-batch size
is predicted by a constant that never saw it, then each source, then each GPU family.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import _facts as facts
from _lifetimes import replay

from gptfit.plan import memory
from gptfit.plan.holding import GRADIENT_BYTES
from gptfit.plan.setting import Setting
from gptfit.units import MIB

OUT = Path(__file__).with_name("cross_validation.json")
CONTEXTS_MIB = range(100, 1500)
GROUPS: dict[str, Callable[[facts.Row], str]] = {
    "micro-batch": lambda row: str(row.setting.micro_batch),
    "source": lambda row: row.source,
    "GPU family": lambda row: row.family,
}
# (allocated, held by the allocator) in MiB, without the context.
Model = Callable[[Setting], tuple[float, float]]


def main() -> int:
    rows = [row for row in facts.memory_rows(facts.read()[0]) if row.setting.compile]
    result = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
    for name, model in MODELS.items():
        print(f"{name}: context {fit(model, rows)} MiB")
        for title, group in GROUPS.items():
            errors = held_out(model, rows, group)
            result[key(name, title)] = errors
            print(f"  by {title}: {summary(errors.values())}")
    OUT.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


def key(model: str, group: str) -> str:
    """Under which bench/cross_validation.json keeps it."""
    return f"memory by {group}, {model}"


def summary(errors: Iterable[float]) -> str:
    sizes = sorted(map(abs, errors))
    nine_tenths = sizes[max(0, math.ceil(0.9 * len(sizes)) - 1)]
    return f"median {sizes[len(sizes) // 2]:.1%}, 90 % within {nine_tenths:.1%}, largest {sizes[-1]:.1%}"


def held_out(model: Model, rows: list[facts.Row], group: Callable[[facts.Row], str]) -> dict[str, float]:
    """Each row's error with a context fitted without its group."""
    errors = {}
    for name in sorted({group(row) for row in rows}):
        context = fit(model, [row for row in rows if group(row) != name])
        errors.update({row.id: error(model, row, context) for row in rows if group(row) == name})
    return errors


def fit(model: Model, rows: list[facts.Row]) -> int:
    """Least squares of relative errors; rows of one source and micro-batch have one vote together."""
    shown = [row for row in rows if row.memory_kind == "device"]
    votes = Counter((row.source, row.setting.micro_batch) for row in shown)

    def badness(context: int) -> float:
        return sum(
            math.log1p(error(model, row, context)) ** 2 / votes[row.source, row.setting.micro_batch] for row in shown
        )

    return min(CONTEXTS_MIB, key=badness)


def error(model: Model, row: facts.Row, context_mib: float) -> float:
    allocated, held = model(row.setting)
    assert row.memory_mib is not None
    return (held + context_mib if row.memory_kind == "device" else allocated) / row.memory_mib - 1


@cache
def counted(setting: Setting) -> tuple[float, float]:
    predicted = memory.predict(setting)
    return predicted.allocated.value / MIB, (predicted.device.value - memory.FITTED.context_bytes) / MIB


@cache
def replayed(setting: Setting) -> tuple[float, float]:
    held = replay(setting)
    # DDP's buckets, beside the gradients; the published runs do not put one into the other.
    buckets = GRADIENT_BYTES * setting.shape.n_weights if setting.processes > 1 else 0
    return (held.allocated + buckets) / MIB, (held.reserved + buckets) / MIB


MODELS: dict[str, Model] = {"counted": counted, "replayed": replayed}


if __name__ == "__main__":
    sys.exit(main())
