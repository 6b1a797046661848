"""Who talks to whom: every process group of a run as a row of ranks, ranks of one group in one colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from . import style
from .data import Results, framework_title
from .runs import panel_titles
from .save import Drawn
from .text import plural, shorten

MAX_RANKS = 64
MAX_RUNS = 8


def partitions(groups: Sequence[Mapping[str, Any]]) -> list[tuple[list[str], list[tuple[int, ...]]]]:
    """Ways in which a run splits its ranks: the names that mean the same split, and its groups of two or more ranks."""
    by_name: dict[str, list[tuple[int, ...]]] = {}
    for g in groups:
        if len(g["ranks"]) > 1:
            by_name.setdefault(g["name"], []).append(tuple(g["ranks"]))
    merged: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for name, found in by_name.items():
        merged.setdefault(tuple(sorted(set(found))), []).append(name)
    return [(names, list(found)) for found, names in merged.items()]


def draw(results: Results) -> list[Drawn]:
    """One panel a run that has a group of two or more ranks."""
    runs = {}
    for run in results.run_names:
        groups = next((r["groups"] for r in results.runs if r["run"] == run), None)
        groups = results.predictions[run]["groups"] if groups is None else groups
        found = partitions(groups)
        if found:
            runs[run] = found
    distinct: dict[str, list[str]] = {}
    for run, found in runs.items():
        distinct.setdefault(repr((results.framework(run), found)), []).append(run)
    shown = list(distinct.values())[:MAX_RUNS]
    if not shown:
        return []
    with style.style():
        figure = _figure(results, [(names, runs[names[0]]) for names in shown])
    told = "; ".join(
        f"{framework_title(results.framework(names[0]))}: "
        + ", ".join(f"{'/'.join(n)} {plural(len(g), 'group')} of {len(g[0])}" for n, g in runs[names[0]])
        for names in shown
    )
    alt = f"Grids of ranks, one a run; each row is a kind of process group, ranks of one group share a colour. {told}."
    caption = (
        "Process groups of two or more ranks. In a row, ranks with the same letter and colour talk to each other; "
        "names that split the ranks alike share a row. Source: predict/*.json, checked against each rank's own groups "
        "in reconcile/layout.csv."
    )
    return [Drawn("groups", "groups", "Process groups", alt, caption, figure)]


def _figure(results: Results, panels: Sequence[tuple[list[str], list[Any]]]) -> plt.Figure:
    titles = panel_titles([(results.framework(names[0]), names[0]) for names, _ in panels])
    heights = [len(found) + 1.4 for _, found in panels]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(style.WIDTH_IN, 0.3 + 0.25 * sum(heights)), height_ratios=heights, squeeze=False
    )
    for ax, (names, found) in zip(axes[:, 0], panels, strict=True):
        _grid(ax, found)
        ax.set_title(titles[names[0]], loc="left", fontweight="bold", fontsize=7.5, pad=3)
        ax.set_title(shorten(", ".join(names), 70), loc="right", fontsize=6.5, color=style.MUTED, pad=3)
    axes[-1, 0].set_xlabel("rank")
    return figure


def _grid(ax: Axes, found: Sequence[tuple[list[str], list[tuple[int, ...]]]]) -> None:
    palette = sns.color_palette("colorblind", 10)
    last = min(MAX_RANKS, 1 + max(r for _, groups in found for g in groups for r in g))
    for y, (_, groups) in enumerate(found):
        for i, group in enumerate(groups):
            for rank in group:
                if rank < last:
                    colour = palette[i % len(palette)]
                    light = tuple(c + (1 - c) * 0.45 for c in colour)
                    ax.add_patch(Rectangle((rank - 0.46, y - 0.42), 0.92, 0.84, facecolor=light, edgecolor="none"))
                    if last <= 32:
                        ax.text(rank, y, _letter(i), ha="center", va="center", fontsize=6, color=style.INK)
    ax.set_xlim(-0.6, last - 0.4)
    ax.set_ylim(len(found) - 0.5, -0.5)
    ax.set_yticks(range(len(found)), [shorten(" = ".join(names), 44) for names, _ in found], fontsize=6.5)
    ax.set_xticks(range(0, last, 1 if last <= 16 else 8))
    ax.grid(visible=False)
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.tick_params(length=0)


def _letter(i: int) -> str:
    text = ""
    i += 1
    while i:
        i, digit = divmod(i - 1, 26)
        text = chr(ord("a") + digit) + text
    return text
