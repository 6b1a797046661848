"""One style for every figure: sizes, fonts, and colours that stay with a thing and that colour-blind eyes can tell."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib
import seaborn as sns

matplotlib.use("agg")

WIDTH_IN = 7.1  # two columns of a paper
COLUMN_IN = 3.4  # one column

INK = "#1b1f24"
MUTED = "#57606a"
GRID = "#d0d7de"
GOOD = "#00664b"
BAD = "#b3261e"

# Okabe and Ito's palette and Paul Tol's muted one: safe for the common kinds of colour blindness.
CONTAINER_COLOURS = {
    "param": "#0072B2",
    "main_param": "#009E73",
    "exp_avg": "#CC79A7",
    "exp_avg_sq": "#882255",
    "grad": "#E69F00",
    "reduce_bucket": "#D55E00",
    "persisted_param": "#56B4E9",
    "global_memory_buffer": "#F0E442",
    "rope_cache": "#999933",
    "step": "#000000",
    "batch": "#AAAAAA",
    "library_workspace": "#44AA99",
    "block_rounding": "#DDCC77",
    "small ones together": "#57606A",
    "unclaimed": "#FFFFFF",
}
_SPARE = ("#332288", "#117733", "#CC6677", "#AA4499", "#88CCEE", "#6699CC", "#661100", "#888888")

DTYPE_COLOURS = {"bfloat16": "#0072B2", "float32": "#009E73", "float16": "#56B4E9", "float64": "#332288"}

OP_COLOURS = {
    "all_gather": "#0072B2",
    "reduce_scatter": "#E69F00",
    "all_reduce": "#882255",
    "send": "#009E73",
    "recv": "#44AA99",
    "broadcast": "#D55E00",
    "all_to_all": "#332288",
}
RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288", "#882255")
RUN_MARKERS = "osD^vPX*"
RUN_DASHES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class RunStyle:
    """How the line of one run looks in every figure."""

    colour: str
    marker: str
    dashes: str


def run_styles(names: Iterable[str]) -> dict[str, RunStyle]:
    """A look for each name by its place: figures that begin with the same runs draw each of them alike."""
    return {
        name: RunStyle(
            RUN_COLOURS[i % len(RUN_COLOURS)], RUN_MARKERS[i % len(RUN_MARKERS)], RUN_DASHES[i % len(RUN_DASHES)]
        )
        for i, name in enumerate(dict.fromkeys(names))
    }


def container_colour(name: str) -> str:
    """Colour of a container; one that is not in the table gets a spare colour that depends on its name alone."""
    return CONTAINER_COLOURS.get(name) or _SPARE[zlib.crc32(name.encode()) % len(_SPARE)]


def tint(colour: str, share: float) -> str:
    """`colour` mixed with `share` of white: opaque, so that no grid line shines through."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * share):02x}" for c in parts)


def container_order(names: Iterable[str]) -> list[str]:
    """Containers from the bottom of a stack to its top: model state first, then by name, what nobody claims last."""
    known = list(CONTAINER_COLOURS)
    return sorted(set(names), key=lambda n: (n == "unclaimed", known.index(n) if n in known else len(known), n))


def dtype_colour(dtype: str) -> str:
    """Colour of an element type."""
    return DTYPE_COLOURS.get(dtype, _SPARE[zlib.crc32(dtype.encode()) % len(_SPARE)])


def op_colour(op: str) -> str:
    """Colour of a collective operation."""
    return OP_COLOURS.get(op, _SPARE[zlib.crc32(op.encode()) % len(_SPARE)])


@contextmanager
def style() -> Iterator[None]:
    """Everything that is drawn inside looks alike and does not depend on the user's own matplotlib settings."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.use("agg")
        sns.set_theme(
            context="paper",
            style="whitegrid",
            rc={
                "font.family": "DejaVu Sans",  # comes with matplotlib: the same glyphs on every machine
                "font.size": 7.5,
                "axes.titlesize": 8,
                "axes.labelsize": 7.5,
                "xtick.labelsize": 7,
                "ytick.labelsize": 7,
                "legend.fontsize": 7,
                "legend.frameon": False,
                "axes.edgecolor": MUTED,
                "axes.labelcolor": INK,
                "axes.linewidth": 0.6,
                "text.color": INK,
                "xtick.color": INK,
                "ytick.color": INK,
                "grid.color": GRID,
                "grid.linewidth": 0.5,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.formatter.use_locale": False,
                "text.parse_math": False,  # a name with a dollar sign is a name
                "hatch.linewidth": 0.5,
                "lines.linewidth": 1.2,
                "figure.constrained_layout.use": True,
                "svg.fonttype": "path",
                "svg.hashsalt": "train-ledger",
                "pdf.fonttype": 42,
                "pdf.compression": 6,
                "savefig.transparent": False,
            },
        )
        yield
