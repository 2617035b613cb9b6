"""`python -m tests.faults [COMMAND ...]`: every call, every fault; prints what was found."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from .commands import all_commands
from .harness import Server, scratch_folder, try_every_call


def main() -> int:
    known = all_commands()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=", ".join(known))
    parser.add_argument("--every", type=int, default=1, help="only every n-th trial")
    args = parser.parse_args()
    trials = wrong = tracebacks = 0
    for name in args.commands or known:
        began = time.monotonic()
        count = iter(range(10**9))
        with scratch_folder() as scratch, Server(Path(scratch).resolve()) as server:
            tally = try_every_call(known[name], server, lambda n, fault, c=count: next(c) % args.every == 0)
        for finding in tally.findings:
            print(finding)
        print(f"{tally.line()} ({time.monotonic() - began:.0f} s)", flush=True)
        trials += tally.trials
        tracebacks += sum(finding.what == "traceback" for finding in tally.findings)
        wrong += sum(finding.what != "traceback" for finding in tally.findings)
    print(f"in all: {trials:,} trials, {wrong} wrong, {tracebacks} tracebacks")
    return 1 if wrong or tracebacks else 0


if __name__ == "__main__":
    raise SystemExit(main())
