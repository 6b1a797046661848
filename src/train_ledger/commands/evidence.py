"""`train-ledger evidence`: keep measurements from GPUs under reference/, and judge the kept ones by today's rules."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

HELP = "keep measurements that were taken on GPUs, or reconcile the kept ones with today's prediction"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    part = parser.add_subparsers(dest="what", required=True, metavar="{pack,check}")
    keep = part.add_parser("pack", help="keep a finished launch in a set", allow_abbrev=False)
    keep.add_argument("launch", type=Path, metavar="LAUNCH_DIR", help="folder with run.json and the rank files")
    keep.add_argument("--set", type=Path, required=True, metavar="DIR", help="reference/<model>_<hardware>_<date>")
    keep.add_argument("--comparison", required=True, metavar="NAME", help="the comparison that was launched")
    keep.add_argument("--config", type=Path, default=Path("config"), metavar="DIR", help="folder of comparisons/")
    check = part.add_parser("check", help="reconcile what is kept; ends with 1 if anything differs", allow_abbrev=False)
    check.add_argument("sets", type=Path, nargs="*", metavar="SET", help="sets (default: all below reference/)")
    check.add_argument(
        "--out", type=Path, metavar="DIR", help="keep the results folders there, <set>/<comparison> each"
    )


def main(args: argparse.Namespace) -> int:
    """Exit code 0 when all is kept, or all that is kept is exact."""
    if args.what == "pack":
        return _pack(args)
    from train_ledger.evidence.store import comparisons, find_sets, unpack
    from train_ledger.reconcile.compare import difference_lines, summary_line
    from train_ledger.spec.errors import DataError

    sets = args.sets or find_sets("reference")
    if not sets:
        raise DataError("holds no set of measurements", file="reference")
    differs = False
    with tempfile.TemporaryDirectory(prefix="train-ledger-") as scratch:
        for kept in sets:
            for name in comparisons(kept):
                found = unpack(kept, name, (args.out or Path(scratch)) / kept.name / name)
                lines = difference_lines(found)
                differs = differs or bool(lines)
                for line in lines:
                    print(f"differs: {kept.name}/{name}: {line}", file=sys.stderr)
                print(f"{kept.name}/{name}: {summary_line(found)}")
    return int(differs)


def _pack(args: argparse.Namespace) -> int:
    from train_ledger.evidence.store import pack
    from train_ledger.spec.config import load_comparison
    from train_ledger.spec.errors import ConfigError

    runs = load_comparison(args.comparison, args.config).runs
    name = args.launch.resolve().name
    if name not in runs:
        raise ConfigError(f"{name!r} is not a run of {args.comparison}; its runs: {', '.join(runs)}", key="LAUNCH_DIR")
    print(pack(args.launch, runs[name], args.set, args.comparison))
    return 0
