"""`train-ledger report`: figures, tables and the page from a results folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HELP = "draw the figures of a results folder and build its page and tables"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("results", type=Path, metavar="RESULTS_DIR", help="results/<comparison>")
    parser.add_argument(
        "--paper", type=Path, metavar="DIR", help="results folder of which only the prediction is shown beside it"
    )
    parser.add_argument(
        "--evidence",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="results folder of reconciled measurements on GPUs to show beside it; may be given more than once",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="end with 1 if a byte, a call or a loss is not explained, there or in a folder of --evidence, or if one "
        "of them holds no measurement; the page is made all the same",
    )


def main(args: argparse.Namespace) -> int:
    """Writes figures/, tables/ and report.html; prints where the page is and the verdict."""
    from train_ledger.plot.data import read_results
    from train_ledger.plot.make import make_figures
    from train_ledger.report.answers import unsettled, verdict
    from train_ledger.report.build import build_report
    from train_ledger.report.provenance import find_source

    make_figures(args.results, args.paper, args.evidence)
    page = build_report(args.results, args.paper, find_source(), args.evidence)
    results = read_results(args.results)
    print(f"{page}: {verdict(results).text}")
    why = unsettled(results, [read_results(folder) for folder in args.evidence]) if args.strict else []
    for line in why:
        print(f"train-ledger report: {line}", file=sys.stderr)
    return int(bool(why))
