"""`gptfit watch FOLDER`: a live local page of the runs in a folder, and the plan page beside it."""

from __future__ import annotations

import argparse
import sys
from http.client import HTTPException
from pathlib import Path
from subprocess import SubprocessError

from gptfit.errors import RunError
from gptfit.files import reason_of
from gptfit.notify import check_target, send
from gptfit.verbs.make_plan import plan_arguments
from gptfit.verbs.serve import address_arguments, serve

HELP = "A live page of the runs in a folder: status, curves as they grow, samples, and any of them compared."
EXAMPLES = ("gptfit watch .", "gptfit watch runs --notify desktop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", default=".", help="where the run folders are (default: here)")
    parser.add_argument(
        "--notify",
        default="",
        metavar="WHERE",
        help="tell when a run ends or needs attention: desktop, or a URL (ntfy)",
    )
    address_arguments(parser)


def run(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    if not folder.is_dir():
        raise RunError(f"{folder}: no such folder", fix="name the folder your runs are in")
    parser = argparse.ArgumentParser()
    plan_arguments(parser)
    check_target(args.notify)
    if args.notify:
        _tell_news(folder, args.notify)
    print(f"watching {folder.resolve()}")
    return serve(folder, args, parser.parse_args([]))


def _tell_news(folder: Path, target: str) -> None:
    from gptfit.pages.run_list import Listing
    from gptfit.pages.watcher import keep_watching

    def tell(name: str, words: str) -> None:
        try:
            send(target, f"gptfit: {name}", words)
        except (OSError, ValueError, HTTPException, SubprocessError) as error:
            print(f"gptfit: {target} could not be told ({reason_of(error)})", file=sys.stderr, flush=True)

    keep_watching(Listing(folder.resolve()).runs, tell)
