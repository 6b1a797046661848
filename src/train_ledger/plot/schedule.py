"""The 1F1B schedule of a pipeline: when each stage works on which micro-batch, and the order that was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from train_ledger.reconcile.compare import rank_ranges

from . import style
from .data import Results
from .runs import config_of, panel_titles
from .save import Drawn
from .text import plural, shorten

MAX_STAGES = 16
MAX_MICRO_BATCHES = 64
FORWARD, BACKWARD = "#56B4E9", "#E69F00"

Op = tuple[str, int]  # ("F" or "B", micro-batch)


@dataclass(frozen=True)
class Pipeline:
    """A run's pipeline: stages, micro-batches of a step, and the measured order of stages that hold the weight."""

    run: str
    framework: str
    stages: int
    micro_batches: int
    measured: Mapping[int, list[Op]]

    @property
    def bubble_share(self) -> float:
        """Idle part of a stage's time in a step, (p-1)/(m+p-1), whatever a forward and a backward take."""
        return (self.stages - 1) / (self.micro_batches + self.stages - 1)


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Op]:
    """Order of work of one stage: warm-up forwards, then one forward and one backward in turn, then the rest backward.

    Source: megatron `core/pipeline_parallel/schedules.py:forward_backward_pipelining_without_interleaving`; torch's
    `Schedule1F1B` is the same.
    """
    warm_up = min(stages - stage - 1, micro_batches)
    order: list[Op] = [("F", m) for m in range(warm_up)]
    for m in range(micro_batches - warm_up):
        order += [("F", warm_up + m), ("B", m)]
    return order + [("B", m) for m in range(micro_batches - warm_up, micro_batches)]


def start_times(stages: int, micro_batches: int, forward: int = 1, backward: int = 2) -> dict[tuple[int, Op], int]:
    """When each stage starts each piece of work, in units of a forward, if sending takes no time."""
    orders = [one_f_one_b(s, stages, micro_batches) for s in range(stages)]
    at, free, done = [0] * stages, [0] * stages, {}
    out: dict[tuple[int, Op], int] = {}
    while any(at[s] < len(orders[s]) for s in range(stages)):
        for s in range(stages):
            while at[s] < len(orders[s]):
                kind, m = op = orders[s][at[s]]
                needs = (s - 1, op) if kind == "F" else (s + 1, op)
                if kind == "B" and s == stages - 1:
                    needs = (s, ("F", m))
                if needs[0] >= 0 and needs not in done:
                    break
                out[s, op] = max(free[s], done.get(needs, 0))
                free[s] = done[s, op] = out[s, op] + (forward if kind == "F" else backward)
                at[s] += 1
    return out


def pipelines(results: Results) -> list[Pipeline]:
    """Runs with a plain 1F1B pipeline, other schedules and one-stage ones left out."""
    out = []
    for run in results.run_names:
        config = config_of(results, run)
        parallel = config.get("parallel", {})
        stages = int(parallel.get("pipeline_parallel", 1))
        if stages < 2 or int(parallel.get("virtual_pipeline_parallel", 1)) > 1:
            continue
        if config.get("settings", {}).get("pipeline_parallel_schedule", "1F1B") != "1F1B":
            continue
        per_step = int(config["micro_batch"]) * int(parallel["data_parallel"])
        out.append(
            Pipeline(
                *(run, results.framework(run), stages, int(config["global_batch"]) // per_step),
                _measured(results, run),
            )
        )
    return out


def _measured(results: Results, run: str) -> dict[int, list[Op]]:
    """Order of forwards and backwards through the followed weight's module, by stage; the lowest rank of each stage."""
    coords = {r["rank"]: r["coords"] for found in results.runs if found["run"] == run for r in found["ranks"]}
    frame = results.of("lifeline", run)
    out: dict[int, list[Op]] = {}
    for rank, part in frame.groupby("rank", sort=True):
        stage = coords.get(int(rank), {}).get("pp")
        if stage is None or stage in out:
            continue
        part = part[part["step"] == part["step"].max()].sort_values("order")
        part = part[part["event"].isin(["before_forward", "before_backward"])]
        kinds = ["F" if e == "before_forward" else "B" for e in part["event"]]
        out[stage] = list(zip(kinds, (int(m) for m in part["micro_batch"]), strict=True))
    return {s: order for s, order in out.items() if order}


def draw(results: Results) -> list[Drawn]:
    """One panel a run with a pipeline that can be drawn."""
    found = [p for p in pipelines(results) if p.stages <= MAX_STAGES and p.micro_batches <= MAX_MICRO_BATCHES][:4]
    if not found:
        return []
    with style.style():
        figure = _figure(found)
    told, findings = [], []
    for p in found:
        told.append(f"{shorten(p.run, 40)}: {p.stages} stages, {p.micro_batches} micro-batches")
        agree = all(order == one_f_one_b(s, p.stages, p.micro_batches) for s, order in p.measured.items())
        seen = "not measured" if not p.measured else "measured as predicted" if agree else "measured in another order"
        findings.append(f"{shorten(p.run, 40)} idles {100 * p.bubble_share:.1f}% of a step, order {seen}")
    alt = (
        "Time chart of forward and backward work of each pipeline stage, predicted, then in measured order. "
        f"{'; '.join(told)}."
    )
    caption = (
        f"{'; '.join(findings)}. Bubble share = (p-1)/(m+p-1) for p stages and m micro-batches. Drawn with a backward "
        "twice as long as a forward and free transfers: an order, not a time. Measured rows show the order in which "
        f"the followed weight's module ran{_unmeasured(results, found)}. Sources: config and reconcile/lifeline.csv."
    )
    return [Drawn("schedule", "schedule", "1F1B schedule", alt, caption, figure)]


def _unmeasured(results: Results, found: Sequence[Pipeline]) -> str:
    """Why a stage has no measured row; empty where every stage has one, or none."""
    told = []
    for p in found:
        lacking = [s for s in range(p.stages) if s not in p.measured]
        if p.measured and lacking:
            weight = shorten(str(results.of("lifeline", p.run)["weight"].iloc[0]), 60)
            told.append(
                f"; {plural(len(lacking), 'stage').split()[1]} {rank_ranges(lacking)} of {shorten(p.run, 40)} "
                f"{'has' if len(lacking) == 1 else 'have'} no "
                f"measured row because that module ({weight}) is only on stage {rank_ranges(sorted(p.measured))}"
            )
    return "".join(told)


def _figure(found: Sequence[Pipeline]) -> plt.Figure:
    titles = panel_titles([(p.framework, p.run) for p in found])
    heights = [p.stages + len(p.measured) + 1.2 for p in found]
    figure, axes = plt.subplots(
        len(found), 1, figsize=(style.WIDTH_IN, 0.75 + 0.3 * sum(heights)), height_ratios=heights, squeeze=False
    )
    for ax, p in zip(axes[:, 0], found, strict=True):
        _panel(ax, p, titles[p.run])
    axes[-1, 0].set_xlabel("time [one forward of one stage]")
    handles = [Patch(facecolor=FORWARD, label="forward"), Patch(facecolor=BACKWARD, label="backward")]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def _panel(ax: Axes, p: Pipeline, title: str) -> None:
    starts = start_times(p.stages, p.micro_batches)
    labels, y = [], 0
    for stage in range(p.stages):
        order = one_f_one_b(stage, p.stages, p.micro_batches)
        _row(ax, y, [(op, starts[stage, op]) for op in order], p.micro_batches)
        labels.append(f"stage {stage}, predicted")
        y += 1
        if stage in p.measured:
            times = [starts[stage, op] for op in order]
            # The k-th piece of work that was measured is drawn where the k-th was predicted.
            _row(ax, y, list(zip(p.measured[stage], times, strict=False)), p.micro_batches)
            labels.append(f"stage {stage}, measured")
            y += 1
    end = max(t + (1 if op[0] == "F" else 2) for (_, op), t in starts.items())
    ax.set_xlim(0, end)
    ax.set_ylim(y - 0.45, -0.55)
    ax.set_yticks(range(y), labels, fontsize=6.5)
    ax.grid(axis="y", visible=False)
    ax.set_title(title, loc="left", fontweight="bold", fontsize=7.5, pad=3)
    text = f"{shorten(p.run, 40)}: p = {p.stages}, m = {p.micro_batches}, bubble {100 * p.bubble_share:.1f}%"
    ax.set_title(text, loc="right", fontsize=6.5, color=style.MUTED, pad=3)


def _row(ax: Axes, y: int, work: Sequence[tuple[Op, int]], micro_batches: int) -> None:
    for (kind, m), t in work:
        width = 1 if kind == "F" else 2
        colour = FORWARD if kind == "F" else BACKWARD
        ax.add_patch(Rectangle((t, y - 0.42), width, 0.84, facecolor=colour, edgecolor="white", lw=0.5))
        if micro_batches <= 24:
            ax.text(t + width / 2, y, str(m), ha="center", va="center", fontsize=5.5, color=style.INK)
