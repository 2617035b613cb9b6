"""Fit the four constants of compiled memory to tests/measured.csv and cross-validate them (needs scipy).

    python bench/fit_memory.py           prints constants and errors, updates bench/cross_validation.json

The eager constants are counts of tensors, checked against torch's memory tracker by tests/torch/test_plan_memory.py;
nothing is fitted there. The published compiled rows are almost all of one model, so the hard question is another
micro-batch: each micro-batch size is predicted by constants that never saw it, then each source, then each GPU family.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import _facts as facts
from fit_speed import OUT
from scipy.optimize import least_squares

from gptfit.plan import memory
from gptfit.units import GIB, MIB

# (name, value a count of tensors or a data sheet suggests, relative freedom)
PRIORS = [
    ("block_bytes_compiled", 36.0, 0.1),
    ("logit_bytes_cached", 4.0, 0.2),
    ("sharing_bytes", 1.0 * GIB, 0.5),
    ("context_bytes", 0.5 * GIB, 0.5),
]
PULL = 0.02


def main() -> int:
    rows = [row for row in facts.memory_rows(facts.read()[0]) if row.setting.compile]
    vector = fit(rows)
    for (name, prior, _), value in zip(PRIORS, vector, strict=True):
        print(f"  {name:24s} {value:12.5g}   (prior {prior:g})")
    groups: dict[str, Callable[[facts.Row], str]] = {
        "memory by micro-batch": lambda row: str(row.setting.micro_batch),
        "memory by source": lambda row: row.source,
        "memory by GPU family": lambda row: row.family,
    }
    result = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
    for title, group in groups.items():
        errors = {}
        for name in sorted({group(row) for row in rows}):
            left = fit([row for row in rows if group(row) != name])
            errors.update({row.id: error(left, row) for row in rows if group(row) == name})
        result[title] = errors
        sizes = sorted(map(abs, errors.values()))
        within = sum(size <= 0.10 for size in sizes) / len(sizes)
        print(f"{title}: {len(sizes)} rows, median {sizes[len(sizes) // 2]:.1%}, within 10 %: {within:.0%}")
    OUT.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


def error(vector: list[float], row: facts.Row) -> float:
    values = {name: value for (name, _, _), value in zip(PRIORS, vector, strict=True)}
    predicted = memory.predict(row.setting, replace(memory.FITTED, **values))
    assert row.memory_mib is not None
    estimate = predicted.device if row.memory_kind == "device" else predicted.allocated
    return estimate.value / MIB / row.memory_mib - 1


def fit(rows: list[facts.Row]) -> list[float]:
    votes = Counter((row.source, row.setting.micro_batch) for row in rows)

    def residuals(logs: list[float]) -> list[float]:
        vector = [math.exp(log) for log in logs]
        data = [math.log1p(error(vector, row)) / math.sqrt(votes[row.source, row.setting.micro_batch]) for row in rows]
        pull = [PULL * (log - math.log(prior)) / spread for log, (_, prior, spread) in zip(logs, PRIORS, strict=True)]
        return data + pull

    found = least_squares(residuals, [math.log(prior) for _, prior, _ in PRIORS], loss="soft_l1", f_scale=0.03)
    return [math.exp(log) for log in found.x]


if __name__ == "__main__":
    sys.exit(main())
