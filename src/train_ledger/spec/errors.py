"""Errors that a user can act on. The CLI and the workflow print them as one line and exit with a non-zero code."""

from __future__ import annotations

from pathlib import Path


class LedgerError(Exception):
    """One clear line: which file, which key, what is wrong and why.

    Args:
        message: what is wrong, with the value and the reason.
        file: the file that holds it, if any.
        key: dotted path of the key inside that file, if any.
    """

    def __init__(self, message: str, *, file: str | Path | None = None, key: str | None = None) -> None:
        self.message, self.file, self.key = message, file, key
        super().__init__(message)

    def __str__(self) -> str:
        where = [str(x) for x in (self.file, self.key) if x]
        return " ".join(f"{': '.join([*where, self.message])}".split())


class ConfigError(LedgerError):
    """A config file or an option that is wrong before anything ran."""


class DataError(LedgerError):
    """A data file between two stages that is missing, truncated, or not what its schema says."""


class LaunchError(LedgerError):
    """A run that did not finish: a rank died, hung, or lost its numerics."""
