"""The schedule of a pipeline: when each stage works on which micro-batch, and the order that was measured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from train_ledger.spec.groups import rank_ranges

from . import style
from .data import Results
from .orders import BACKWARD, FORWARD, Op, order_of, start_times
from .runs import config_of, panel_titles
from .save import Drawn
from .text import plural, shorten

MAX_STAGES = 16
MAX_MICRO_BATCHES = 64
COLOURS = {FORWARD: "#56B4E9", BACKWARD: "#E69F00"}


@dataclass(frozen=True)
class Pipeline:
    """A run's pipeline: stages, model chunks of each, micro-batches of a step.

    `measured` is the order on stages that hold the followed weight, through the one chunk that has it.
    """

    run: str
    framework: str
    stages: int
    chunks: int
    micro_batches: int
    measured: Mapping[int, list[Op]]

    @property
    def bubble_share(self) -> float:
        """Idle part of a stage's time in a step, (p-1)/(vm+p-1), whatever a forward and a backward take."""
        return (self.stages - 1) / (self.chunks * self.micro_batches + self.stages - 1)

    def predicted(self, stage: int) -> list[Op]:
        """All the work of a stage in order."""
        return order_of(stage, self.stages, self.micro_batches, self.chunks)

    def comparable(self, stage: int) -> list[Op]:
        """Of that, the work in the chunk that was measured."""
        chunks = {op.chunk for op in self.measured.get(stage, [])}
        return [op for op in self.predicted(stage) if op.chunk in chunks]

    def agrees(self, stage: int) -> bool:
        """Whether the measured order of a stage is the predicted one."""
        return self.measured[stage] == self.comparable(stage)


def pipelines(results: Results) -> list[Pipeline]:
    """Runs with more than one pipeline stage and Megatron Core's order, which torchtitan's plain 1F1B has too."""
    out = []
    for run in results.run_names:
        config = config_of(results, run)
        parallel = config.get("parallel", {})
        stages, chunks = (int(parallel.get(f"{k}pipeline_parallel", 1)) for k in ("", "virtual_"))
        if stages < 2:
            continue
        if config.get("settings", {}).get("pipeline_parallel_schedule", "1F1B") != "1F1B":
            continue
        per_step = int(config["micro_batch"]) * int(parallel["data_parallel"])
        out.append(
            Pipeline(
                *(run, results.framework(run), stages, chunks, int(config["global_batch"]) // per_step),
                _measured(results, run, stages, chunks),
            )
        )
    return out


def _measured(results: Results, run: str, stages: int, chunks: int) -> dict[int, list[Op]]:
    """Order of forwards and backwards through the followed weight's module, by stage; the lowest rank of each stage."""
    coords = {r["rank"]: r["coords"] for found in results.runs if found["run"] == run for r in found["ranks"]}
    frame = results.of("lifeline", run)
    out: dict[int, list[Op]] = {}
    for rank, part in frame.groupby("rank", sort=True):
        stage = coords.get(int(rank), {}).get("pp")
        if stage is None or stage in out:
            continue
        chunk = _chunk_of(str(part["weight"].iloc[0]), config_of(results, run), stage, stages, chunks)
        part = part[part["step"] == part["step"].max()].sort_values("order")
        part = part[part["event"].isin(["before_forward", "before_backward"])]
        kinds = [FORWARD if e == "before_forward" else BACKWARD for e in part["event"]]
        if chunk is not None:
            out[stage] = [Op(k, int(m), chunk) for k, m in zip(kinds, part["micro_batch"], strict=True)]
    return {s: order for s, order in out.items() if order}


def _chunk_of(weight: str, config: Mapping[str, Any], stage: int, stages: int, chunks: int) -> int | None:
    """The model chunk of a stage that has the weight: layers go round the stages, chunk by chunk.

    None where that does not lead to this stage: stages of unequal layers (megatron
    `core/transformer/transformer_layer.py:get_transformer_layer_offset`).
    """
    if chunks == 1:
        return 0
    layer = re.match(r"model\.layers\.(\d+)\.", weight)
    if not layer:
        return 0 if weight == "model.embed_tokens.weight" else chunks - 1
    each = int(config["model"]["num_layers"]) // (stages * chunks)
    chunk, at = divmod(int(layer[1]) // each, stages)
    return chunk if at == stage and chunk < chunks else None


def draw(results: Results) -> list[Drawn]:
    """One panel a run with a pipeline that can be drawn."""
    found = [p for p in pipelines(results) if p.stages <= MAX_STAGES and p.micro_batches <= MAX_MICRO_BATCHES][:4]
    if not found:
        return []
    with style.style():
        figure = _figure(found)
    told, findings = [], []
    for p in found:
        virtual = f", {p.chunks} model chunks a stage" if p.chunks > 1 else ""
        told.append(f"{shorten(p.run, 40)}: {p.stages} stages{virtual}, {p.micro_batches} micro-batches")
        agree = all(p.agrees(s) for s in p.measured)
        seen = "not measured" if not p.measured else "measured as predicted" if agree else "measured in another order"
        findings.append(
            f"{shorten(p.run, 40)} would idle {100 * p.bubble_share:.1f}% of a step if all stages took equal time; "
            f"order {seen}"
        )
    alt = (
        "Time chart of forward and backward work of each pipeline stage, predicted, then in measured order. "
        f"{'; '.join(told)}."
    )
    interleaved = (
        " Of an interleaved run lighter boxes are later model chunks of the stage, and a measured row has the one "
        "chunk with that module."
        if any(p.chunks > 1 for p in found)
        else ""
    )
    caption = (
        f"{'; '.join(findings)}. Bubble share = (p-1)/(vm+p-1) for p stages of v model chunks (plain 1F1B: v = 1) and "
        "m micro-batches. Drawn with a backward twice as long as a forward and free transfers: an order, not a time. "
        "Measured rows show the order in which the followed weight's module ran"
        f"{_unmeasured(results, found)}.{interleaved} Sources: config and reconcile/lifeline.csv."
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
    chunks = max(p.chunks for p in found)
    handles = [
        Patch(facecolor=_colour(kind, chunk), label=word + (f", chunk {chunk}" if chunks > 1 else ""))
        for kind, word in ((FORWARD, "forward"), (BACKWARD, "backward"))
        for chunk in range(chunks)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6))
    return figure


def _colour(kind: str, chunk: int) -> str:
    return style.tint(COLOURS[kind], min(0.75, 0.45 * chunk))


def _panel(ax: Axes, p: Pipeline, title: str) -> None:
    # In units of a stage's forward: one of a chunk takes that much less.
    starts = {key: t / p.chunks for key, t in start_times(p.stages, p.micro_batches, p.chunks).items()}
    labels, y = [], 0
    for stage in range(p.stages):
        _row(ax, y, [(op, starts[stage, op]) for op in p.predicted(stage)], p)
        labels.append(f"stage {stage}, predicted")
        y += 1
        if stage in p.measured:
            # The k-th piece of work that was measured is drawn where the k-th was predicted.
            times = [starts[stage, op] for op in p.comparable(stage)]
            _row(ax, y, list(zip(p.measured[stage], times, strict=False)), p)
            labels.append(f"stage {stage}, measured")
            y += 1
    end = max(t + _width(op, p) for (_, op), t in starts.items())
    ax.set_xlim(0, end)
    ax.set_ylim(y - 0.45, -0.55)
    ax.set_yticks(range(y), labels, fontsize=6.5)
    ax.grid(axis="y", visible=False)
    ax.set_title(title, loc="left", fontweight="bold", fontsize=7.5, pad=3)
    chunks = f"v = {p.chunks}, " if p.chunks > 1 else ""
    text = f"{shorten(p.run, 40)}: p = {p.stages}, {chunks}m = {p.micro_batches}, bubble {100 * p.bubble_share:.1f}%"
    ax.set_title(text, loc="right", fontsize=6.5, color=style.MUTED, pad=3)


def _width(op: Op, p: Pipeline) -> float:
    return (1 if op.kind == FORWARD else 2) / p.chunks


def _row(ax: Axes, y: int, work: Sequence[tuple[Op, float]], p: Pipeline) -> None:
    for op, t in work:
        width = _width(op, p)
        colour = _colour(op.kind, op.chunk)
        ax.add_patch(Rectangle((t, y - 0.42), width, 0.84, facecolor=colour, edgecolor="white", lw=0.5))
        if p.micro_batches * p.chunks <= 24:
            ax.text(t + width / 2, y, str(op.micro_batch), ha="center", va="center", fontsize=5.5, color=style.INK)
