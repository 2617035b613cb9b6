"""`make bench`: every benchmark in turn, alone on the machine; each prints its ratios and says what it measured.

Benchmarks that run a peer side by side need its checkout: GPTFIT_NANOGPT=/path/to/nanoGPT.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent
NEEDS_NANOGPT = {"train.py", "sample.py", "recipe.py"}
NOT_BENCHES = {"run_all.py"}


def main() -> int:
    nanogpt = os.environ.get("GPTFIT_NANOGPT")
    failed = []
    for script in sorted(BENCH.glob("*.py")):
        if script.name in NOT_BENCHES or script.name.startswith("_"):
            continue
        words = [sys.executable, str(script)]
        if script.name in NEEDS_NANOGPT and nanogpt:
            words += ["--nanogpt", nanogpt]
        print(f"\n== bench/{script.name}", flush=True)
        if subprocess.run(words).returncode:
            failed.append(script.name)
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall benchmarks ran")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
