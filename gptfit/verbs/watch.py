"""`gptfit watch FOLDER`: a live local page of the runs in a folder, and the plan page beside it."""

from __future__ import annotations

import argparse
from pathlib import Path

from gptfit.errors import RunError
from gptfit.verbs.make_plan import plan_arguments
from gptfit.verbs.serve import address_arguments, serve

HELP = "A live page of the runs in a folder: status, curves as they grow, samples, and any of them compared."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", default=".", help="where the run folders are (default: here)")
    address_arguments(parser)


def run(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    if not folder.is_dir():
        raise RunError(f"{folder}: no such folder", fix="name the folder your runs are in")
    parser = argparse.ArgumentParser()
    plan_arguments(parser)
    print(f"watching {folder.resolve()}")
    return serve(folder, args, parser.parse_args([]))
