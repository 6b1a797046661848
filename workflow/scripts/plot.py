"""Draws the figures of a comparison.

By hand: python workflow/scripts/plot.py RESULTS_OF_COMPARISON [RESULTS_OF_PAPER]
"""

from pathlib import Path
from typing import Any

import stage

from train_ledger.plot.make import make_figures


def main(results: str | Path, paper: str | Path | None = None) -> None:
    """SVG and PDF, and `figures.json` with their captions, into `figures/` of the results folder."""
    make_figures(Path(results), Path(paper) if paper else None)


def arguments(job: Any) -> tuple[Path, Path | None]:
    """The folders of the comparison and of the one that is only predicted."""
    results = Path(job.output[0]).parent
    return results, results.parent / job.params.paper if job.params.paper else None


if __name__ == "__main__":
    stage.run(main, globals().get("snakemake"), arguments)
