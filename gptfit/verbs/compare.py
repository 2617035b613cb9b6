"""`gptfit compare A B`: which run is better and why, from their logs; as text, JSON or a page."""

from __future__ import annotations

import argparse
from pathlib import Path

from gptfit.errors import UsageError
from gptfit.logs.open_run import open_run
from gptfit.logs.runlog import RunLog
from gptfit.shell import command
from gptfit.verbs.common import console, print_json

HELP = (
    "Two or more runs side by side: what changed, how fast, validation at equal steps, tokens, time and FLOPs, and why."
)
EXAMPLES = ("gptfit compare out-a out-b --html comparison.html", "gptfit compare log-a.txt log-b.txt --gpu 4070")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run folder, run.jsonl, or stdout of nanoGPT or nanochat"
    )
    parser.add_argument(
        "--config",
        nargs="+",
        default=[],
        metavar="CONFIG.py",
        help="configs of logs that do not echo theirs, in the same order",
    )
    parser.add_argument("--gpu", help="the card they ran on, where the log does not say")
    parser.add_argument("--html", metavar="FILE", help="also write a self-contained page")
    parser.add_argument("--json", action="store_true", help="everything as JSON")


def run(args: argparse.Namespace) -> int:
    from gptfit.compare.comparison import compare_runs
    from gptfit.compare.comparison_json import comparison_json
    from gptfit.compare.sentences import explain
    from gptfit.verbs.compare_view import print_comparison

    logs = open_runs(args.runs, args.config)
    comparison = compare_runs(logs, args.gpu)
    explanation = explain(comparison)
    if args.html:
        from gptfit.pages.report import write_page

        write_page(logs, comparison, explanation, Path(args.html))
    if args.json:
        print_json(comparison_json(comparison, explanation))
        return 0
    out = console()
    print_comparison(out, comparison, explanation)
    out.print(f"\n{f'page: {args.html}' if args.html else _as_page(args)}", markup=False, soft_wrap=True)
    return 0


def _as_page(args: argparse.Namespace) -> str:
    """The same with its curves to look at; the runs first, since --config takes every name that follows."""
    more = [*(["--gpu", args.gpu] if args.gpu else []), *(["--config", *args.config] if args.config else [])]
    return "as a page: " + command(["gptfit", "compare", *args.runs, *more, "--html", "comparison.html"])


def open_runs(runs: list[str], configs: list[str]) -> list[RunLog]:
    """One config serves every run that lacks one; several are matched in order."""
    if len(configs) > 1 and len(configs) != len(runs):
        raise UsageError(
            f"--config names {len(configs)} files for {len(runs)} runs", fix="give one, or one per run in order"
        )
    paths: list[str] | list[None] = configs * len(runs) if len(configs) == 1 else configs or [None] * len(runs)
    return [open_run(run, config) for run, config in zip(runs, paths, strict=True)]
