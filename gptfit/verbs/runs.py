"""`gptfit runs FOLDER`: the runs in a folder as a table or JSON, with what needs attention."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from gptfit.errors import RunError
from gptfit.files import reading_remedy, reason_of
from gptfit.units import duration, si
from gptfit.verbs.common import console, print_json

HELP = "The runs in a folder: status, step, loss, speed, and what needs attention."
EXAMPLES = ("gptfit runs . --sort val_loss",)
SORTS = ("written", "val_loss", "loss", "name", "step", "tokens_per_s")
LARGEST_FIRST = ("written", "step", "tokens_per_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", default=".", help="where the run folders are (default: here)")
    parser.add_argument("--sort", choices=SORTS, default="written", help="default: written, the newest first")
    parser.add_argument("--json", action="store_true", help="print JSON with stable names")


def run(args: argparse.Namespace) -> int:
    from gptfit.pages.run_list import Listing

    folder = Path(args.folder)
    if not folder.is_dir():
        raise RunError(f"{folder}: no such folder", fix="name the folder your runs are in")
    try:
        os.listdir(folder)
    except OSError as error:
        raise RunError(f"{folder}: cannot be read ({reason_of(error)})", fix=reading_remedy(error)) from None
    rows = sorted_runs(Listing(folder.resolve()).runs(), args.sort)
    if args.json:
        print_json([{key: value for key, value in row.items() if key != "spark"} for row in rows])
    else:
        _show(rows, folder)
    return 0


def sorted_runs(rows: list[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """Runs that lack the figure come last, whichever way the others are sorted."""
    from gptfit.pages.run_list import differ_in_tokenizer

    if by == "val_loss" and differ_in_tokenizer(rows):
        by = "bits_per_byte"
    known = [row for row in rows if row[by] is not None]
    known.sort(key=lambda row: row[by], reverse=by in LARGEST_FIRST)
    return known + [row for row in rows if row[by] is None]


def _show(rows: list[dict[str, Any]], folder: Path) -> None:
    from rich.table import Table
    from rich.text import Text

    out = console()
    if not rows:
        out.print(f"no runs in {folder}; `gptfit train` makes one", markup=False)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="cyan")
    table.add_column("run", overflow="fold")
    table.add_column("status", overflow="fold")
    in_bits = any(row["bits_per_byte"] is not None for row in rows)
    for name in ("step", "loss", *(["b/byte"] if in_bits else []), "val", "tokens/s", "left"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        step = f"{row['step']:,}" + (f" of {row['max_iters']:,}" if row["max_iters"] else "")
        words = Text(row["status"])
        for said in row["attention"]:
            words.append(f"\n{said}", style="red")
        left = duration(row["seconds_left"]) if row["seconds_left"] and row["status"] == "running" else ""
        speed = si(row["tokens_per_s"]) if row["tokens_per_s"] else ""
        bits = [_loss(row["bits_per_byte"])] if in_bits else []
        table.add_row(Text(row["name"]), words, step, _loss(row["loss"]), *bits, _loss(row["val_loss"]), speed, left)
    out.print(table)


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
