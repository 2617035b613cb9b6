"""Notices what became of the watched runs and tells a person who is elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LOOK_EVERY_S = 15.0


@dataclass
class Watcher:
    """Compares each look with the one before; what was so when it began is not news."""

    _before: dict[str, tuple[str, tuple[str, ...]]] | None = field(default=None)

    def news(self, rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
        """Name and words of every run that ended, stopped, or began to need attention since the last look."""
        now = {row["id"]: (row["status"], tuple(_kind(words) for words in row["attention"])) for row in rows}
        before, self._before = self._before, now
        if before is None:
            return []
        found = []
        for row in rows:
            was, known = before.get(row["id"], (row["status"], ()))
            if was == "running" and row["status"] != "running":
                found.append((row["name"], row["status"]))
            found += [(row["name"], words) for words in row["attention"] if _kind(words) not in known]
        return found


def _kind(words: str) -> str:
    """What stays the same while the figures in the words change."""
    return words.partition(":")[0]


def keep_watching(look: Callable[[], list[dict[str, Any]]], tell: Callable[[str, str], None]) -> threading.Thread:
    """In a thread of its own until the program ends; a message that cannot be sent is left out, the next one is tried."""
    watcher = Watcher()

    def watch() -> None:
        while True:
            for name, words in watcher.news(look()):
                tell(name, words)
            pause.wait(LOOK_EVERY_S)

    pause = threading.Event()
    thread = threading.Thread(target=watch, name="gptfit-watcher", daemon=True)
    thread.start()
    return thread
