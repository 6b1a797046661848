"""The prediction for the paper's shape beside a hand estimate."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from train_ledger.spec.units import fmt_auto

from . import style
from .data import Results, framework_title, unit_for
from .expected import HAND_ESTIMATE, Figures, predicted_figures
from .save import Drawn
from .text import shorten

MAX_RUNS = 10

# Parts of a bar: field, words, colour.
STATE = (
    ("params_bytes", "parameters", style.container_colour("param")),
    ("grads_bytes", "gradients", style.container_colour("grad")),
    ("optimizer_bytes", "fp32 master and moments", style.container_colour("exp_avg")),
    ("other_bytes", "buffers, caches, scalars", style.container_colour("batch")),
)
WIRE = (
    ("data_wire_bytes", "data parallel", "#0072B2"),
    ("tensor_wire_bytes", "tensor parallel", "#E69F00"),
    ("pipeline_wire_bytes", "pipeline", "#009E73"),
)


def draw(paper: Results, order: Sequence[str] = ()) -> list[Drawn]:
    """Two panels, resident bytes and bytes sent in a step: a predicted bar a run, a hand estimate where there is one.

    Args:
        paper: results of the comparison that is only predicted.
        order: runs in the order in which they are shown.
    """
    order = list(order)
    runs = sorted(paper.predictions, key=lambda r: (order.index(r) if r in order else len(order), r))[:MAX_RUNS]
    if not runs:
        return []
    predicted = {run: predicted_figures(paper.predictions[run]) for run in runs}
    with style.style():
        figure = _figure(paper, runs, predicted)
    told = "; ".join(
        f"{shorten(run, 40)} {fmt_auto(p.resident_bytes)} resident, "
        f"{fmt_auto(p.data_wire_bytes + p.tensor_wire_bytes + p.pipeline_wire_bytes)} sent"
        for run, p in predicted.items()
    )
    model = next((p["config"]["model"]["name"] for p in paper.predictions.values() if p.get("config")), "")
    alt = f"Two bar charts for rank 0 of each run: resident bytes, and bytes sent in a step. Predicted: {told}."
    caption = (
        f"Rank 0{f' at the {shorten(model, 40)} shape' if model else ''}. Model state is what one estimates by hand, "
        "to its rounding; what the estimate leaves out is the grey end of the predicted bars. Traffic is larger than "
        "expected where weight gradients gather their input again, where activations are recomputed, where gradients "
        "accumulate; the table below explains each difference. Source: predict/*.json."
    )
    return [Drawn("paper", "paper", "Predicted at the paper's shape", alt, caption, figure)]


def _figure(paper: Results, runs: Sequence[str], predicted: dict[str, Figures]) -> plt.Figure:
    rows: list[tuple[str, str, Figures]] = []
    for run in runs:
        rows.append((run, "predicted", predicted[run]))
        if run in HAND_ESTIMATE:
            rows.append((run, "hand estimate", HAND_ESTIMATE[run]))
    figure, axes = plt.subplots(1, 2, figsize=(style.WIDTH_IN, 0.95 + 0.29 * len(rows)), sharey=True)
    positions, labels, y = [], [], 0.0
    for run, what, _ in rows:
        y += 0.0 if not positions else 1.0 if what == "hand estimate" else 1.5
        positions.append(y)
        name = f"{framework_title(paper.framework(run))}, {what}" if what == "predicted" else what
        labels.append(name if not run.endswith("-matched") else name.replace(",", " (matched),"))
    _bars(axes[0], rows, positions, STATE, "resident on rank 0")
    _bars(axes[1], rows, positions, WIRE, "sent by rank 0 in a step, ring")
    axes[0].set_yticks(positions, [shorten(n, 40) for n in labels], fontsize=6.5)
    axes[0].set_ylim(positions[-1] + 0.7, -0.7)
    for ax, parts in zip(axes, (STATE, WIRE), strict=True):
        handles = [Patch(facecolor=colour, label=words) for _, words, colour in parts]
        ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, handlelength=1.2)
    return figure


def _bars(
    ax: Axes,
    rows: Sequence[tuple[str, str, Figures]],
    positions: Sequence[float],
    parts: Sequence[tuple[str, str, str]],
    label: str,
) -> None:
    totals = [sum(getattr(f, field) for field, _, _ in parts) for _, _, f in rows]
    unit, scale = unit_for(float(max(totals)))
    for (_, what, figures), y, total in zip(rows, positions, totals, strict=True):
        left = 0.0
        for field, _, colour in parts:
            width = getattr(figures, field) / scale
            shade = style.tint(colour, 0.5) if what == "hand estimate" else colour
            ax.barh(y, width, 0.8, left, color=shade, edgecolor="white", lw=0.3, zorder=2)
            left += width
        ax.annotate(
            f"{total / scale:.3f}" if what == "predicted" else f"≈ {total / scale:.1f}",
            (left, y),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=6,
            color=style.MUTED,
        )
    ax.set_xlim(0, max(totals) / scale * 1.16)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"{label} [{unit}]")
