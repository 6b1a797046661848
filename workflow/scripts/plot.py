"""Draws the figures of a comparison.

By hand: python workflow/scripts/plot.py RESULTS_OF_COMPARISON [RESULTS_OF_PAPER [RESULTS_FROM_GPUS ...]]
"""

from pathlib import Path
from typing import Any

import stage

from train_ledger.plot.make import make_figures


def main(results: str | Path, paper: str | Path | None = None, *evidence: str | Path) -> None:
    """SVG and PDF, and `figures.json` with their captions, into `figures/` of the results folder."""
    make_figures(Path(results), Path(paper) if paper else None, evidence)


def arguments(job: Any) -> tuple[Path | None, ...]:
    """The folders of the comparison, of the one that is only predicted, and of what was measured on GPUs."""
    results = Path(job.output[0]).parent
    paper = results.parent / job.params.paper if job.params.paper else None
    return results, paper, *stage.evidence(job)


if __name__ == "__main__":
    stage.run(main, globals().get("snakemake"), arguments, lambda job: (job.output[0], list(job.output)))
