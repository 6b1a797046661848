"""All figures of a results folder, and the list of them that the report and the workflow read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from train_ledger.spec.io import write_json

from . import grids, lifeline, losses, paper, resident, schedule, traffic, within
from .data import Results, read_results, run_size
from .save import Drawn, save

FIGURES_SCHEMA = "train-ledger/figures/1"


def all_figures(
    results: Results, predicted: Results | None = None, evidence: Sequence[Results] = ()
) -> Iterator[Drawn]:
    """Every figure for which there is data, in the order of the page: their numbers follow it."""
    for draw in (resident.draw, traffic.draw, lifeline.draw, grids.draw, schedule.draw):
        yield from draw(results)
    yield from within.draw([results, *evidence])
    trained = max((e for e in evidence if e.parity), key=lambda e: max(map(run_size, e.runs)), default=None)
    if trained is not None:
        yield from losses.draw_parity(trained.parity, [*results.run_names, *trained.run_names], trained.name)
    yield from losses.draw(results)
    yield from losses.draw_parity(results.parity, results.run_names)
    if predicted is not None:
        yield from paper.draw(predicted, results.run_names)


def make_figures(
    results_dir: str | Path, paper_dir: str | Path | None = None, evidence_dirs: Sequence[str | Path] = ()
) -> list[dict[str, Any]]:
    """Draws every figure as SVG and PDF into `<results_dir>/figures`, and lists them in figures.json there.

    Args:
        results_dir: `results/<comparison>`, after predict and, for all but the predicted part, reconcile.
        paper_dir: results folder of the comparison of which only the prediction is shown beside it.
        evidence_dirs: results folders of reconciled measurements on GPUs that are shown beside it.

    Returns:
        What was listed: name, section, title, alt, caption and tips of each figure.

    Raises:
        DataError: a file of a results folder is not as its stage writes it.
    """
    results = read_results(results_dir)
    predicted = read_results(paper_dir) if paper_dir else None
    evidence = [read_results(folder) for folder in evidence_dirs]
    folder = Path(results_dir) / "figures"
    listed = []
    for drawn in all_figures(results, predicted, evidence):
        save(drawn, folder)
        words = ("name", "section", "title", "alt", "caption", "tips")
        listed.append({word: getattr(drawn, word) for word in words} | {"column": drawn.column is not None})
    write_json(folder / "figures.json", {"schema": FIGURES_SCHEMA, "figures": listed})
    return listed
