"""`train-ledger evidence`: keep measurements from GPUs under reference/, and judge the kept ones by today's rules."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from . import WORLDS

HELP = "keep measurements that were taken on GPUs, or reconcile the kept ones with today's prediction"

#: A reference run of the parity stage that was trained on the same GPU, beside the runs of a comparison.
REFERENCE = "reference.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    part = parser.add_subparsers(dest="what", required=True, metavar="{pack,check}")
    keep = part.add_parser("pack", help="keep a finished launch in a set", allow_abbrev=False)
    keep.add_argument("launch", type=Path, metavar="LAUNCH_DIR", help="folder with run.json and the rank files")
    keep.add_argument("--set", type=Path, required=True, metavar="DIR", help="reference/<model>_<hardware>_<date>")
    keep.add_argument("--comparison", required=True, metavar="NAME", help="the comparison that was launched")
    keep.add_argument("--world", choices=WORLDS, help="the world that was launched in")
    keep.add_argument("--config", type=Path, default=Path("config"), metavar="DIR", help="folder of comparisons/")
    judge = part.add_parser("check", help="reconcile what is kept; ends with 1 if anything differs", allow_abbrev=False)
    judge.add_argument(
        "root", type=Path, nargs="?", default=Path("reference"), metavar="DIR", help="default: reference"
    )
    judge.add_argument(
        "--out", type=Path, metavar="DIR", help="keep the results folders there, <set>/<comparison> each"
    )


def main(args: argparse.Namespace) -> int:
    """Exit code 0 when all is kept, or all that is kept is exact."""
    if args.what == "pack":
        return _pack(args)
    with tempfile.TemporaryDirectory(prefix="train-ledger-") as scratch:
        lines, differs = check(args.root, args.out or Path(scratch))
    for line in differs:
        print(f"differs: {line}", file=sys.stderr)
    print("\n".join(lines))
    return int(bool(differs))


def check(root: str | Path, out: Path) -> tuple[list[str], list[str]]:
    """Unpacks every set below `root` into `out`, `<set>/<comparison>` each, and judges it.

    Returns:
        A verdict for each comparison (and for its losses, where a reference was trained), and the differences.

    Raises:
        DataError: nothing is kept there, or a kept file is damaged.
    """
    from train_ledger.commands import parity
    from train_ledger.evidence.store import PROVENANCE, comparisons, find_sets, resolved_runs, unpack
    from train_ledger.reconcile.compare import difference_lines, summary_line
    from train_ledger.spec.errors import DataError

    sets = find_sets(root)
    if not sets:
        raise DataError("holds no set of measurements", file=root)
    lines: list[str] = []
    differs: list[str] = []
    for kept in sets:
        for name in comparisons(kept):
            results = out / kept.name / name
            found = unpack(kept, name, results)
            shutil.copyfile(kept / PROVENANCE, results / PROVENANCE)
            lines.append(f"{kept.name}/{name}: {summary_line(found)}")
            differs += [f"{kept.name}/{name}: {line}" for line in difference_lines(found)]
            reference = kept / name / REFERENCE
            if reference.is_file():
                runs = {run.name: run for run in resolved_runs(kept / name)}
                dirs = {run: results / "launch" / run for run in runs}
                summary = parity.make(runs, dirs, reference, None, results / "parity", need_weights=False)
                lines.append(f"{kept.name}/{name}: {parity.verdict_line(summary)}")
                differs += [f"{kept.name}/{name}: {line}" for line in summary["failures"]]
    return lines, differs


def _pack(args: argparse.Namespace) -> int:
    from train_ledger.evidence.store import PROVENANCE, pack
    from train_ledger.spec.config import load_comparison
    from train_ledger.spec.errors import ConfigError

    runs = load_comparison(args.comparison, args.config, world=args.world).runs
    name = args.launch.resolve().name
    if name not in runs:
        raise ConfigError(f"{name!r} is not a run of {args.comparison}; its runs: {', '.join(runs)}", key="LAUNCH_DIR")
    new = not (args.set / PROVENANCE).is_file()
    print(pack(args.launch, runs[name], args.set, args.comparison))
    if new:
        print(f"{args.set / PROVENANCE} is new: say in it what the machine was and what a reader must know")
    return 0
