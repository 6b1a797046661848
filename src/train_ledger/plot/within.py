"""Memory within one step on a GPU: allocated bytes at the boundaries of modules, and what is resident below it."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from train_ledger.spec.units import fmt_auto

from . import style
from .data import Results, run_size, unit_for
from .runs import panel_titles
from .save import Drawn
from .text import plural, shorten

MAX_PANELS = 12
PANELS_A_ROW = 2
PHASES = (("backward", "#fdebc8"), ("optimizer", "#d8efe6"))


def traces(sources: Sequence[Results]) -> list[tuple[Results, str, int, pd.DataFrame]]:
    """Results, run, rank and events in order, for the lowest rank of each run that recorded them; the largest first."""
    out = []
    for results in sources:
        frame = results["memory_events"]
        for run in results.run_names:
            part = frame[frame["run"] == run]
            if not part.empty:
                rank = int(part["rank"].min())
                out.append((results, run, rank, part[part["rank"] == rank].sort_values("order")))
    sizes = {(id(results), r["run"]): run_size(r) for results in sources for r in results.runs}
    return sorted(out, key=lambda trace: sizes[id(trace[0]), trace[1]], reverse=True)


def peak_bytes(results: Results, run: str, rank: int) -> int | None:
    """Bytes at the highest moment of the recorded step, from the allocator's own trace; None where none was kept."""
    frame = results.of("peaks", run)
    frame = frame[frame["rank"] == rank]
    return None if frame.empty else int(frame["peak_bytes"].max())


def draw(sources: Sequence[Results]) -> list[Drawn]:
    """A panel a run; nothing where no run was on a GPU."""
    found = traces(sources)
    shown = found[:MAX_PANELS]
    if not shown:
        return []
    with style.style():
        figure = _figure(shown)
    told = "; ".join(
        f"{shorten(run, 40)}, rank {rank}: {fmt_auto(int(e['allocated_bytes'].iloc[0]))} at the start, peak "
        f"{fmt_auto(peak_bytes(results, run, rank) or int(e['allocated_bytes'].max()))}"
        for results, run, rank, e in shown
    )
    more = f" The {MAX_PANELS} largest of {plural(len(found), 'run')}." if len(found) > MAX_PANELS else ""
    caption = (
        "Allocated bytes over one step, sampled wherever a module begins or ends; the dashed line is what was resident "
        "when the step began, the thin red line the true peak of the step: it falls between two samples, inside a "
        "module, so the curve stays below it (the peak is in bytes as requested, without the allocator's rounding). "
        "A flat floor with a hill is a framework whose parameters stay; teeth on it are "
        f"parameters that are gathered and released. The axis is the order of events, not time.{more} "
        "Sources: reconcile/memory_events.csv, reconcile/peaks.csv."
    )
    alt = f"Step lines of allocated bytes over the events of one training step, one panel a run. {told}."
    return [Drawn("within", "within", "Memory within one step", alt, caption, figure)]


def _figure(shown: Sequence[tuple[Results, str, int, pd.DataFrame]]) -> plt.Figure:
    columns = min(PANELS_A_ROW, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(style.WIDTH_IN, 0.5 + 1.9 * rows), sharey=True, squeeze=False)
    top = float(max(max(e["allocated_bytes"].max(), peak_bytes(r, run, rank) or 0) for r, run, rank, e in shown))
    unit, scale = unit_for(top)
    # A run of the same name in two folders is told apart by its folder.
    runs = [run for _, run, *_ in shown]
    names = [run if runs.count(run) == 1 else f"{run} ({results.name})" for results, run, *_ in shown]
    titles = panel_titles([(r.framework(run), run) for r, run, *_ in shown])
    for ax, (results, run, rank, events), name in zip(axes.flat, shown, names, strict=False):
        _panel(ax, events, scale, peak_bytes(results, run, rank))
        ax.set_title(titles[run], loc="left", fontweight="bold", fontsize=7.5, pad=10)
        ax.text(0, 1.02, f"{shorten(name, 44)}, rank {rank}", transform=ax.transAxes, fontsize=6.5, color=style.MUTED)
    # The panels share this axis, so it is set once, for the tallest of them.
    axes.flat[0].set_ylim(0, 1.14 * top / scale)
    for ax in list(axes.flat)[len(shown) :]:
        ax.set_visible(False)
    for ax in axes[:, 0]:
        ax.set_ylabel(f"allocated [{unit}]")
    for ax in axes[-1]:
        ax.set_xlabel("events of one step, in order")
    handles: list[Artist] = [Patch(facecolor=colour, label=name) for name, colour in PHASES]
    handles.append(Line2D([], [], color=style.BAD, lw=0.8, label="peak of the step, between samples"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def _panel(ax: Axes, events: pd.DataFrame, scale: float, peak: int | None) -> None:
    y = events["allocated_bytes"].to_numpy(dtype=float) / scale
    names = list(events["event"])
    for phase, colour in PHASES:
        begins = [i for i, n in enumerate(names) if n == f"{phase}_begin"]
        for begin in begins:
            end = next((i for i in range(begin, len(names)) if names[i] == f"{phase}_end"), len(names) - 1)
            ax.axvspan(begin, end, color=colour, lw=0, zorder=0)
    ax.step(range(len(y)), y, where="post", color=style.INK, lw=0.9, zorder=3)
    ax.axhline(y[0], color=style.MUTED, lw=0.7, ls=(0, (4, 3)), zorder=2)
    if peak is not None:
        ax.axhline(peak / scale, color=style.BAD, lw=0.6, zorder=2)
        ax.annotate(
            f"peak {peak / scale:.3f}",
            (1, peak / scale),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 1.5),
            textcoords="offset points",
            ha="right",
            fontsize=6,
            color=style.BAD,
        )
    ax.set_xlim(0, max(1, len(y) - 1))
    ax.set_xticks([])
