"""Loss of every step, and where the parity stage ran, how far apart runs of equal weights and tokens are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from . import style
from .data import Parity, Results, run_steps
from .save import Drawn
from .text import plural, shorten

MAX_LINES = 16
FLOOR = 1e-7  # about the last digit of a loss in fp32


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
        looks = style.run_styles(results.run_names)
        for run in shown:
            _line(ax, looks[run], run, curves[run])
        ax.set_ylabel("loss [nat a token]")
        figure.legend(loc="outside lower center", ncols=2)
    told = "; ".join(f"{shorten(r, 40)} {curves[r][0][1]:.4f} to {curves[r][-1][1]:.4f}" for r in shown)
    more = f" The first {MAX_LINES} of {plural(len(curves), 'run')}." if len(curves) > MAX_LINES else ""
    alike = " All began with the same weights; how equal they are is told under Parity." if results.parity else ""
    caption = (
        "Mean loss a token over the whole global batch. Runs with equal global batches see the same tokens at the same "
        f"step, others do not.{alike}{more} Source: reconcile/steps.csv."
    )
    alt = f"Line chart of the loss over the optimizer steps. {told}."
    return [Drawn("losses", "losses", "Loss of every step", alt, caption, figure)]


def _line(ax: Axes, look: style.RunStyle, name: str, line: Sequence[tuple[int, float | None]]) -> None:
    steps, values = zip(*line, strict=True)
    ax.plot(
        steps,
        values,
        color=look.colour,
        marker=look.marker if len(line) <= 60 else None,
        markersize=3.5,
        linestyle=look.dashes,
        label=shorten(name, 44),
    )
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("optimizer step")


def draw_parity(parity: Parity | None, run_names: Sequence[str] = (), on_gpus: str = "") -> list[Drawn]:
    """Loss of runs that began alike, and how far each is from the plain reference, beside the bound.

    `run_names` are the runs of the results in order: a run looks as it does in the other figures. `on_gpus` names the
    results folder where the runs are measurements on GPUs that stand beside the results of the page.
    """
    if parity is None or parity.curves.empty:
        return []
    runs = list(dict.fromkeys(parity.curves["run"]))[:MAX_LINES]
    gaps, against = _gaps(parity)
    with style.style():
        looks = style.run_styles([*run_names, *runs, *gaps])
        figure = _parity_figure(parity, runs, gaps, against, looks)
    worst = float(parity.losses["rel_difference"].max()) if not parity.losses.empty else 0.0
    shown = f"on the right each run against {against}" if against else "on the right each pair"
    if any((rows["rel_difference"] < FLOOR).any() for rows in gaps.values()):
        shown += f"; what is below {FLOOR:.0e} is drawn there"
    caption = (
        f"Runs that begin with the same weights and see the same tokens: {parity.summary['verdict']} over "
        f"{plural(parity.summary['steps'], 'step')}; the losses of any pair differ by at most {worst:.2e} of "
        "themselves "
        f"({shown}). Bounds are measured: how far plain runs drift apart when only rounding differs. "
        f"Source: {f'{shorten(on_gpus, 40)}/' if on_gpus else ''}parity/losses.csv."
    )
    alt = (
        "Two line charts over the optimizer steps: the loss of each run, and the relative difference of losses with "
        "its "
        f"bound. Runs: {', '.join(shorten(r, 40) for r in runs)}. Largest difference {worst:.2e}."
    )
    if on_gpus:
        return [Drawn("parity_gpu", "evidence", "Loss parity at full size, on a GPU", alt, caption, figure)]
    return [Drawn("parity", "losses", "Loss parity", alt, caption, figure)]


def _gaps(parity: Parity) -> tuple[dict[str, pd.DataFrame], str]:
    """Rows of losses.csv by run, against one reference if there is one, else by pair."""
    references = [r for r in parity.summary["references"] if (parity.losses["right"] == r).any()]
    if references:
        against = next((r for r in references if "bf16" in r), references[0])
        part = parity.losses[parity.losses["right"] == against]
        return {str(left): rows for left, rows in part.groupby("left", sort=False)}, against
    pairs = parity.losses.groupby(["left", "right"], sort=False)
    return {f"{shorten(a, 24)} / {shorten(b, 24)}": rows for (a, b), rows in pairs}, ""


def _parity_figure(
    parity: Parity,
    runs: Sequence[str],
    gaps: Mapping[str, pd.DataFrame],
    against: str,
    looks: Mapping[str, style.RunStyle],
) -> plt.Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(style.WIDTH_IN, 3.0))
    for run in runs:
        part = parity.curves[parity.curves["run"] == run]
        _line(left, looks[run], run, list(zip(part["step"], part["loss"], strict=True)))
    left.set_ylabel("loss [nat a token]")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, fontsize=6, handlelength=2.4)
    for name, rows in list(gaps.items())[:MAX_LINES]:
        # A difference of nothing has no place on a logarithmic axis; it is drawn at its lower end.
        line = [(int(s), max(float(d), FLOOR)) for s, d in zip(rows["step"], rows["rel_difference"], strict=True)]
        _line(right, looks[name], name, line)
    if gaps:
        bound = pd.concat(gaps.values()).groupby("step")["bound"].max()
        right.plot(bound.index, bound.to_numpy(), color=style.BAD, lw=1, ls=(0, (1, 1)), label="bound")
        right.set_yscale("log")
        right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
        right.yaxis.set_minor_formatter(NullFormatter())
        right.set_ylabel(f"relative difference to {against}" if against else "relative difference of a pair")
        right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, fontsize=6, handlelength=2.4)
    return figure
