"""Trials that were made, kept in a file from one start of the harness to the next, and the table they come to."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .harness import REPO, Call, Fault, Finding, Tally

DOCS = REPO / "docs" / "reliability.md"
BEGIN, END = "<!-- trials: python -m tests.faults --table --write -->\n", "<!-- end of trials -->"


class Kept:
    """One JSON line per trial and one per command that is through, each with the commit it was made with.

    Of a command only what the last commit showed counts: after a mend its trials are made again.
    """

    def __init__(self, path: Path | None, every: int = 1, offset: int = 0, until: float = math.inf) -> None:
        """Of each command's trials every n-th is wanted, from number `offset`; `until`: when to stop, of time.monotonic()."""
        self._path, self._every, self._offset, self._until = path, every, offset % every, until
        self._code = present_code()
        lines = path.read_text(encoding="utf-8").splitlines() if path and path.exists() else []
        rows = [json.loads(line) for line in lines]
        last = {row["command"]: row["code"] for row in rows}
        self._rows: list[dict[str, Any]] = [row for row in rows if row["code"] == last[row["command"]]]
        self._made = {
            (row["command"], row["n"], row["fault"])
            for row in self._rows
            if "fault" in row and row["code"] == self._code
        }

    @property
    def findings(self) -> list[str]:
        return [found for row in self._rows for found in row.get("found", [])]

    def is_wanted_of(self, name: str) -> Callable[[int, Call, Fault], bool]:
        asked = itertools.count()

        def is_wanted(n: int, call: Call, fault: Fault) -> bool:
            is_new = next(asked) % self._every == self._offset and (name, n, fault.name) not in self._made
            return is_new and not self._is_over

        return is_wanted

    def note_of(self, name: str) -> Callable[[int, Fault, list[Finding]], None]:
        def note(n: int, fault: Fault, findings: list[Finding]) -> None:
            whats = [finding.what for finding in findings]
            said = [str(finding) for finding in findings]
            which = {"every": self._every, "offset": self._offset}
            self._add({"command": name, "n": n, "fault": fault.name, **which, "found": whats, "said": said})

        return note

    def done(self, name: str, tally: Tally) -> None:
        if not self._is_over:
            self._add({"command": name, "calls": len(tally.calls)})

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._until

    def _add(self, row: dict[str, Any]) -> None:
        row["code"] = self._code
        self._rows = [kept for kept in self._rows if kept["command"] != row["command"] or kept["code"] == self._code]
        self._rows.append(row)
        if self._path:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def table(self, order: list[str]) -> str:
        """Markdown, a line per command and one for all; `which`: 3 + 14n is every 14th trial from number 3."""
        trials = Counter(row["command"] for row in self._rows if "fault" in row)
        calls = {row["command"]: row["calls"] for row in self._rows if "calls" in row}
        wrong, tracebacks = self._count(lambda what: what != "traceback"), self._count(lambda what: what == "traceback")
        code = {row["command"]: row["code"] for row in self._rows}
        rows = [
            "| command | calls | trials | which | wrong | tracebacks | commit |",
            "|---|---:|---:|---|---:|---:|---|",
        ]
        for name in [name for name in order if trials[name]]:
            counts = (
                f"{calls.get(name, '')} | {trials[name]:,} | {self._which(name)} | {wrong[name]} | {tracebacks[name]}"
            )
            rows.append(f"| `{name}` | {counts} | {code[name]} |")
        rows.append(f"| in all | | {trials.total():,} | | {wrong.total()} | {tracebacks.total()} | |")
        return "\n".join([*rows, "", *self._by_fault()]) + "\n"

    def _which(self, name: str) -> str:
        """Of all its trials, in words as short as a table needs."""
        made = {(row["every"], row["offset"]) for row in self._rows if row["command"] == name and "every" in row}
        return ", ".join("all" if every == 1 else f"{offset} + {every}n" for every, offset in sorted(made))

    def _by_fault(self) -> list[str]:
        faults = Counter(row["fault"] for row in self._rows if "fault" in row)
        return ["By fault: " + ", ".join(f"{name} {count:,}" for name, count in faults.items()) + "."]

    def _count(self, is_meant: Callable[[str], bool]) -> Counter[str]:
        return Counter(row["command"] for row in self._rows for what in row.get("found", []) if is_meant(what))


def present_code() -> str:
    """The last commit that changed gptfit, marked where its files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(REPO), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    is_changed = bool(git("status", "--porcelain", "--", "gptfit"))
    return git("log", "-1", "--format=%h", "--abbrev=7", "--", "gptfit") + "-changed" * is_changed


def put_into_docs(table: str) -> None:
    """Between its two marks."""
    text = DOCS.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    DOCS.write_text(before + BEGIN + "\n" + table + "\n" + END + rest.split(END)[1], encoding="utf-8")
