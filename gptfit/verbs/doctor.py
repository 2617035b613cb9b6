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
from gptfit.verbs.common import config_arguments, load, print_json, wrapped
from gptfit.verbs.ticker import Ticker

if TYPE_CHECKING:
    from gptfit.doctor.card import CardLine, CardReport

HELP = "Check this machine: device, torch, bf16, attention, compiler, memory, disk, data."
EXAMPLES = ("gptfit doctor", "gptfit doctor --card")
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
                print(wrapped(f"{finding.level:<8} {finding.where:<10} {finding.line}", 20), flush=True)
    if as_json:
        print_json([finding.as_json() for finding in findings])
    return 1 if any(finding.level == "error" for finding in findings) else 0


def _examine_card(config: TrainConfig, as_json: bool) -> CardReport:
    """Each line as soon as it is there; between them how many checks are done, and what is done now."""
    from gptfit.doctor.card import N_LINES, examine_card

    told = 0
    with Ticker(sys.stderr) as ticker:

        def tell(line: CardLine) -> None:
            nonlocal told
            told += 1
            ticker.clear()
            if not as_json:
                _show_line(line)

        def on_stage(name: str) -> None:
            if sys.stderr.isatty() and name:
                ticker.now(f"{told} of {N_LINES} done: {name}")

        return examine_card(config, tell, on_stage)


def _card(config: TrainConfig, args: argparse.Namespace) -> int:
    from gptfit.plan.calibration import record_of

    files.make_writable_folder(args.out.absolute().parent)  # known now, not after three minutes
    if args.out.is_dir():
        raise UsageError(f"--out {args.out}: is a folder", fix="name a file in it")
    report = _examine_card(config, as_json=args.json)
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
    verdict = line.verdict
    remedy = f"; {verdict.remedy}" if verdict.remedy else ""
    print(wrapped(f"{verdict.level:<8} {line.check:<21} {verdict.text}{remedy}", 9), flush=True)


def _show_end(report: CardReport, path: Path) -> None:
    counts = [
        sum(line.verdict.level == level for line in report.lines) for level in ("ok", "warning", "error", "skipped")
    ]
    ok, warnings, problems, skipped = counts
    print(f"\n{ok} ok, {warnings} warnings, {problems} problems, {skipped} skipped in {report.seconds:.0f} s")
    print(wrapped(f"written to {path}; {WHERE_TO_SEND}", 0))
    if report.calibration:
        print("next: gptfit plan --gpu here")
