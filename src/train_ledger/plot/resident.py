"""What stays resident on each rank between two steps, by container, predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from train_ledger.reconcile.rows import CLEAN, UNCLAIMED
from train_ledger.spec.groups import rank_ranges
from train_ledger.spec.units import fmt_auto

from . import style
from .data import Results, unit_for
from .runs import batch_titles, config_of
from .save import Drawn
from .text import shorten

MAX_PANELS = 12  # more runs than this are one bar each instead of one panel each
MAX_RANKS = 16  # more ranks than this are shown as classes of ranks that keep the same
PANELS_A_ROW = 4
SMALL = 0.004  # containers that are nowhere a larger part of the fullest rank are drawn as one
OTHERS = "small ones together"


def draw(results: Results) -> list[Drawn]:
    """The resident figure: a panel a run, or a bar a run where there are many."""
    frame = resident_frame(results)
    if frame.empty:
        return []
    frame, folded = _fold(frame)
    runs = [r for r in results.run_names if (frame["run"] == r).any()]
    measured = not results["resident"].empty
    tips: dict[str, str] = {}
    with style.style():
        few = len(runs) <= MAX_PANELS
        figure = _panels(results, frame, runs, tips) if few else _bars(results, frame, runs)
        column = _panels(results, frame, runs, {}, style.COLUMN_IN, 2) if len(runs) <= PANELS_A_ROW else None
    largest = frame.groupby(["run", "rank"])["predicted_bytes"].sum()
    per_run = "; ".join(
        f"{shorten(run, 40)} {fmt_auto(int(largest[run].min()))}"
        + (f" to {fmt_auto(int(largest[run].max()))}" if largest[run].min() != largest[run].max() else "")
        for run in runs[:MAX_PANELS]
    )
    alt = (
        f"Stacked bars, one panel a run, of the bytes that each rank keeps between two steps, split into containers. "
        f"Predicted per rank: {per_run}."
    )
    caption = _caption(results, frame, measured, folded, few)
    return [Drawn("resident", "memory", "Resident bytes per rank", alt, caption, figure, tips, column)]


def resident_frame(results: Results) -> pd.DataFrame:
    """run, rank, container, owner, verdict and bytes of both sides; the prediction alone where nothing was measured."""
    frame = results["resident"]
    if not frame.empty:
        out = frame[["run", "rank", "container", "owner", "predicted_bytes", "measured_bytes", "verdict"]].copy()
        out.loc[out["owner"] == UNCLAIMED, "container"] = UNCLAIMED
        return out
    rows = [
        {"run": run, "rank": r["rank"], "container": c["name"], "owner": c["owner"], "verdict": ""}
        | {"predicted_bytes": c["bytes"], "measured_bytes": 0}
        for run, p in results.predictions.items()
        for r in p["ranks"]
        for c in r["containers"]
    ]
    return pd.DataFrame(
        rows, columns=["run", "rank", "container", "owner", "verdict", "predicted_bytes", "measured_bytes"]
    )


def _fold(frame: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Containers that nobody could see in the figure under one name, and how many they are."""
    largest = frame.groupby(["run", "rank", "container"])[["predicted_bytes", "measured_bytes"]].sum().max(axis=1)
    fullest = frame.groupby(["run", "rank"])["predicted_bytes"].sum().max()
    peak = largest.groupby("container").max()
    small = [c for c in peak.index if peak[c] < SMALL * fullest and c != UNCLAIMED]
    if len(small) < 2:
        return frame, 0
    return frame.assign(container=frame["container"].where(~frame["container"].isin(small), OTHERS)), len(small)


def _caption(results: Results, frame: pd.DataFrame, measured: bool, folded: int, few: bool) -> str:
    small = f" {folded} containers too small to be seen are drawn as one; the table has them all." if folded else ""
    if not measured:
        return f"Predicted from the configuration alone; nothing was measured.{small} Source: predict/*.json."
    bad = frame[~frame["verdict"].isin(CLEAN)]
    ranks = len(frame[["run", "rank"]].drop_duplicates())
    worlds = ", ".join(sorted({str(r["world"]) for r in results.runs}))
    left = int((bad["measured_bytes"] - bad["predicted_bytes"]).abs().sum())
    finding = (
        f"On all {ranks} ranks every container holds exactly the bytes that were predicted"
        if bad.empty
        else f"{left:,} bytes differ, on {len(bad[['run', 'rank']].drop_duplicates())} of {ranks} ranks"
    )
    how = (
        "Left bar of a pair, light: predicted from the configuration. Right bar, full colour: the census of storages"
        if few
        else "Bars: the fullest rank of each run, predicted from the configuration. Marks: its census of storages"
    )
    where = f"at the boundary after the last step (world: {worlds})"
    return f"{finding}. {how} {where}.{small}{_batches(results)} Source: reconcile/resident.csv."


def _batches(results: Results) -> str:
    """What tells runs of one framework apart that differ in their global batch."""
    batch = {run: config_of(results, run).get("global_batch") for run in results.run_names}
    if len({b for b in batch.values() if b}) < 2 or len(batch) > MAX_PANELS:
        return ""
    return f" Sequences in a step: {', '.join(f'{shorten(run, 40)} {b}' for run, b in batch.items() if b)}."


def _panels(
    results: Results,
    frame: pd.DataFrame,
    runs: Sequence[str],
    tips: dict[str, str],
    width_in: float = style.WIDTH_IN,
    most_columns: int = PANELS_A_ROW,
) -> plt.Figure:
    columns = min(most_columns, len(runs))
    rows = -(-len(runs) // columns)
    narrow = width_in < style.WIDTH_IN
    height_in = (1.15 + 1.75 * rows) if narrow else (0.75 + 2.15 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=(width_in, height_in), sharey=True, squeeze=False)
    totals = frame.groupby(["run", "rank"])[["predicted_bytes", "measured_bytes"]].sum()
    unit, scale = unit_for(float(totals.max().max()))
    titles = batch_titles(results, runs)
    for ax, run in zip(axes.flat, runs, strict=False):
        _panel(ax, frame[frame["run"] == run], scale, bool((frame["verdict"] != "").any()), tips)
        ax.set_title(titles[run], loc="left", fontweight="bold", pad=14)
        ax.text(0, 1.02, shorten(run, 34), transform=ax.transAxes, fontsize=6.5, color=style.MUTED)
        ax.set_xlabel("rank")
    for ax in list(axes.flat)[len(runs) :]:
        ax.set_visible(False)
    axes[0][0].set_ylim(0, float(totals.max().max()) / scale * 1.12)
    for ax in axes[:, 0]:
        ax.set_ylabel(f"resident per rank [{unit}]")
    _legend(figure, frame, sides=bool((frame["verdict"] != "").any()), columns=2 if narrow else 5)
    return figure


def _panel(ax: Axes, part: pd.DataFrame, scale: float, measured: bool, tips: dict[str, str]) -> None:
    wide = {
        side: part.pivot_table(index="rank", columns="container", values=f"{side}_bytes", aggfunc="sum", fill_value=0)
        for side in ("predicted", "measured")
    }
    shown = _classes(wide["predicted"], wide["measured"]) if len(wide["predicted"]) > MAX_RANKS else None
    ranks = [c[0] for c in shown] if shown else list(wide["predicted"].index)
    labels = [rank_ranges(c) for c in shown] if shown else [str(r) for r in ranks]
    width = 0.4 if measured else 0.7
    for side, offset, tint in (("predicted", -0.21 if measured else 0.0, 0.5), ("measured", 0.21, 0.0)):
        if side == "measured" and not measured:
            continue
        below = [0.0] * len(ranks)
        for name in style.container_order(wide[side].columns):
            heights = [float(wide[side].loc[r, name]) / scale for r in ranks]
            if not any(heights):
                continue
            at = [i + offset for i in range(len(ranks))]
            edge = style.MUTED if name == UNCLAIMED else "white"
            colour = style.tint(style.container_colour(name), tint if measured else 0.0)
            bars = ax.bar(at, heights, width, below, color=colour, edgecolor=edge, linewidth=0.25, zorder=2)
            for bar, rank, height in zip(bars, labels, heights, strict=True):
                bar.set_gid(f"tip{len(tips)}")
                tips[f"tip{len(tips)}"] = f"{side}: {name}, rank {rank}, {round(height * scale):,} B"
            below = [b + h for b, h in zip(below, heights, strict=True)]
    ax.set_xticks(range(len(ranks)), labels, rotation=0 if not shown else 30)
    ax.grid(axis="x", visible=False)
    if measured:
        bad = sorted(set(part.loc[~part["verdict"].isin(CLEAN), "rank"]))
        text = "residual 0 B" if not bad else f"differs: rank {shorten(rank_ranges(bad), 20)}"
        ax.text(
            *(0.98, 0.97, text),
            transform=ax.transAxes,
            ha="right",
            va="top",
            fontsize=6.5,
            color=style.BAD if bad else style.GOOD,
        )


def _classes(predicted: pd.DataFrame, measured: pd.DataFrame) -> list[tuple[int, ...]]:
    """Ranks that keep the same, as at most MAX_RANKS classes, those with most bytes."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for rank in predicted.index:
        key = (*predicted.loc[rank].tolist(), *measured.loc[rank].tolist())
        alike.setdefault(key, []).append(int(rank))
    largest = sorted(alike.items(), key=lambda item: (-sum(item[0]), item[1][0]))[:MAX_RANKS]
    return sorted(tuple(ranks) for _, ranks in largest)


def _bars(results: Results, frame: pd.DataFrame, runs: Sequence[str]) -> plt.Figure:
    """One horizontal bar a run: its fullest rank, predicted; a mark where the measurement stands."""
    figure, ax = plt.subplots(figsize=(style.WIDTH_IN, 1.0 + 0.17 * len(runs)))
    totals = frame.groupby(["run", "rank"])[["predicted_bytes", "measured_bytes"]].sum()
    unit, scale = unit_for(float(totals.max().max()))
    left: dict[str, float] = dict.fromkeys(runs, 0.0)
    fullest = {run: totals.loc[run]["predicted_bytes"].idxmax() for run in runs}
    at_rank = pd.concat([frame[(frame["run"] == run) & (frame["rank"] == fullest[run])] for run in runs])
    sums = at_rank.groupby(["container", "run"])["predicted_bytes"].sum()
    for name in style.container_order(at_rank["container"]):
        widths = [float(sums.get((name, run), 0)) / scale for run in runs]
        ax.barh(
            range(len(runs)), widths, 0.75, [left[r] for r in runs], color=style.container_colour(name), linewidth=0
        )
        for run, width in zip(runs, widths, strict=True):
            left[run] += width
    if (frame["verdict"] != "").any():
        x = [float(totals.loc[(run, fullest[run]), "measured_bytes"]) / scale for run in runs]
        ax.plot(x, range(len(runs)), linestyle="none", marker="|", color=style.INK, markersize=7, label="measured")
    ax.set_yticks(range(len(runs)), [shorten(r, 44) for r in runs], fontsize=6)
    ax.set_ylim(len(runs) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"resident on the fullest rank [{unit}]; bars predicted, marks measured")
    _legend(figure, frame)
    return figure


def _legend(figure: plt.Figure, frame: pd.DataFrame, sides: bool = False, columns: int = 5) -> None:
    present = frame[(frame["predicted_bytes"] > 0) | (frame["measured_bytes"] > 0)]["container"]
    handles = [
        Patch(facecolor=style.container_colour(n), edgecolor=style.MUTED, linewidth=0.3, label=shorten(n, 28))
        for n in style.container_order(present)
    ]
    if sides:
        handles.insert(0, Patch(facecolor=style.INK, label="right bar, full: measured"))
        handles.insert(0, Patch(facecolor=style.tint(style.INK, 0.5), label="left bar, light: predicted"))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=1.2, columnspacing=1.2)
