"""`train-ledger probe`: one tidy table from the raw files of a launch."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "check the raw files of a launch and write them as one tidy table"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("launch_dir", type=Path, metavar="LAUNCH_DIR", help="folder with run.json and the rank files")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the Parquet file to write")


def main(args: argparse.Namespace) -> int:
    """Writes the table; a file that is missing, truncated or of another run ends in a DataError."""
    from train_ledger.reconcile.tidy import write_tidy
    from train_ledger.spec.launched import read_launch

    write_tidy(read_launch(args.launch_dir), args.out)
    return 0
