"""Moves away what cannot be used, without losing it: the rule that makes it then makes it anew."""

from __future__ import annotations

import os
from pathlib import Path

from train_ledger.spec.errors import DataError


def set_aside(path: str | Path) -> Path:
    """Renames `results/<comparison>/<...>/<name>` to `results/<comparison>/unusable/<...>/<name>.<n>`.

    Two stages may find the same thing unusable at once; one of them moves it.

    Args:
        path: relative to the working copy.

    Returns:
        Where it is now, whoever moved it.

    Raises:
        DataError: it cannot be moved, or nothing of that name was there.
    """
    path = Path(path)
    comparison = Path(*path.parts[:2])
    room = comparison / "unusable" / path.parent.relative_to(comparison)
    try:
        room.mkdir(parents=True, exist_ok=True)
        number = _highest(room, path.name) + 1
        try:
            os.rename(path, room / f"{path.name}.{number}")
        except FileNotFoundError:  # another stage was quicker
            number = _highest(room, path.name)
            if not number:
                raise
    except OSError as e:
        raise DataError(f"cannot be set aside in {room}: {e.strerror or e}", file=path) from e
    return room / f"{path.name}.{number}"


def _highest(room: Path, name: str) -> int:
    """The highest number that is in use for a name; 0 for none."""
    numbers = (entry.name.removeprefix(f"{name}.") for entry in room.glob(f"{name}.*"))
    return max((int(n) for n in numbers if n.isdecimal()), default=0)
