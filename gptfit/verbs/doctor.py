"""`gptfit doctor`: is this machine ready to train, and if not, what to do."""

from __future__ import annotations

import argparse

from gptfit.verbs.common import config_arguments, load, print_json

HELP = "Check this machine: device, torch, bf16, attention, compiler, memory, disk, data."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when something stops a run."""
    config = load(args).config
    from dataclasses import asdict

    from gptfit.run.doctor import examine

    findings = examine(config)
    if args.json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            print(f"{finding.level:<8} {finding.subject:<10} {finding.text}{remedy}")
    return 1 if any(finding.level == "problem" for finding in findings) else 0
