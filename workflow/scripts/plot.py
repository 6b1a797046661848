"""Draws the figures of a comparison.

By hand: python workflow/scripts/plot.py RESULTS_OF_COMPARISON [RESULTS_OF_PAPER]
"""

from pathlib import Path

import stage

from train_ledger.plot.make import make_figures


def main(results: str, paper: str | None = None) -> None:
    """SVG and PDF, and `figures.json` with their captions, into `figures/` of the results folder."""
    make_figures(Path(results), Path(paper) if paper else None)


if __name__ == "__main__":
    stage.run(main, globals().get("snakemake"), lambda job: (job.params.results, job.params.paper))
