"""Tables, once: the same cells in HTML, LaTeX and CSV. Bytes and counts are exact; what is rounded is rounded here."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

#: Decimals of each kind of number that is rounded; `bytes` and `count` are whole and never rounded.
DECIMALS = {"gb": 3, "percent": 1, "loss": 6, "ratio": 3, "small": -1, "seconds": 3, "rate": 1}
#: Columns that are left out of a printed table where no row has a value: causes of differences, what old runs lack.
OFTEN_EMPTY = frozenset({"cause", "mfu_measured", "matrix_tflop_per_s"})
#: Columns that are left out of a printed table where every row says the same; its caption says it instead.
SAID_ONCE = frozenset({"gpu"})
NUMBERS = frozenset({"bytes", "count", *DECIMALS})


@dataclass(frozen=True)
class Column:
    """`kind` is text, code, verdict, bytes, count, or a kind of `DECIMALS`. The unit is in the label."""

    key: str
    label: str
    kind: str = "text"

    @property
    def is_number(self) -> bool:
        """Right-aligned, and sorted as a number."""
        return self.kind in NUMBERS


@dataclass(frozen=True)
class Table:
    """`name` is the stem of its files; `rows` hold raw values by column key, None where there is none."""

    name: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[dict[str, Any]] = field(default_factory=tuple)

    def printed(self) -> Table:
        """The table as page and paper show it: a column of `OFTEN_EMPTY` or `SAID_ONCE` only where it tells more."""
        said = {c.key for c in self.columns for row in self.rows if show(c.kind, row.get(c.key)) != "–"}
        columns = [c for c in self.columns if c.key not in OFTEN_EMPTY or c.key in said]
        columns = [c for c in columns if c.key not in SAID_ONCE or len({row[c.key] for row in self.rows}) > 1]
        return Table(self.name, self.caption, columns, self.rows)

    def cells(self) -> list[list[str]]:
        """Rows as they are printed."""
        return [[show(c.kind, row.get(c.key)) for c in self.columns] for row in self.rows]


def show(kind: str, value: Any) -> str:
    """A cell as a person reads it; thousands have commas, NaN and None are a dash."""
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if kind in {"bytes", "count"}:
        return f"{int(value):,}"
    if kind in DECIMALS:
        return _rounded(kind, float(value), ",")
    return str(value)


def raw(kind: str, value: Any) -> str:
    """A cell as a program reads it: the same rounding as `show`, no commas, empty for None and NaN."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if kind in {"bytes", "count"}:
        return str(int(value))
    if kind in DECIMALS:
        return _rounded(kind, float(value), "")
    return str(value)


def _rounded(kind: str, value: float, comma: str) -> str:
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if kind == "small":
        return f"{value:.2e}"
    return f"{value:{comma}.{DECIMALS[kind]}f}"


def to_csv(table: Table) -> str:
    """The table as CSV with the columns' keys as its head; text that a spreadsheet would run as a formula is quoted."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([c.key for c in table.columns])
    for row in table.rows:
        writer.writerow([_inert(c, raw(c.kind, row.get(c.key))) for c in table.columns])
    return text.getvalue()


def _inert(column: Column, cell: str) -> str:
    return f"'{cell}" if not column.is_number and cell[:1] in {"=", "+", "@", "\t", "\r"} else cell


_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_\allowbreak{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "'": r"\textquotesingle{}",
    "`": r"\textasciigrave{}",
    "-": "{-}",  # no ligature of two
    "[": "{[}",  # no argument of the line break before it
    "*": "{*}",
    "–": "--",
    "×": r"$\times$",
    "−": "$-$",
    "≈": r"$\approx$",
    "→": r"$\rightarrow$",
    "½": r"$\frac{1}{2}$",
    "·": r"$\cdot$",
    "∞": r"$\infty$",
    "…": r"\ldots{}",
}


def latex(text: str) -> str:
    """`text` as LaTeX that prints it, whatever it holds. What an 8-bit font cannot print becomes its code point."""
    out = []
    for c in text:
        if c in _LATEX:
            out.append(_LATEX[c])
        elif " " <= c <= "~":
            out.append(c)
        elif c.isspace():
            out.append(" ")
        else:
            out.append(rf"[U+{ord(c):04X}]")
    return "".join(out)


def _align(column: Column, cells: Sequence[str]) -> str:
    """Numbers right, short text left, long text in a paragraph as wide as it needs to be readable."""
    longest = max((len(cell) for cell in cells), default=0)
    if column.is_number:
        return "r"
    if longest <= 30:
        return "l"
    return rf">{{\raggedright\arraybackslash}}p{{{0.15 if longest <= 60 else 0.24}\linewidth}}"


def to_latex(table: Table) -> str:
    """The table as a booktabs `longtable`; needs the packages array, booktabs, longtable and textcomp."""
    table = table.printed()
    align = "".join(_align(c, [row[i] for row in table.cells()]) for i, c in enumerate(table.columns))
    head = " & ".join(rf"\textbf{{{latex(c.label)}}}" for c in table.columns) + r" \\"
    lines = [
        rf"\begin{{longtable}}{{{align}}}",
        rf"\caption{{{latex(table.caption)}}}\label{{tab:{table.name}}}\\",
        r"\toprule",
        head,
        r"\midrule",
        r"\endfirsthead",
        r"\toprule",
        head,
        r"\midrule",
        r"\endhead",
        r"\bottomrule",
        r"\endfoot",
    ]
    for cells in table.cells():
        lines.append(" & ".join(latex(cell) for cell in cells) + r" \\")
    return "\n".join([*lines, r"\end{longtable}", ""])
