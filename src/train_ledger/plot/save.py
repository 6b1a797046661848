"""A drawn figure with its words, and its files: SVG and PDF, the same bytes on any day in any place."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from train_ledger.spec.io import whole_file

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
    _save(drawn.name, drawn.figure, Path(folder))
    if drawn.column is not None:
        _save(f"{drawn.name}_column", drawn.column, Path(folder))


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
            with whole_file(folder / f"{name}.{kind}") as file:
                file.write(content.getvalue())
    plt.close(figure)
