"""What one rank sends in a step: calls and bytes by kind and group, predicted and measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from train_ledger.reconcile.rows import CLEAN
from train_ledger.spec.dtypes import ELEMENT_BYTES
from train_ledger.spec.ledger import ring_wire_bytes
from train_ledger.spec.units import fmt_auto

from . import style
from .data import Results, unit_for
from .resident import MAX_PANELS
from .runs import panel_titles
from .save import Drawn
from .text import shorten

_SIDES = ["predicted_count", "measured_count", "predicted_bytes", "measured_bytes"]


def draw(results: Results) -> list[Drawn]:
    """Calls and payload by kind and group for the busiest rank of each run; totals only where there are many runs."""
    frame = traffic_frame(results)
    if frame.empty:
        return []
    runs = [r for r in results.run_names if (frame["run"] == r).any()]
    measured = not results["collectives"].empty
    busiest = {run: busiest_rank(frame[frame["run"] == run]) for run in runs}
    tips: dict[str, str] = {}
    with style.style():
        few = len(runs) <= MAX_PANELS
        figure = _dots(results, frame, runs, busiest, measured, tips) if few else _bars(frame, runs, busiest)
    parts = []
    for run in runs[:MAX_PANELS]:
        part = frame[(frame["run"] == run) & (frame["rank"] == busiest[run])]
        parts.append(
            f"{shorten(run, 40)}, rank {busiest[run]}: {int(part['predicted_count'].sum()):,} calls, "
            f"{fmt_auto(int(part['predicted_bytes'].sum()))}"
        )
    alt = (
        "For each run, one line a kind of collective and process group; on logarithmic axes the number of calls and "
        f"the payload of one step. Predicted totals: {'; '.join(parts)}."
    )
    caption = _caption(frame, measured, few)
    return [Drawn("collectives", "communication", "Collectives of one step", alt, caption, figure, tips)]


def traffic_frame(results: Results) -> pd.DataFrame:
    """Rows of collectives.csv for the compared step, or the prediction alone where nothing was measured."""
    frame = results["collectives"]
    if not frame.empty:
        last = frame.groupby("run")["step"].transform("max")
        return frame[(frame["step"] == last) | (frame["step"] == 1)]
    return predicted_traffic(results.predictions.values())


def predicted_traffic(predictions: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """run, rank, op, group, dtype, predicted_count, predicted_bytes, predicted_wire_bytes of predict files."""
    rows = []
    for p in predictions:
        sizes = {(g["name"], r): len(g["ranks"]) for g in p["groups"] for r in g["ranks"]}
        for ledger in p["ranks"]:
            for c in ledger["collectives"]:
                size = max(c["in_numel"], c["out_numel"]) * ELEMENT_BYTES.get(c["dtype"], 0) * c["count"]
                wire = ring_wire_bytes(c["op"], sizes.get((c["group"], ledger["rank"]), 1), size)
                rows.append(
                    {"run": p["run"], "rank": ledger["rank"], "op": c["op"], "group": c["group"], "dtype": c["dtype"]}
                    | {"predicted_count": c["count"], "predicted_bytes": size, "predicted_wire_bytes": round(wire)}
                    | {"measured_count": 0, "measured_bytes": 0, "measured_wire_bytes": 0, "verdict": ""}
                )
    wire = ["predicted_wire_bytes", "measured_wire_bytes"]
    return pd.DataFrame(rows, columns=["run", "rank", "op", "group", "dtype", "verdict", *_SIDES, *wire])


def busiest_rank(part: pd.DataFrame) -> int:
    """The rank with the largest payload, predicted or measured; the first of those that are equal."""
    sums = part.groupby("rank")[["predicted_bytes", "measured_bytes"]].sum().max(axis=1)
    return int(sums.idxmax())


def _caption(frame: pd.DataFrame, measured: bool, few: bool) -> str:
    if not measured:
        return "Predicted from the configuration alone; nothing was measured. Source: predict/*.json."
    bad = frame[~frame["verdict"].isin(CLEAN)]
    rows, ranks = len(frame), len(frame[["run", "rank"]].drop_duplicates())
    finding = (
        f"On all {ranks} ranks every kind of call agrees in number, bytes and the sizes of the single calls"
        if bad.empty
        else f"{len(bad):,} of {rows:,} kinds of call on {ranks} ranks differ"
    )
    how = (
        "A ring is the prediction, a dot the measurement; a dot that fills its ring is agreement"
        if few
        else "Bars are the prediction, marks the measurement"
    )
    return (
        f"{finding}. Each run is shown by its busiest rank. {how}. Payload counts the larger of input and output of "
        "each "
        "call. Source: reconcile/collectives.csv."
    )


def _lines(frame: pd.DataFrame, run: str, rank: int) -> pd.DataFrame:
    part = frame[(frame["run"] == run) & (frame["rank"] == rank)]
    lines = part.groupby(["op", "group", "dtype"], as_index=False, sort=True)[_SIDES].sum()
    lines["size"] = lines[["predicted_bytes", "measured_bytes"]].max(axis=1)
    return lines.sort_values(["size", "op", "group", "dtype"], ascending=[False, True, True, True], kind="stable")


def _dots(
    results: Results,
    frame: pd.DataFrame,
    runs: Sequence[str],
    busiest: dict[str, int],
    measured: bool,
    tips: dict[str, str],
) -> plt.Figure:
    tables = {run: _lines(frame, run, busiest[run]) for run in runs}
    titles = panel_titles([(results.framework(run), run) for run in runs])
    heights = [max(2, len(tables[run])) + 1.6 for run in runs]
    figure, axes = plt.subplots(
        len(runs),
        2,
        figsize=(style.WIDTH_IN, 0.7 + 0.165 * sum(heights)),
        height_ratios=heights,
        sharex="col",
        squeeze=False,
    )
    for (left, right), run in zip(axes, runs, strict=True):
        lines = tables[run]
        _dot_panel(left, lines, "count", measured, tips)
        _dot_panel(right, lines, "bytes", measured, tips)
        labels = [f"{shorten(r.op, 20)} · {shorten(r.group, 26)} · {shorten(r.dtype, 14)}" for r in lines.itertuples()]
        left.set_yticks(range(len(lines)), labels, fontsize=6.3)
        right.set_yticks(range(len(lines)), [])
        left.set_title(f"{titles[run]}  ", loc="left", fontweight="bold", fontsize=7.5, pad=3)
        right.set_title(f"{shorten(run, 40)}, rank {busiest[run]}", loc="right", fontsize=6.5, color=style.MUTED, pad=3)
    axes[-1][0].set_xlabel("calls of one step")
    axes[-1][1].set_xlabel("payload of one step [bytes]")
    handles = [Line2D([], [], marker="o", mfc="none", mec=style.INK, ls="none", ms=7, label="predicted")]
    if measured:
        handles.append(Line2D([], [], marker="o", color=style.INK, ls="none", ms=3.5, label="measured"))
    ops = list(dict.fromkeys(op for run in runs for op in tables[run]["op"]))
    handles += [Patch(facecolor=style.op_colour(op), label=shorten(op, 24)) for op in sorted(ops)]
    figure.legend(handles=handles, loc="outside lower center", ncols=8, handlelength=1.2, columnspacing=1.2)
    return figure


def _dot_panel(ax: Axes, lines: pd.DataFrame, what: str, measured: bool, tips: dict[str, str]) -> None:
    for y, row in enumerate(lines.itertuples()):
        predicted, found = getattr(row, f"predicted_{what}"), getattr(row, f"measured_{what}")
        colour = style.op_colour(row.op)
        unit = "calls" if what == "count" else "B"
        if predicted:
            ax.plot(*(predicted, y, "o"), ms=7, mfc="white", mec=colour, mew=1.1, zorder=3, gid=f"tip{len(tips)}")
            tips[f"tip{len(tips)}"] = f"predicted: {row.op} on {row.group}, {row.dtype}, {predicted:,} {unit}"
        if measured and found:
            ax.plot(found, y, "o", ms=3.5, color=colour, zorder=4, gid=f"tip{len(tips)}")
            tips[f"tip{len(tips)}"] = f"measured: {row.op} on {row.group}, {row.dtype}, {found:,} {unit}"
        if measured and predicted != found:
            ax.axhspan(y - 0.45, y + 0.45, color=style.BAD, alpha=0.12, lw=0, zorder=0)
        text = f"{predicted:,}" if what == "count" else fmt_auto(int(predicted))
        ax.annotate(
            *(text, (max(predicted, found, 1), y)),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=6,
            color=style.MUTED,
        )
    ax.set_xscale("log")
    # Every third power of ten has a name of its own in bytes.
    ax.xaxis.set_major_locator(LogLocator(10 if what == "count" else 1000, numticks=12))
    ax.xaxis.set_major_formatter(FuncFormatter(_count_tick if what == "count" else _bytes_tick))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_ylim(max(2, len(lines)) - 0.4, -0.6)
    largest = max(1, lines[f"predicted_{what}"].max(), lines[f"measured_{what}"].max())
    ax.set_xlim(0.6, max(ax.get_xlim()[1], largest * (6 if what == "count" else 100)))


def _count_tick(value: float, _: int) -> str:
    return f"{value:,.0f}"


def _bytes_tick(value: float, _: int) -> str:
    unit, scale = unit_for(value)
    return f"{value / scale:,.0f} {unit}"


def _bars(frame: pd.DataFrame, runs: Sequence[str], busiest: dict[str, int]) -> plt.Figure:
    """One bar a run: payload of its busiest rank by kind of call; a mark where the measurement stands."""
    figure, ax = plt.subplots(figsize=(style.WIDTH_IN, 1.0 + 0.17 * len(runs)))
    part = pd.concat([frame[(frame["run"] == run) & (frame["rank"] == busiest[run])] for run in runs])
    sums = part.groupby(["op", "run"])[["predicted_bytes", "measured_bytes"]].sum()
    totals = part.groupby("run")[["predicted_bytes", "measured_bytes"]].sum()
    unit, scale = unit_for(float(totals.max().max()))
    left = dict.fromkeys(runs, 0.0)
    for op in sorted(set(part["op"])):
        widths = [float(sums["predicted_bytes"].get((op, run), 0)) / scale for run in runs]
        colour = style.op_colour(op)
        ax.barh(range(len(runs)), widths, 0.75, list(left.values()), color=colour, lw=0, label=shorten(op, 24))
        left = {run: left[run] + w for run, w in zip(runs, widths, strict=True)}
    if (frame["verdict"] != "").any():
        x = [float(totals.loc[run, "measured_bytes"]) / scale for run in runs]
        ax.plot(x, range(len(runs)), ls="none", marker="|", color=style.INK, ms=7, label="measured")
    ax.set_yticks(range(len(runs)), [shorten(r, 44) for r in runs], fontsize=6)
    ax.set_ylim(len(runs) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"payload of one step on the busiest rank [{unit}]; bars predicted, marks measured")
    figure.legend(loc="outside lower center", ncols=6, handlelength=1.2)
    return figure
