"""What can be wrong: problems as data, and the error family; each is one line a person can act on."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Problem:
    """Something to know or to change: where, what, and what to do about it."""

    level: Level  # an error stops the run; 'ok' is a check that found nothing wrong
    where: str  # a config key, or the part of the machine that was looked at
    message: str
    fix: str = ""
    change: Mapping[str, Any] = field(
        default_factory=dict, hash=False
    )  # config keys to set, where the fix is just that

    @property
    def line(self) -> str:
        return f"{self.message}; {self.fix}" if self.fix else self.message

    def as_json(self) -> dict[str, Any]:
        said = {"level": self.level, "where": self.where, "message": self.message, "fix": self.fix}
        return said | ({"change": dict(self.change)} if self.change else {})


class GptfitError(Exception):
    """An expected failure, never shown with a traceback.

    >>> str(GptfitError("batchsize is not a key", where="mine.py:7", fix="did you mean batch_size?"))
    'mine.py:7: batchsize is not a key; did you mean batch_size?'
    """

    exit_code = 1

    def __init__(self, message: str, *, where: str = "", fix: str = "", key: str | None = None) -> None:
        self.message, self.where, self.fix = message, where, fix
        self.key = key  # the config key that is at fault, where one is
        before, after = f"{where}: " if where else "", f"; {fix}" if fix else ""
        super().__init__(f"{before}{message}{after}")

    def as_problem(self, where: str) -> Problem:
        """The same as a finding about `where`."""
        message = f"{self.where}: {self.message}" if self.where else self.message
        return Problem("error", where, message, self.fix)


class UsageError(GptfitError):
    """The command line itself is malformed."""


class ConfigError(GptfitError):
    """A config file or `--key=value` cannot be used."""


class DataError(GptfitError):
    """A source file, token file or manifest cannot be used."""


class DeviceError(GptfitError):
    """A device, GPU name or installation cannot do what was asked."""


class RunError(GptfitError):
    """A run folder, log or checkpoint cannot be used."""


def exit_code(stopped: KeyboardInterrupt) -> int:
    """As a shell gives it: 130 after Ctrl-C, 143 where SIGTERM was made an interrupt."""
    return 128 + (int(stopped.args[0]) if stopped.args else signal.SIGINT)
