"""A drawn figure with its words, and its files: SVG and PDF, the same bytes on any day in any place."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from train_ledger.spec.io import file_mode

from .style import style


@dataclass(frozen=True)
class Drawn:
    """A figure and its words.

    `name` is the file's stem, `section` the part of the report it belongs to. `alt` says what is to be seen for those
    who cannot see it, `caption` what is found and where the figures come from. `tips` are texts for the pointer, by the
    id (`set_gid`) of what they are about. `column` is the same drawn for one column of a paper, where there is one.
    """

    name: str
    section: str
    title: str
    alt: str
    caption: str
    figure: Figure
    tips: Mapping[str, str] = field(default_factory=dict)
    column: Figure | None = None


def save(drawn: Drawn, folder: str | Path) -> None:
    """Writes `<name>.svg` and `<name>.pdf`, and `<name>_column` likewise, each whole or not at all; closes the figures.

    Dates and the name of the program are left out of the metadata; ids in the SVG come from a fixed salt
    (matplotlib `backends/backend_svg.py:_make_id`), PDF has no other source of change.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _save(drawn.name, drawn.figure, folder)
    if drawn.column is not None:
        _save(f"{drawn.name}_column", drawn.column, folder)


def _save(name: str, figure: Figure, folder: Path) -> None:
    with style(), matplotlib.rc_context({"svg.hashsalt": f"train-ledger {name}"}):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once for both files
        for kind, metadata in (
            ("svg", {"Date": None, "Creator": None}),
            ("pdf", {"CreationDate": None, "Creator": None, "Producer": None}),
        ):
            content = io.BytesIO()
            figure.savefig(content, format=kind, metadata=metadata, facecolor="white")
            _write_bytes(folder / f"{name}.{kind}", content.getvalue())
    plt.close(figure)


def _write_bytes(path: Path, content: bytes) -> None:
    fd, tmp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:50]}.", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(content)
        os.chmod(tmp, file_mode())
        os.replace(tmp, path)
    except BaseException:
        Path(tmp).unlink(missing_ok=True)
        raise
