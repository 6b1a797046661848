"""The life of one weight over one step: where its elements are at each event, and where its fp32 master lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from train_ledger.spec.placement import share
from train_ledger.spec.units import fmt_auto

from . import style
from .data import Results, framework_title
from .placement import master_words, matrix_numel, part_of_matrix
from .runs import panel_titles
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
    full_numel: int  # elements of what this rank computes with: its tensor-parallel slice, or the matrix
    matrix_numel: int  # elements of the whole weight
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
                *(run, results.framework(run), rank, str(first["weight"])),
                *(int(first["full_numel"]), matrix_numel(results, run)),
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


def kept_apart(results: Results, lane: Lane) -> str:
    """Where the elements of a weight are whose own tensor is empty; empty text where that is not known.

    DeepSpeed ZeRO-3 keeps each rank's part as `ds_tensor`, a view of one flat buffer (deepspeed
    `runtime/zero/stage3.py`: `lp_param_buffer`, made by
    `_create_fp16_partitions_with_defragmentation`); its fp32 master is a copy of the same part
    (`_create_fp32_partitions`).
    """
    held = results.of("resident", lane.run)
    held = held[(held["rank"] == lane.rank) & (held["container"] == "param")]
    first = lane.slots[0][1]
    if lane.framework != "deepspeed" or first["state"] != "empty" or held.empty or not first["master_name"]:
        return ""
    part = part_of_matrix(first["master_numel"], lane.full_numel, lane.matrix_numel)
    return (
        f"{held['dtype'].iloc[0]} shard ({part}) stays in the flat param container on each rank "
        "(ds_tensor in lp_param_buffer)"
    )


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
        f"fp32 master: {master_words(results, lane.run)}"
        for lane in shown
    )
    first = shown[0]
    more = f" {plural(len(found) - len(shown), 'run')} more in the table." if len(found) > len(shown) else ""
    apart = "".join(
        f" {shorten(lane.run, 40)} shows an empty tensor between uses: the weight's {kept}."
        for lane in shown
        if (kept := kept_apart(results, lane))
    )
    caption = (
        f"One weight, {shorten(first.weight, 60)}, over the recorded step. Height is the part that this rank holds of "
        "what it computes with: with tensor parallelism its slice of the matrix, else the matrix. Colour is the "
        "element type; hatched: a view of a larger buffer that stays allocated. The thin bar below is the part of the "
        "fp32 master that this rank keeps, of the same slice. Micro-batches that live alike are drawn once."
        f"{apart}{more} Sources: reconcile/lifeline.csv, reconcile/resident.csv, config."
    )
    alt = f"Timeline of one weight over one training step, a lane a run. {told}."
    return [Drawn("lifelines", "lifelines", "Life of one weight over one step", alt, caption, figure)]


def _columns(shown: Sequence[Lane]) -> list[str]:
    kinds = max(len(lane.kinds) for lane in shown)
    return [*BEFORE, *(f"{i}/{e}" for i in range(kinds) for e in INSIDE), *AFTER]


def _figure(shown: Sequence[Lane]) -> plt.Figure:
    columns = _columns(shown)
    at = _positions(columns)
    titles = panel_titles([(lane.framework, lane.run) for lane in shown])
    figure, axes = plt.subplots(
        len(shown), 1, figsize=(style.WIDTH_IN, 0.95 + 0.92 * len(shown)), sharex=True, squeeze=False
    )
    for ax, lane in zip(axes[:, 0], shown, strict=True):
        _lane(ax, lane, at, titles[lane.run])
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
    figure.supylabel("part of this tensor-parallel rank's slice", fontsize=7.5)
    return figure


def _positions(columns: Sequence[str]) -> dict[str, float]:
    """Columns in order, with room before each micro-batch and before the optimizer, so that they stand apart."""
    out, x = {}, 0.0
    for before, column in zip(["", *columns], columns, strict=False):
        x += 0.4 if before and before.rpartition("/")[0] != column.rpartition("/")[0] else 0.0
        out[column] = x
        x += 1.0
    return out


def _lane(ax: Axes, lane: Lane, at: dict[str, float], title: str) -> None:
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
    matrix = share(lane.full_numel, lane.matrix_numel)
    whole = "the whole matrix" if matrix == "whole" else f"{matrix} of the matrix"
    name = f"{shorten(lane.run, 40)}, " if title == framework_title(lane.framework) else ""
    size = fmt_auto(lane.full_numel * 2)
    ax.set_title(title, loc="left", fontweight="bold", fontsize=7.5, pad=10)
    ax.set_title(
        f"{name}rank {lane.rank}: 1 is {whole}, {lane.full_numel:,} elements, {size} in bf16",
        loc="right",
        fontsize=6.5,
        color=style.MUTED,
        pad=10,
    )


def _ranges(numbers: Sequence[int]) -> str:
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(str(n) for n in numbers[:6]) + (", …" if len(numbers) > 6 else "")
