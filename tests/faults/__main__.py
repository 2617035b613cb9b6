"""`python -m tests.faults [COMMAND ...]`: every call, every fault; prints what was found.

With `--keep FILE` each trial is noted there and not made again; `--table` prints what is noted as docs/reliability.md
has it (`--table --write` puts it there).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from .commands import all_commands
from .harness import Server, scratch_folder, try_every_call
from .kept import Kept, put_into_docs


def main() -> int:
    known = all_commands()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=", ".join(known))
    parser.add_argument("--every", type=int, default=1, help="only every n-th trial of each command")
    parser.add_argument("--offset", type=int, default=0, help="with --every: from this one on; another than last time")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="note each trial here; made ones are not made again")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this long; go on with --keep")
    parser.add_argument("--table", action="store_true", help="make no trials: print those of --keep as a table")
    parser.add_argument("--write", action="store_true", help="with --table: into docs/reliability.md")
    args = parser.parse_args()
    kept = Kept(args.keep, args.every, args.offset, time.monotonic() + args.minutes * 60)
    names = args.commands or list(known)
    if not args.table:
        with_torch = any(known[name].needs_torch for name in names)
        with scratch_folder() as scratch, Server(Path(scratch).resolve(), with_torch) as server:
            for name in names:
                began = time.monotonic()
                tally = try_every_call(known[name], server, kept.is_wanted_of(name), kept.note_of(name))
                for finding in tally.findings:
                    print(finding)
                print(f"{tally.line()} ({time.monotonic() - began:.0f} s)", flush=True)
                kept.done(name, tally)
    print(kept.table(list(known)))
    if args.write:
        put_into_docs(kept.table(list(known)))
    return 1 if kept.findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
