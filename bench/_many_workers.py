"""Prepare with many workers: the interpreter lock's part, Ray with 1, 2 and 4 of them, a cluster on paper.

What was measured is kept in many_workers.json; the section of docs/prepare.md is written from it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from _lockshare import efficiency, lock_share

BENCH = Path(__file__).resolve().parent
KEPT = BENCH / "many_workers.json"
PAGE = BENCH.parent / "docs" / "prepare.md"
BEGIN, END = "<!-- written by bench/prepare.py -->\n", "<!-- end -->\n"
PIECE_TOKENS = 2**19  # about what one batch of 2 MiB of text becomes
RAY_WORKERS = (1, 2, 4)
FILES = 8
# The cluster on paper, and one file of FineWeb's 10BT sample: 14 files of 2.15 GB.
PAPER_FILES, MACHINES, CORES, GBITS = 1000, 32, 16, 10.0
FINEWEB_TOKENS, FINEWEB_BYTES = 10e9 / 14, 2.15e9

Found = Mapping[str, Any]


def measure_lock(files: list[Path], rounds: int, folder: Path) -> dict[str, Any]:
    tokens = np.zeros(8 * 2**20, np.uint16)
    per_gb = _merge_seconds(tokens, folder) / (tokens.nbytes / 1e9)
    return {"share": lock_share(files, rounds), "merge_cpu_s_per_gb": per_gb, "python": sys.version.split()[0]}


def measure_ray(sources: Path, characters: int, folder: Path) -> dict[str, Any]:
    runs, tokens = [], 0
    for workers in RAY_WORKERS:
        program = RAY_PROGRAM.format(str(sources), str(folder / f"out{workers}"), workers)
        words = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
        seconds, tokens = float(words.split()[0]), int(words.split()[1])
        runs.append({"workers": workers, "seconds": seconds})
    return {"runs": runs, "tokens": tokens, "characters": characters, "cores": os.cpu_count()}


# Wall time: Ray's workers are no children of this process, so that nobody counts their CPU time for us.
RAY_PROGRAM = """
import ray, time
from pathlib import Path
from gptfit.data.options import PrepareOptions
from gptfit.data.prepare import prepare
ray.init(num_cpus={2}, include_dashboard=False, log_to_driver=False)
began = time.perf_counter()
info = prepare(PrepareOptions(({0!r},), Path({1!r}), engine="ray", workers={2}))
print(time.perf_counter() - began, info.train.tokens)
ray.shutdown()
"""


def keep(name: str, found: Found) -> None:
    """And write the page's section anew."""
    kept = read_kept() | {name: found}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + section(kept) + END + rest.partition(END)[2], encoding="utf-8")


def read_kept() -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    return kept


def section(kept: Found) -> str:
    lines = {"lock": lock_lines, "ray": ray_lines}
    return "\n\n".join("\n".join(lines[name](kept[name])) for name in lines if name in kept) + "\n"


def lock_lines(found: Found) -> list[str]:
    share = found["share"]
    at = {threads: f"{efficiency(share, threads):.0%}".replace("%", " %") for threads in (2, 3, 4, 8, 16)}
    return [
        f"One worker holds Python's interpreter lock for {100 * share:.0f} % of its time (CPython {found['python']}). So of the",
        f"time of 2 threads of one process {at[2]} would be work, of 3 {at[3]}, of 4 {at[4]}, of 8 {at[8]}, of 16 {at[16]}: two workers",
        "are threads, and from three on each is a process of its own. The one reader that joins them needs",
        f"{found['merge_cpu_s_per_gb']:.1f} CPU-seconds per GB of tokens.",
    ]


def ray_lines(found: Found) -> list[str]:
    tokens, runs, cores = found["tokens"], found["runs"], found["cores"]
    one = runs[0]["seconds"]
    core_seconds = max(run["seconds"] * run["workers"] for run in runs if run["workers"] <= cores)
    return [
        f"Ray, {FILES} files, {found['characters'] / 1e6:.0f} million characters, {tokens / 1e6:.0f} million tokens, {cores} cores with nothing else to do:",
        "",
        "| workers | seconds | times one |",
        "|---|---|---|",
        *(f"| {run['workers']} | {run['seconds']:.1f} | {one / run['seconds']:.2f} |" for run in runs),
        "",
        *paper_lines(tokens / core_seconds),
    ]


def paper_lines(tokens_per_s: float) -> list[str]:
    """What a cluster takes if each core does as much, and nothing but cores and its disks' network limits it."""
    tokens = PAPER_FILES * FINEWEB_TOKENS
    computing = tokens / (tokens_per_s * MACHINES * CORES) / 60
    moving = (PAPER_FILES * FINEWEB_BYTES + 2 * tokens) / (MACHINES * GBITS / 8 * 1e9) / 60
    whole = max(computing, moving)
    return [
        f"On paper, {PAPER_FILES:,} files of FineWeb ({tokens / 1e9:.0f}B tokens) on {MACHINES} machines of {CORES} cores, each at the lowest pace of a core above:",
        f"{whole:.1f} min ({computing:.1f} computing, {moving:.1f} reading and writing at {GBITS:g} Gbit/s each) in {4 * MACHINES * CORES:,} shards;",
        f"a machine that is lost costs at most {whole / 4:.1f} min of work of each of its cores. Nobody measured that.",
    ]


def _merge_seconds(tokens: npt.NDArray[np.uint16], folder: Path) -> float:
    """CPU-seconds to take these tokens out of a pipe and append them to a file."""
    from gptfit.data.worker_processes import _read, _widen

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    _widen(ours)
    child = context.Process(target=_pour, args=(theirs, tokens), daemon=True)
    child.start()
    theirs.close()
    ours.recv()
    began = time.process_time()
    with open(folder / "merged.bin", "wb") as file:
        for _ in range(0, len(tokens), PIECE_TOKENS):
            file.write(_read(ours.fileno(), PIECE_TOKENS, "uint16").data)
    spent = time.process_time() - began
    child.join()
    return spent


def _pour(connection: Connection, tokens: npt.NDArray[np.uint16]) -> None:
    connection.send("ready")
    for first in range(0, len(tokens), PIECE_TOKENS):
        left = tokens[first : first + PIECE_TOKENS].data.cast("B")
        while left:
            left = left[os.write(connection.fileno(), left) :]
