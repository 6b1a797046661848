"""How a rank's failure travels from its process to the one line that a person reads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from train_ledger.spec.errors import ConfigError, DataError, LaunchError, LedgerError
from train_ledger.spec.run import Run


def describe(error: BaseException) -> dict[str, Any]:
    """An error as plain data: `at` on the monotonic clock, `kind` of ours or empty, `error`, `file`, `key`."""
    if isinstance(error, LedgerError):
        where = {"file": str(error.file or ""), "key": error.key or ""}
        return {"at": time.monotonic(), "kind": type(error).__name__, "error": error.message[:2000], **where}
    text = f"{type(error).__name__}: {error}"[:2000]
    return {"at": time.monotonic(), "kind": "", "error": text, "file": "", "key": ""}


def rebuild(run: Run, rank: int, step: int, error: dict[str, Any], log: Path) -> LedgerError:
    """The error for the launching process. A user's input (config, weights) needs no log: the message says all.

    Args:
        step: the last step that the rank finished; 0 when its session was built, -1 before.
    """
    known = {c.__name__: c for c in (ConfigError, DataError)}.get(error["kind"])
    if known:
        return known(error["error"], file=error["file"] or None, key=error["key"] or None)
    return LaunchError(f"{run.name}: rank {rank} failed {where(run, step)}: {error['error']}", file=log)


def where(run: Run, step: int) -> str:
    """In words, where a rank was that had finished `step` (0: built, -1: not yet)."""
    if step < 0:
        return "while it was being built"
    return f"in step {step + 1}" if step < run.steps else "after the last step"
