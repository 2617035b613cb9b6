"""The model behind the chat page: one child process at a time, started when first asked, ended when nobody asks."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

IDLE_SECONDS = 600.0  # without a question; a model takes memory that a training run may want
END_SECONDS = 5.0
LAST_WORDS = 2000  # bytes of what a child that failed said

Start = Callable[[Path], list[str]]


def chat_command(run: Path) -> list[str]:
    """`gptfit chat`, which is allowed what this package is not: torch."""
    return [sys.executable, "-m", "gptfit", "chat", str(run), "--lines"]


@dataclass
class ChatChild:
    """Answers one question at a time; asking another run ends the model of the one before."""

    start: Start = chat_command
    idle_seconds: float = IDLE_SECONDS
    _process: subprocess.Popen[str] | None = None
    _run: Path | None = None
    _lines: queue.Queue[dict[str, Any]] = field(default_factory=queue.Queue)
    _outbox: queue.Queue[str | None] = field(default_factory=queue.Queue)
    _busy: threading.Lock = field(default_factory=threading.Lock)
    _timer: threading.Timer | None = None
    _threads: list[threading.Thread] = field(default_factory=list)

    @property
    def is_busy(self) -> bool:
        return self._busy.locked()

    def ask(self, run: Path, messages: list[Any]) -> Answer | None:
        """None while another answer is being written. Waits for nothing: neither for the child nor for its end."""
        if not self._busy.acquire(blocking=False):
            return None
        try:
            if self._timer:
                self._timer.cancel()
            if self._process is None or self._process.poll() is not None or run != self._run:
                self._begin(run)
            self._say({"messages": messages})
        except BaseException:
            self._busy.release()
            raise
        return Answer(self)

    def end(self) -> None:
        """The child, whatever it is doing."""
        process, self._process = self._process, None
        self._outbox.put(None)
        if process is not None:
            _end(process)
        for thread in self._threads:
            thread.join(END_SECONDS)

    def _begin(self, run: Path) -> None:
        old, self._process = self._process, None
        self._outbox.put(None)
        if old is not None:
            threading.Thread(target=_end, args=(old,), daemon=True).start()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self.start(run), stdin=pipe, stdout=pipe, stderr=pipe, text=True, encoding="utf-8", errors="replace"
        )
        self._run, self._lines, self._outbox = run, queue.Queue(), queue.Queue()
        jobs = ((_pass_on, (self._process, self._lines)), (_hand_in, (self._process, self._outbox)))
        self._threads = [threading.Thread(target=job, args=args, daemon=True) for job, args in jobs]
        for thread in self._threads:
            thread.start()

    def _say(self, value: dict[str, Any]) -> None:
        self._outbox.put(json.dumps(value) + "\n")

    def _done(self) -> None:
        self._timer = threading.Timer(self.idle_seconds, self._end_if_idle)
        self._timer.daemon = True
        self._timer.start()
        self._busy.release()

    def _end_if_idle(self) -> None:
        if self._busy.acquire(blocking=False):
            self.end()
            self._busy.release()


class Answer:
    """Lines of one answer as they come; `close` stops it, as when the browser went away."""

    def __init__(self, child: ChatChild) -> None:
        self._child = child
        self._is_open = True
        self._has_ended = False

    def next(self, seconds: float) -> dict[str, Any] | None:
        """The next line, or None where none came in time."""
        try:
            line = self._child._lines.get(timeout=seconds)
        except queue.Empty:
            return None
        self._has_ended = "end" in line or "error" in line
        return line

    def close_soon(self) -> None:
        """For a caller that must not wait for the model's last word."""
        if self._has_ended:
            self.close()
        else:
            threading.Thread(target=self.close, daemon=True).start()

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if not self._has_ended:
            self._child._say({"stop": True})
            while not self._has_ended and self.next(END_SECONDS) is not None:
                pass  # what was on its way
            if not self._has_ended:
                self._child.end()  # it is still being loaded, or stuck
        self._child._done()


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _hand_in(process: subprocess.Popen[str], outbox: queue.Queue[str | None]) -> None:
    """What is said to the child, which may not read before its model is loaded."""
    assert process.stdin is not None
    with suppress(OSError, ValueError):  # a child that is gone says why in its last line
        while (line := outbox.get()) is not None:
            process.stdin.write(line)
            process.stdin.flush()
    with suppress(OSError, ValueError):
        process.stdin.close()


def _pass_on(process: subprocess.Popen[str], lines: queue.Queue[dict[str, Any]]) -> None:
    """Its lines as they come, then why it ended."""
    last: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=_keep_last, args=(process, last), daemon=True)
    reader.start()
    with process.stdout:
        for line in process.stdout:
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    lines.put(found)
    process.wait()
    reader.join(END_SECONDS)
    words = [line for line in "".join(last).splitlines() if line.startswith("gptfit: ")]
    lines.put({"error": words[-1].removeprefix("gptfit: ") if words else "the model's process ended"})


def _keep_last(process: subprocess.Popen[str], last: list[str]) -> None:
    """Of stderr, so that a pipe nobody reads does not fill."""
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            last[:] = ["".join([*last, line])[-LAST_WORDS:]]
