"""What docs/formulas.md says a proposal and its neighbours reached is what bench/propose.py kept."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

NEAR = 0.05  # nats per token


def rows(repo: Path) -> list[list[str]]:
    page = (repo / "docs" / "formulas.md").read_text(encoding="utf-8")
    table = page.partition("| run (layers x width")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_every_figure_is_of_a_kept_run_and_the_choice_is_near_the_best(repo: Path) -> None:
    lines = (repo / "bench" / "propose_runs.jsonl").read_text(encoding="utf-8").splitlines()
    runs = [json.loads(line) for line in lines]
    for column, label, bytes_per_token in ((1, "characters", 1.0), (2, "", 2.91)):
        kept = {
            f"{run['curve']['points'][-1]['val_loss']:.4f}"
            for run in runs
            if "bits per byte" in run["run"] and ("characters" in run["run"]) == (label == "characters")
        }
        said = [row[column] for row in rows(repo) if row[column]]
        assert set(said) <= kept
        gap = float(said[0]) - min(map(float, said))
        assert gap * math.log(2) * bytes_per_token <= NEAR
    assert re.match(r"proposed", rows(repo)[0][0])
