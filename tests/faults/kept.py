"""Trials that were made, kept in a file from one start of the harness to the next, and the table they come to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .harness import REPO, Call, Fault, Finding, Tally

DOCS = REPO / "docs" / "reliability.md"
BEGIN, END = "<!-- trials: python -m tests.faults --table --write -->\n", "<!-- end of trials -->"


class Kept:
    """One JSON line per trial and one per command that is through."""

    def __init__(self, path: Path | None, every: int = 1) -> None:
        self._path, self._every, self._asked = path, every, 0
        lines = path.read_text(encoding="utf-8").splitlines() if path and path.exists() else []
        self._rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self._made = {(row["command"], row["n"], row["fault"]) for row in self._rows if "fault" in row}

    @property
    def findings(self) -> list[str]:
        return [found for row in self._rows for found in row.get("found", [])]

    def is_wanted_of(self, name: str) -> Callable[[int, Call, Fault], bool]:
        def is_wanted(n: int, call: Call, fault: Fault) -> bool:
            self._asked += 1
            return self._asked % self._every == 0 and (name, n, fault.name) not in self._made

        return is_wanted

    def note_of(self, name: str) -> Callable[[int, Fault, list[Finding]], None]:
        def note(n: int, fault: Fault, findings: list[Finding]) -> None:
            whats = [finding.what for finding in findings]
            said = [str(finding) for finding in findings]
            self._add({"command": name, "n": n, "fault": fault.name, "found": whats, "said": said})

        return note

    def done(self, name: str, tally: Tally) -> None:
        self._add({"command": name, "calls": len(tally.calls)})

    def _add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if self._path:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def table(self, order: list[str]) -> str:
        """Markdown, a line per command and one for all."""
        trials = Counter(row["command"] for row in self._rows if "fault" in row)
        calls = {row["command"]: row["calls"] for row in self._rows if "calls" in row}
        wrong, tracebacks = self._count(lambda what: what != "traceback"), self._count(lambda what: what == "traceback")
        rows = ["| command | calls | trials | wrong | tracebacks |", "|---|---:|---:|---:|---:|"]
        for name in [name for name in order if trials[name]]:
            rows.append(f"| `{name}` | {calls.get(name, '')} | {trials[name]:,} | {wrong[name]} | {tracebacks[name]} |")
        rows.append(f"| in all | | {trials.total():,} | {wrong.total()} | {tracebacks.total()} |")
        return "\n".join([*rows, "", *self._by_fault()]) + "\n"

    def _by_fault(self) -> list[str]:
        faults = Counter(row["fault"] for row in self._rows if "fault" in row)
        return ["By fault: " + ", ".join(f"{name} {count:,}" for name, count in faults.items()) + "."]

    def _count(self, is_meant: Callable[[str], bool]) -> Counter[str]:
        return Counter(row["command"] for row in self._rows for what in row.get("found", []) if is_meant(what))


def put_into_docs(table: str) -> None:
    """Between its two marks."""
    text = DOCS.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    DOCS.write_text(before + BEGIN + "\n" + table + "\n" + END + rest.split(END)[1], encoding="utf-8")
