"""Moves away what cannot be used, without losing it: the rule that makes it then makes it anew."""

from __future__ import annotations

import os
from pathlib import Path


def set_aside(path: str | Path) -> Path:
    """Renames `results/<comparison>/<stage>/<name>` to `results/<comparison>/unusable/<stage>/<name>.<n>`.

    Returns:
        Where it is now.
    """
    path = Path(path)
    room = path.parent.parent / "unusable" / path.parent.name
    room.mkdir(parents=True, exist_ok=True)
    n = 1
    while (room / f"{path.name}.{n}").exists():
        n += 1
    os.replace(path, room / f"{path.name}.{n}")
    return room / f"{path.name}.{n}"
