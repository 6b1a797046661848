"""Builds the page and the tables of a comparison.

By hand: python workflow/scripts/report.py RESULTS_OF_COMPARISON [RESULTS_OF_PAPER [RESULTS_FROM_GPUS ...]]
"""

from pathlib import Path
from typing import Any

import stage

from train_ledger.report.build import build_report
from train_ledger.report.provenance import find_source


def main(results: str | Path, paper: str | Path | None = None, *evidence: str | Path) -> None:
    """`report.html` and `tables/` of the results folder."""
    build_report(Path(results), Path(paper) if paper else None, find_source(), evidence)


def arguments(job: Any) -> tuple[Path | None, ...]:
    """The folders of the comparison, of the one that is only predicted, and of what was measured on GPUs."""
    results = Path(job.output.page).parent
    paper = results.parent / job.params.paper if job.params.paper else None
    return results, paper, *stage.evidence(job)


if __name__ == "__main__":
    stage.run(main, globals().get("snakemake"), arguments, lambda job: (job.output.page, list(job.output)))
