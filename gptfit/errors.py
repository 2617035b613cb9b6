"""The error family: each is one line a person can act on."""

from __future__ import annotations


class GptfitError(Exception):
    """An expected failure: says where, what, and what to do next. Never shown with a traceback."""

    exit_code = 1


class UsageError(GptfitError):
    """The command line itself is malformed."""

    exit_code = 2


class ConfigError(GptfitError):
    """A config file or `--key=value` cannot be used. `key` names the culprit when one key is."""

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class DataError(GptfitError):
    """A source file, token file or manifest cannot be used."""


class DeviceError(GptfitError):
    """A device, GPU name or installation cannot do what was asked."""


class RunError(GptfitError):
    """A run folder, log or checkpoint cannot be used."""
