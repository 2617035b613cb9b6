"""How long a command takes to say its first word: `--help` and `plan`, beside an earlier state of this repository.

Both run with the same Python and libraries, in turns, each command in a process of its own; the first start of each,
which compiles the sources, is not counted. Prints medians and the ratio (1.0 is equal, less is faster).

--ladder: instead, how long plan takes to find what makes 350M, 774M and 1.5B fit cards of 8 to 24 GB, and its answer.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

REPO = Path(__file__).resolve().parent.parent
BEFORE = "82a1322"  # the last state with one folder per stage instead of one per purpose
COMMANDS = {
    "--help": ["--help"],
    "plan --help": ["plan", "--help"],
    "plan": ["plan", "--gpu", "4070", "--n_layer=6"],
}
SIZES = {"350M": (24, 16, 1024), "774M": (36, 20, 1280), "1.5B": (48, 25, 1600)}
CARDS = ("RTX 3070", "RTX 4070 12GB", "RTX 4060 Ti 16GB", "RTX 4090 24GB")  # 8, 12, 16 and 24 GB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default=BEFORE, help=f"compare with this commit (default {BEFORE})")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ladder", action="store_true", help="time the memory ladder instead")
    args = parser.parse_args()
    if args.ladder:
        return ladders(args.rounds)
    with tempfile.TemporaryDirectory() as folder:
        if not check_out(args.commit, Path(folder)):
            print(f"{args.commit} is not in this clone: nothing to compare with")
            return 0
        trees = {args.commit: Path(folder), "now": REPO}
        for name, words in COMMANDS.items():
            times: dict[str, list[float]] = {tree: [] for tree in trees}
            for turn in range(args.rounds + 1):
                for tree, path in trees.items():
                    seconds = start(path, words)
                    if turn:
                        times[tree].append(seconds)
            report(name, args.commit, times[args.commit], times["now"])
    return 0


def ladders(rounds: int) -> int:
    """Whole commands, start-up and all: the median, the longest, and what plan answered."""
    for size, (layers, heads, width) in SIZES.items():
        for card in CARDS:
            words = [f"--n_layer={layers}", f"--n_head={heads}", f"--n_embd={width}", "--json"]
            times, answer = [], ""
            for _ in range(rounds):
                began = time.perf_counter()
                answer = gptfit(REPO, ["plan", "--gpu", card, *words]).stdout
                times.append(time.perf_counter() - began)
            said = ladder_words(json.loads(answer)["ladder"])
            print(f"{size} on {card}: {median(times):.2f} s (longest {max(times):.2f}): {said}", flush=True)
    return 0


def ladder_words(found: dict[str, Any] | None) -> str:
    if found is None:
        return "fits as it is"
    if found["way"] is None:
        return f"{found['missing_gib']:.1f} GiB are missing with every measure"
    return "fits with " + " ".join(f"{key}={value}" for key, value in found["way"]["keys"].items())


def check_out(commit: str, folder: Path) -> bool:
    archive = subprocess.run(["git", "archive", commit, "gptfit", "configs"], cwd=REPO, capture_output=True)
    if archive.returncode == 0:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
    return archive.returncode == 0


def start(tree: Path, words: list[str]) -> float:
    began = time.perf_counter()
    gptfit(tree, words).check_returncode()
    return time.perf_counter() - began


def gptfit(tree: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(
        [sys.executable, "-m", "gptfit", *words],
        cwd=tree,
        env={**kept, "PYTHONPATH": str(tree), "GPTFIT_CACHE": os.devnull},
        stdout=subprocess.PIPE,
        text=True,
    )


def report(name: str, commit: str, before: list[float], now: list[float]) -> None:
    quarter = [quantiles(times, n=4)[0] for times in (before, now)]
    print(
        f"{name}: {commit} {1e3 * median(before):.0f} ms, now {1e3 * median(now):.0f} ms, "
        f"ratio {median(now) / median(before):.2f} (of the quicker quarters {quarter[1] / quarter[0]:.2f})",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
