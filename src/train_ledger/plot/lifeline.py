"""The life of one weight over one step: where its elements are at each event, and where its fp32 master lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from train_ledger.reconcile.compare import rank_ranges
from train_ledger.spec.units import fmt_auto

from . import style
from .data import Results, framework_title
from .save import Drawn
from .text import plural, shorten

MAX_LANES = 12
BEFORE, AFTER = ("step_begin",), ("before_optimizer", "after_optimizer", "step_end")
INSIDE = ("before_forward", "forward", "after_forward", "before_backward", "backward", "after_backward")


@dataclass(frozen=True)
class Lane:
    """One run's weight on one rank. `slots` are (column, event row); equal micro-batches are told once."""

    run: str
    framework: str
    rank: int
    weight: str
    full_numel: int
    micro_batches: int
    kinds: list[list[int]]  # micro-batches that are alike, in order of the first
    slots: list[tuple[str, pd.Series]]


def lanes(results: Results) -> list[Lane]:
    """A lane a run, in the last step that was recorded: the lowest rank that keeps some of the weight's fp32 master.

    Where no rank keeps any, the lowest rank that followed the weight.
    """
    frame = results["lifeline"]
    out = []
    for run in results.run_names:
        part = frame[frame["run"] == run]
        if part.empty:
            continue
        held = part[part["master_name"] != ""]
        rank = int((part if held.empty else held)["rank"].min())
        part = part[part["rank"] == rank]
        part = part[part["step"] == part["step"].max()].sort_values("order")
        kinds: dict[tuple[tuple[str, ...], ...], list[int]] = {}
        for m, events in part[part["micro_batch"] >= 0].groupby("micro_batch", sort=True):
            key = tuple(map(tuple, events[["event", "state", "dtype", "numel"]].astype(str).to_numpy().tolist()))
            kinds.setdefault(key, []).append(int(m))
        slots = [(f"{r['event']}", r) for _, r in part[part["event"].isin(BEFORE)].iterrows()]
        for i, members in enumerate(kinds.values()):
            events = part[part["micro_batch"] == members[0]]
            slots += [(f"{i}/{r['event']}", r) for _, r in events.iterrows()]
        slots += [(f"{r['event']}", r) for _, r in part[part["event"].isin(AFTER)].iterrows()]
        first = part.iloc[0]
        out.append(
            Lane(
                *(run, results.framework(run), rank, str(first["weight"]), int(first["full_numel"])),
                sum(len(m) for m in kinds.values()),
                list(kinds.values()),
                slots,
            )
        )
    return out


def words(lane: Lane) -> str:
    """The states of the lane in order, repetitions told once: `shard (float32) → full (bfloat16) → …`."""
    told: list[str] = []
    for _, event in lane.slots:
        text = state_word(event)
        if not told or told[-1] != text:
            told.append(text)
    return " → ".join(told)


def state_word(event: pd.Series) -> str:
    """One state in words."""
    if event["state"] == "empty":
        return "empty"
    return f"{event['state']} ({event['dtype']})"


def share(numel: float, full_numel: int) -> str:
    """`1/8` or `whole`; a share that is no simple fraction (padding) with `≈`."""
    if not full_numel or pd.isna(numel):
        return "none"
    exact = Fraction(int(numel), full_numel)
    if exact >= 1:
        return "whole"
    simple = exact.limit_denominator(64)
    return f"{simple.numerator}/{simple.denominator}" if simple == exact else f"≈ {float(exact):.3f}"


def masters(results: Results, run: str) -> str:
    """Which ranks keep how much of the fp32 master of their slice of the weight, at the end of the recorded step."""
    frame = results.of("lifeline", run)
    shares: dict[str, list[int]] = {}
    for rank, part in frame.groupby("rank", sort=True):
        last = part.sort_values(["step", "order"]).iloc[-1]
        if last["master_name"]:
            told = f"{share(last['master_numel'], int(last['full_numel']))} in {last['master_name']}"
            told += f" ({last['master_dtype']}{', the weight itself' if last['master_same_storage'] == 'True' else ''})"
        else:
            told = "none"
        shares.setdefault(told, []).append(int(rank))
    ordered = sorted(shares.items(), key=lambda item: (item[0] == "none", item[1]))
    return "; ".join(f"{plural(len(r), 'rank').split()[1]} {rank_ranges(r)}: {told}" for told, r in ordered)


def draw(results: Results) -> list[Drawn]:
    """The lifelines, one lane a run."""
    found = lanes(results)
    shown = found[:MAX_LANES]
    if not shown:
        return []
    with style.style():
        figure = _figure(shown)
    told = "; ".join(
        f"{framework_title(lane.framework)} ({shorten(lane.run, 40)}): {words(lane)}; "
        f"fp32 master: {masters(results, lane.run)}"
        for lane in shown
    )
    first = shown[0]
    more = f" {plural(len(found) - len(shown), 'run')} more in the table." if len(found) > len(shown) else ""
    caption = (
        f"One weight, {shorten(first.weight, 60)}, over the recorded step. Height is the part of the weight that this "
        "rank holds, colour its element type; hatched: a view of a larger buffer that stays allocated. The thin bar "
        "below is the part of the fp32 master that this rank keeps. Micro-batches that live alike are drawn once."
        f"{more} Source: reconcile/lifeline.csv."
    )
    alt = f"Timeline of one weight over one training step, a lane a run. {told}."
    return [Drawn("lifelines", "lifelines", "Life of one weight over one step", alt, caption, figure)]


def _columns(shown: Sequence[Lane]) -> list[str]:
    kinds = max(len(lane.kinds) for lane in shown)
    return [*BEFORE, *(f"{i}/{e}" for i in range(kinds) for e in INSIDE), *AFTER]


def _figure(shown: Sequence[Lane]) -> plt.Figure:
    columns = _columns(shown)
    at = _positions(columns)
    figure, axes = plt.subplots(
        len(shown), 1, figsize=(style.WIDTH_IN, 0.95 + 0.92 * len(shown)), sharex=True, squeeze=False
    )
    for ax, lane in zip(axes[:, 0], shown, strict=True):
        _lane(ax, lane, at)
    bottom = axes[-1, 0]
    names = [c.split("/")[-1].replace("_", " ") for c in columns]
    bottom.set_xticks([at[c] for c in columns], names, rotation=38, ha="right", rotation_mode="anchor", fontsize=6.5)
    bottom.set_xlim(-0.6, max(at.values()) + 0.6)
    bottom.set_xlabel("events of one step, in order")
    states = {(str(e["state"]), str(e["dtype"])) for lane in shown for _, e in lane.slots if e["state"] != "empty"}
    handles = [
        Patch(
            facecolor=style.dtype_colour(d), edgecolor="white", hatch="////" if s == "view" else "", label=f"{s}, {d}"
        )
        for s, d in sorted(states)
    ]
    handles.append(Patch(facecolor="none", edgecolor=style.MUTED, linestyle=":", label="empty"))
    handles.append(Patch(facecolor=style.container_colour("main_param"), label="fp32 master (thin bar)"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, handlelength=1.4)
    figure.supylabel("part of the weight on this rank", fontsize=7.5)
    return figure


def _positions(columns: Sequence[str]) -> dict[str, float]:
    """Columns in order, with room before each micro-batch and before the optimizer, so that they stand apart."""
    out, x = {}, 0.0
    for before, column in zip(["", *columns], columns, strict=False):
        x += 0.4 if before and before.rpartition("/")[0] != column.rpartition("/")[0] else 0.0
        out[column] = x
        x += 1.0
    return out


def _lane(ax: Axes, lane: Lane, at: dict[str, float]) -> None:
    for column, event in lane.slots:
        if column not in at:
            continue
        x, height = at[column], min(1.0, int(event["numel"]) / lane.full_numel if lane.full_numel else 0.0)
        if event["state"] == "empty" or not height:
            ax.add_patch(
                Rectangle((x - 0.45, 0), 0.9, 0.06, facecolor="none", edgecolor=style.MUTED, linestyle=":", lw=0.7)
            )
        else:
            hatch = "////" if event["state"] == "view" else ""
            ax.add_patch(
                Rectangle(
                    *((x - 0.45, 0), 0.9, max(height, 0.04)),
                    facecolor=style.dtype_colour(str(event["dtype"])),
                    edgecolor="white",
                    hatch=hatch,
                    lw=0.3,
                )
            )
        if event["master_name"] and lane.full_numel:
            part = min(1.0, float(event["master_numel"]) / lane.full_numel)
            ax.add_patch(
                Rectangle((x - 0.45, -0.22), 0.9 * part, 0.12, facecolor=style.container_colour("main_param"), lw=0)
            )
            ax.add_patch(Rectangle((x - 0.45, -0.22), 0.9, 0.12, facecolor="none", edgecolor=style.MUTED, lw=0.3))
    for i, members in enumerate(lane.kinds):
        label = f"micro-batch {members[0]}" if len(members) == 1 else f"micro-batches {_ranges(members)}, all alike"
        ax.text(at[f"{i}/{INSIDE[0]}"] - 0.45, 1.04, label, fontsize=6, color=style.MUTED)
    ax.set_ylim(-0.3, 1.0)
    ax.set_yticks([0, 0.5, 1], ["0", "½", "1"])
    ax.grid(axis="x", visible=False)
    size = fmt_auto(lane.full_numel * 2)
    ax.set_title(framework_title(lane.framework), loc="left", fontweight="bold", fontsize=7.5, pad=10)
    ax.set_title(
        f"{shorten(lane.run, 40)}, rank {lane.rank}: {lane.full_numel:,} elements, {size} in bf16",
        loc="right",
        fontsize=6.5,
        color=style.MUTED,
        pad=10,
    )


def _ranges(numbers: Sequence[int]) -> str:
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(str(n) for n in numbers[:6]) + (", …" if len(numbers) > 6 else "")
