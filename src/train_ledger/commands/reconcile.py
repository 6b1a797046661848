"""`train-ledger reconcile`: joins predictions with measurements and names every residual."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HELP = "join predictions with measurements; ends with 1 if anything is not exact"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--predict", type=Path, nargs="+", required=True, metavar="FILE", help="predict files (JSON)")
    parser.add_argument("--probe", type=Path, nargs="+", required=True, metavar="FILE", help="tidy tables (Parquet)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the CSV files and runs.json")
    parser.add_argument(
        "--partial",
        action="store_true",
        help="only a part of the predicted ranks was measured (world fake); without it a missing rank is refused",
    )
    parser.add_argument(
        "--allow-differences",
        action="store_true",
        help="end with 0 although something differs, so that a report can show it (it will be red there)",
    )


def main(args: argparse.Namespace) -> int:
    """Writes the files, prints the verdict and a line a difference. Strict: any difference ends with 1."""
    from train_ledger.reconcile.compare import difference_lines, reconcile_files, summary_line, write

    result = reconcile_files(args.predict, args.probe, partial=args.partial)
    write(result, args.out)
    lines = difference_lines(result)
    for line in lines:
        print(f"differs: {line}", file=sys.stderr)
    print(summary_line(result))
    return 1 if lines and not args.allow_differences else 0
