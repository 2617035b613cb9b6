"""Fit the constants of the speed model to tests/measured.csv and cross-validate them (needs scipy).

    python bench/fit_speed.py            prints constants and errors, writes bench/cross_validation.json

Few constants, each with a meaning, pulled softly towards the value a count of bytes gives (PRIORS), so that a small
table cannot drag them anywhere. Rows of one card and shape share one vote. The error that counts is the
cross-validated one: every row predicted by constants that never saw its GPU family, and again its source.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import _facts as facts
from scipy.optimize import least_squares

from gptfit.plan import link, matmul_rate, speed

OUT = Path(__file__).resolve().parent / "cross_validation.json"

# (name, value a count or the data sheet suggests, how far it may stray in relative terms for one row's worth of pull)
PRIORS = [
    ("matmul_rate.geforce", 1.0, 0.3),
    ("matmul_rate.full_rate", 0.9, 0.3),
    ("matmul_rate.half_power_gddr", 0.9, 1.0),
    ("matmul_rate.half_power_hbm", 0.5, 1.0),
    ("speed.block_bytes", 150.0, 0.3),
    ("speed.logit_bytes", 12.0, 0.3),
    ("speed.micro_step_weight_bytes", 22.0, 0.4),
    ("speed.block_bytes_eager", 270.0, 0.4),
    ("speed.logit_bytes_eager", 22.0, 0.4),
    ("speed.score_bytes", 40.0, 0.5),
    ("speed.score_bytes_eager", 130.0, 0.5),
    ("speed.flash_rate", 0.7, 0.3),
    ("link.geforce_gbs", 3.0, 1.0),
    ("link.nvlink_gbs", 100.0, 1.0),
]
FITTED_KINDS = ("GeForce", "other NVIDIA", "eager", "naive attention")
ROBUST = 0.10  # residuals beyond 10 % count linearly: a throttled host must not bend the model


def main() -> int:
    rows, _ = facts.read()
    used = [row for row in facts.speed_rows(rows)[0] if row.kind in FITTED_KINDS]
    vector = fit(used)
    print(f"{len(used)} rows, {len(vector)} constants")
    for (name, prior, _), value in zip(PRIORS, vector, strict=True):
        print(f"  {name:32s} {value:8.3g}   (prior {prior:g})")
    result = {
        "by GPU family": _cross_validate(used, lambda row: row.family),
        "by source": _cross_validate(used, lambda row: row.source),
        "by row, several GPUs": _cross_validate(used, lambda row: row.id, lambda row: row.setting.processes > 1),
        "fitted": {row.id: error(vector, row) for row in used},
    }
    for name, errors in result.items():
        print(name)
        for line in summary(used, errors):
            print("  " + line)
    result = {**json.loads(OUT.read_text(encoding="utf-8")), **result}  # bench/fit_memory.py's part stays
    OUT.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


def constants(vector: list[float]) -> tuple[speed.Constants, matmul_rate.RateConstants, link.LinkConstants]:
    found: dict[str, dict[str, float]] = {"speed": {}, "matmul_rate": {}, "link": {}}
    for (name, _, _), value in zip(PRIORS, vector, strict=True):
        kind, _, field = name.partition(".")
        found[kind][field] = float(value)
    return (
        replace(speed.FITTED, **found["speed"]),
        replace(matmul_rate.FITTED, **found["matmul_rate"]),
        replace(link.FITTED, **found["link"]),
    )


def error(vector: list[float], row: facts.Row) -> float:
    """Relative error of tokens/s: +0.1 is predicted ten per cent too fast."""
    predicted = speed.predict(row.setting, row.gpu, None, *constants(vector))
    assert predicted is not None
    assert row.tokens_per_s is not None
    return predicted.tokens_per_s.value / row.tokens_per_s - 1


def fit(rows: list[facts.Row]) -> list[float]:
    votes = Counter((row.gpu.name, row.setting.shape.n_embd, row.kind) for row in rows)

    def residuals(logs: list[float]) -> list[float]:
        vector = [math.exp(log) for log in logs]
        data = [
            math.log1p(error(vector, row)) / math.sqrt(votes[row.gpu.name, row.setting.shape.n_embd, row.kind])
            for row in rows
        ]
        pull = [ROBUST * (log - math.log(prior)) / spread for log, (_, prior, spread) in zip(logs, PRIORS, strict=True)]
        return data + pull

    start = [math.log(prior) for _, prior, _ in PRIORS]
    found = least_squares(residuals, start, loss="soft_l1", f_scale=ROBUST)
    return [math.exp(log) for log in found.x]


def _cross_validate(
    rows: list[facts.Row], group: Callable[[facts.Row], str], chosen: Callable[[facts.Row], bool] = lambda _: True
) -> dict[str, float]:
    """The error of the chosen rows, each by constants fitted without its group."""
    errors = {}
    for name in sorted({group(row) for row in rows if chosen(row)}):
        vector = fit([row for row in rows if group(row) != name])
        errors.update({row.id: error(vector, row) for row in rows if group(row) == name})
    return errors


def summary(rows: list[facts.Row], errors: dict[str, float]) -> list[str]:
    lines = []
    for kind in FITTED_KINDS:
        sizes = sorted(abs(errors[row.id]) for row in rows if row.kind == kind and row.id in errors)
        if sizes:
            nine_tenths = sizes[min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)]
            lines.append(
                f"{kind:16s} {len(sizes):2d} rows  median {sizes[len(sizes) // 2]:5.1%}  90 % within {nine_tenths:5.1%}"
            )
    return lines


if __name__ == "__main__":
    sys.exit(main())
