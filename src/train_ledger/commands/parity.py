"""`train-ledger parity`: losses, gradient norms and trained weights of a comparison, each pair, and the reference."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train_ledger.spec.run import Run

from . import WORLDS

HELP = "check that the runs of a comparison trained the same model; ends with 1 if they did not"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("comparison", metavar="COMPARISON", help="name of a file in config/comparisons, or its path")
    parser.add_argument("--launch", required=True, type=Path, metavar="DIR", help="folder with one folder a run")
    parser.add_argument("--reference", required=True, type=Path, metavar="FILE", help="what `reference` wrote")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="canonical weights; made on the fly if not given")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder for the tables and parity.json")
    parser.add_argument("--config", type=Path, default=Path("config"), metavar="DIR", help="folder of comparisons/")
    parser.add_argument("--world", choices=WORLDS, help="the world that was launched in")
    parser.add_argument("--no-weights", action="store_true", help="the runs were launched without --export")
    parser.add_argument("--allow-differences", action="store_true", help="end with 0 although something differs")


def main(args: argparse.Namespace) -> int:
    """Writes the tables, prints the verdict and a line a failure."""
    from train_ledger.spec.config import load_comparison

    runs = load_comparison(args.comparison, args.config, world=args.world).runs
    dirs = {name: args.launch / name for name in runs}
    summary = make(runs, dirs, args.reference, args.weights, args.out, need_weights=not args.no_weights)
    for line in summary["failures"]:
        print(f"differs: {line}", file=sys.stderr)
    print(verdict_line(summary))
    return 1 if summary["failures"] and not args.allow_differences else 0


def make(
    runs: Mapping[str, Run],
    launch_dirs: Mapping[str, Path],
    reference: Path,
    weights: Path | None,
    out_dir: Path,
    *,
    need_weights: bool = True,
) -> dict[str, Any]:
    """Compare and write. Returns the summary as in parity.json.

    Raises:
        ConfigError: no run trains. DataError: a file is missing, truncated, or of something else.
    """
    from train_ledger.parity.bounds import read_reference
    from train_ledger.parity.compare import compare, write
    from train_ledger.parity.difference import tensor_file
    from train_ledger.parity.problem import select

    selection = select(runs)
    problem = selection.problem
    if weights is not None and weights.suffix != ".json":
        initial = tensor_file(weights, problem.model)
    else:
        from train_ledger.launch.weights import generate, open_weights

        read = open_weights(weights, problem.model) if weights else generate(problem.model, problem.seed)
        initial = lambda name: read(name).numpy().reshape(-1)  # noqa: E731
    result = compare(
        runs, selection, launch_dirs, read_reference(reference, problem), initial, need_weights=need_weights
    )
    write(result, out_dir)
    return result.summary


def verdict_line(summary: Mapping[str, Any]) -> str:
    """The stage's finding in one line."""
    names = [r["run"] for r in summary["runs"] if r["compared"] != "no"]
    losses = [p["loss"]["worst"] for p in summary["pairs"] if p["loss"]]
    if summary["failures"]:
        return f"parity: {len(summary['failures'])} differences beyond rounding"
    return (
        f"parity: {len(names)} runs and the reference agree over {summary['steps']} steps; "
        f"losses differ by {max(losses):.1e} at most"
    )
