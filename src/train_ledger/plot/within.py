"""Memory within one step on a GPU: allocated bytes at the boundaries of modules, and what is resident below it."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from train_ledger.spec.units import fmt_auto

from . import style
from .data import Results, framework_title, unit_for
from .save import Drawn
from .text import plural, shorten

MAX_PANELS = 12
PANELS_A_ROW = 2
PHASES = (("backward", "#fdebc8"), ("optimizer", "#d8efe6"))


def traces(sources: Sequence[Results]) -> list[tuple[Results, str, int, pd.DataFrame]]:
    """Results, run, rank and events in order, for the lowest rank of each run that recorded them."""
    out = []
    for results in sources:
        frame = results["memory_events"]
        for run in results.run_names:
            part = frame[frame["run"] == run]
            if not part.empty:
                rank = int(part["rank"].min())
                out.append((results, run, rank, part[part["rank"] == rank].sort_values("order")))
    return out


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
        f"{fmt_auto(int(e['allocated_bytes'].max()))}"
        for _, run, rank, e in shown
    )
    more = f" The first {MAX_PANELS} of {plural(len(found), 'run')}." if len(found) > MAX_PANELS else ""
    caption = (
        "Allocated bytes over one step, sampled wherever a module begins or ends; the dashed line is what was resident "
        "when the step began. A flat floor with a hill is a framework whose parameters stay; teeth on it are "
        f"parameters that are gathered and released. The axis is the order of events, not time.{more} "
        "Source: reconcile/memory_events.csv."
    )
    alt = f"Step lines of allocated bytes over the events of one training step, one panel a run. {told}."
    return [Drawn("within", "within", "Memory within one step", alt, caption, figure)]


def _figure(shown: Sequence[tuple[Results, str, int, pd.DataFrame]]) -> plt.Figure:
    columns = min(PANELS_A_ROW, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(style.WIDTH_IN, 0.5 + 1.9 * rows), sharey=True, squeeze=False)
    unit, scale = unit_for(float(max(e["allocated_bytes"].max() for *_, e in shown)))
    for ax, (results, run, rank, events) in zip(axes.flat, shown, strict=False):
        _panel(ax, events, scale)
        ax.set_title(framework_title(results.framework(run)), loc="left", fontweight="bold", fontsize=7.5, pad=10)
        ax.text(0, 1.02, f"{shorten(run, 36)}, rank {rank}", transform=ax.transAxes, fontsize=6.5, color=style.MUTED)
    # The panels share this axis, so it is set once, for the tallest of them.
    axes.flat[0].set_ylim(0, 1.08 * max(e["allocated_bytes"].max() for *_, e in shown) / scale)
    for ax in list(axes.flat)[len(shown) :]:
        ax.set_visible(False)
    for ax in axes[:, 0]:
        ax.set_ylabel(f"allocated [{unit}]")
    for ax in axes[-1]:
        ax.set_xlabel("events of one step, in order")
    handles = [Patch(facecolor=colour, label=name) for name, colour in PHASES]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def _panel(ax: Axes, events: pd.DataFrame, scale: float) -> None:
    y = events["allocated_bytes"].to_numpy(dtype=float) / scale
    names = list(events["event"])
    for phase, colour in PHASES:
        begins = [i for i, n in enumerate(names) if n == f"{phase}_begin"]
        for begin in begins:
            end = next((i for i in range(begin, len(names)) if names[i] == f"{phase}_end"), len(names) - 1)
            ax.axvspan(begin, end, color=colour, lw=0, zorder=0)
    ax.step(range(len(y)), y, where="post", color=style.RUN_COLOURS[0], lw=0.9, zorder=3)
    ax.axhline(y[0], color=style.MUTED, lw=0.7, ls=(0, (4, 3)), zorder=2)
    top = int(y.argmax())
    right = top > len(y) / 2
    ax.annotate(
        f"{y[top]:.3f}",
        (top, y[top]),
        xytext=(-3 if right else 3, 2),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=6,
        color=style.MUTED,
    )
    ax.set_xlim(0, max(1, len(y) - 1))
    ax.set_xticks([])
