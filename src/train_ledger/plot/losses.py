"""Loss of every step, and where the parity stage ran, how far apart runs of equal weights and tokens are."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from . import style
from .data import Parity, Results, run_steps
from .save import Drawn
from .text import plural, shorten

MAX_LINES = 16


def draw(results: Results) -> list[Drawn]:
    """Loss against step, a line a run; nothing where no run reports one (the fake world)."""
    curves = {
        run: [(s.step, s.loss) for s in run_steps(results, run) if s.loss is not None] for run in results.run_names
    }
    curves = {run: line for run, line in curves.items() if line}
    if not curves:
        return []
    shown = list(curves)[:MAX_LINES]
    with style.style():
        figure, ax = plt.subplots(figsize=(style.WIDTH_IN * 0.72, 2.5))
        for i, run in enumerate(shown):
            _line(ax, i, run, curves[run])
        ax.set_ylabel("loss [nat a token]")
        figure.legend(loc="outside lower center", ncols=2)
    told = "; ".join(f"{shorten(r, 40)} {curves[r][0][1]:.4f} to {curves[r][-1][1]:.4f}" for r in shown)
    more = f" The first {MAX_LINES} of {plural(len(curves), 'run')}." if len(curves) > MAX_LINES else ""
    caption = (
        "Mean loss a token over the whole global batch. Runs with equal batches see the same tokens at the same step; "
        f"whether they begin with the same weights is a matter of the launch.{more} Source: reconcile/steps.csv."
    )
    alt = f"Line chart of the loss over the optimizer steps. {told}."
    return [Drawn("losses", "losses", "Loss of every step", alt, caption, figure)]


def _line(ax: Axes, i: int, name: str, line: Sequence[tuple[int, float | None]]) -> None:
    steps, values = zip(*line, strict=True)
    ax.plot(
        steps,
        values,
        color=style.RUN_COLOURS[i % len(style.RUN_COLOURS)],
        marker=style.RUN_MARKERS[i % len(style.RUN_MARKERS)] if len(line) <= 60 else None,
        markersize=3.5,
        linestyle=("-", "--", "-.", ":")[i % 4],
        label=shorten(name, 44),
    )
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("optimizer step")


def draw_parity(parity: Parity | None) -> list[Drawn]:
    """Loss of runs that began alike, and the relative difference of each pair beside its bound."""
    if parity is None or parity.curves.empty:
        return []
    with style.style():
        figure, (left, right) = plt.subplots(1, 2, figsize=(style.WIDTH_IN, 2.7))
        for i, (run, part) in enumerate(parity.curves.groupby("run", sort=False)):
            _line(left, i, str(run), list(zip(part["step"], part["loss"], strict=True)))
        left.set_ylabel("loss [nat a token]")
        left.legend(fontsize=6)
        pairs = list(parity.losses.groupby(["left", "right"], sort=False))
        for i, ((a, b), part) in enumerate(pairs[:MAX_LINES]):
            gaps = [(int(s), max(float(d), 1e-9)) for s, d in zip(part["step"], part["rel_difference"], strict=True)]
            _line(right, i, f"{shorten(a, 20)} / {shorten(b, 20)}", gaps)
        if pairs:
            bound = parity.losses.groupby("step")["bound"].max()
            right.plot(bound.index, bound.to_numpy(), color=style.INK, lw=1, ls=(0, (1, 1)), label="bound")
            right.set_yscale("log")
            right.set_ylabel("relative difference of the loss")
            right.legend(fontsize=5, ncols=1)
    worst = float(parity.losses["rel_difference"].max()) if not parity.losses.empty else 0.0
    caption = (
        f"Runs that begin with the same weights and see the same tokens: {parity.summary['verdict']} over "
        f"{plural(parity.summary['steps'], 'step')}; the losses of a pair differ by at most {worst:.2e} of themselves. "
        "Bounds are measured: how far plain runs drift apart when only rounding differs. Source: parity/losses.csv."
    )
    alt = "Two line charts over the optimizer steps: the loss of each run, and the relative difference of each pair."
    return [Drawn("parity", "losses", "Loss parity", alt, caption, figure)]
