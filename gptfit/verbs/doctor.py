"""`gptfit doctor`: is this machine ready to train, and if not, what to do; with --card, proof on the device itself."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gptfit import files, measured
from gptfit.config.keys import TrainConfig
from gptfit.errors import UsageError
from gptfit.verbs.common import config_arguments, load, print_json
from gptfit.verbs.ticker import Ticker

if TYPE_CHECKING:
    from gptfit.doctor.card import CardLine, CardReport

HELP = "Check this machine: device, torch, bf16, attention, compiler, memory, disk, data."
CARD_FILE = "card.json"
WHERE_TO_SEND = "open an issue and attach it: what we cannot measure, you just did"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--card",
        action="store_true",
        help="up to three minutes of real work on the device; writes card.json and calibrates `plan --gpu here`",
    )
    parser.add_argument("--out", type=Path, default=Path(CARD_FILE), metavar="FILE", help="where card.json goes")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when something stops a run."""
    config = load(args).config
    return _card(config, args) if args.card else _examine(config, args.json)


def _examine(config: TrainConfig, as_json: bool) -> int:
    """Each finding as soon as it is there."""
    findings = []
    with Ticker(sys.stderr) as ticker:
        ticker.now("loading torch")
        from gptfit.doctor.checks import examine

        for finding in examine(config, ticker.now):
            ticker.clear()
            findings.append(finding)
            if not as_json:
                print(f"{finding.level:<8} {finding.where:<10} {finding.line}", flush=True)
    if as_json:
        print_json([finding.as_json() for finding in findings])
    return 1 if any(finding.level == "error" for finding in findings) else 0


def _card(config: TrainConfig, args: argparse.Namespace) -> int:
    from gptfit.doctor.card import examine_card
    from gptfit.plan.calibration import record_of

    files.make_writable_folder(args.out.absolute().parent)  # known now, not after three minutes
    if args.out.is_dir():
        raise UsageError(f"--out {args.out}: is a folder", fix="name a file in it")
    report = examine_card(config, _show_nothing if args.json else _show_line, _show_stage)
    try:
        files.write_text(args.out, json.dumps(report.as_json(), indent=1) + "\n")
    finally:  # minutes of measuring are kept, whatever becomes of the file to send
        if report.calibration:
            measured.append([record_of(report.calibration)])
    if args.json:
        print_json(report.as_json())
    else:
        _show_end(report, args.out)
    return 1 if report.has_error else 0


def _show_line(line: CardLine) -> None:
    _show_stage("")
    verdict = line.verdict
    remedy = f"; {verdict.remedy}" if verdict.remedy else ""
    print(f"{verdict.level:<8} {line.check:<22} {verdict.text}{remedy}", flush=True)


def _show_nothing(line: CardLine) -> None:
    pass


def _show_stage(name: str) -> None:
    """What is being done, on a terminal, in a line that the next one replaces."""
    if sys.stderr.isatty():
        print(f"\r\033[K{name}{' ...' if name else ''}", end="", file=sys.stderr, flush=True)


def _show_end(report: CardReport, path: Path) -> None:
    counts = [
        sum(line.verdict.level == level for line in report.lines) for level in ("ok", "warning", "error", "skipped")
    ]
    ok, warnings, problems, skipped = counts
    print(f"\n{ok} ok, {warnings} warnings, {problems} problems, {skipped} skipped in {report.seconds:.0f} s")
    print(f"written to {path}; {WHERE_TO_SEND}")
    if report.calibration:
        print("`gptfit plan CONFIG.py --gpu here` now uses what was measured")
