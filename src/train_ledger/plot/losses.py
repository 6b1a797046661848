"""Loss of every step."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from . import style
from .data import Results
from .save import Drawn
from .text import plural, shorten

MAX_LINES = 16


def draw(results: Results) -> list[Drawn]:
    """Loss against step, a line a run; nothing where no run reports one (the fake world)."""
    frame = results["steps"].dropna(subset=["loss"])
    runs = [r for r in results.run_names if (frame["run"] == r).any()]
    if not runs:
        return []
    shown = runs[:MAX_LINES]
    with style.style():
        figure, ax = plt.subplots(figsize=(style.WIDTH_IN * 0.72, 2.5))
        for i, run in enumerate(shown):
            # Every rank that knows the loss knows the same one; the lowest stands for all.
            line = frame[frame["run"] == run].sort_values("rank").groupby("step", sort=True)["loss"].first()
            ax.plot(
                line.index,
                line.to_numpy(dtype=float),
                color=style.RUN_COLOURS[i % len(style.RUN_COLOURS)],
                marker=style.RUN_MARKERS[i % len(style.RUN_MARKERS)] if len(line) <= 60 else None,
                markersize=4,
                linestyle=("-", "--", "-.", ":")[i % 4],
                label=shorten(run, 44),
            )
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("optimizer step")
        ax.set_ylabel("loss [nat a token]")
        figure.legend(loc="outside lower center", ncols=2)
    first_last = []
    for run in shown:
        line = frame[frame["run"] == run].sort_values(["step", "rank"])["loss"]
        first_last.append(f"{shorten(run, 40)} {line.iloc[0]:.4f} to {line.iloc[-1]:.4f}")
    alt = f"Line chart of the loss over the optimizer steps. {'; '.join(first_last)}."
    more = f" The first {MAX_LINES} of {plural(len(runs), 'run')}." if len(runs) > MAX_LINES else ""
    caption = (
        "Mean loss a token over the whole global batch. Every framework initialises its own weights unless the parity "
        f"section says otherwise, so equal lines are not expected here.{more} Source: reconcile/steps.csv."
    )
    return [Drawn("losses", "losses", "Loss of every step", alt, caption, figure)]
