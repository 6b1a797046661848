"""Builds the page and the tables of a comparison.

By hand: python workflow/scripts/report.py RESULTS_OF_COMPARISON [RESULTS_OF_PAPER]
"""

from pathlib import Path
from typing import Any

import stage

from train_ledger.report.build import build_report
from train_ledger.report.provenance import find_source


def main(results: str | Path, paper: str | Path | None = None) -> None:
    """`report.html` and `tables/` of the results folder."""
    build_report(Path(results), Path(paper) if paper else None, find_source())


def arguments(job: Any) -> tuple[Path, Path | None]:
    """The folders of the comparison and of the one that is only predicted."""
    results = Path(job.output.page).parent
    return results, results.parent / job.params.paper if job.params.paper else None


if __name__ == "__main__":
    stage.run(main, globals().get("snakemake"), arguments)
