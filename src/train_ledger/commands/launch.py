"""`train-ledger launch`: train a run in its framework, with the probes around, and keep what every rank measured."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "run a framework's ranks and record what each keeps and sends"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("run", metavar="RUN", help="a run file (.yaml), or a resolved run (.json)")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for rank<r>.json, rank<r>.log and run.json")
    parser.add_argument(
        "--world", choices=["cpu", "fake", "shared", "nccl"], help="how ranks start; goes before the run's own"
    )
    parser.add_argument(
        "--timeout", type=float, default=900, metavar="S", help="end and fail after so many seconds (default 900)"
    )
    parser.add_argument("--comparison", metavar="NAME", help="take the run as this comparison has it")
    parser.add_argument("--weights", metavar="PATH", help="start from these canonical weights")
    parser.add_argument("--export", action="store_true", help="also write the trained weights, by canonical name")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="world fake only: where that rank computes"
    )


def main(args: argparse.Namespace) -> int:
    """Exit code 0 when every rank finished."""
    from train_ledger.launch.arguments import find_run
    from train_ledger.launch.launcher import launch

    run = find_run(args.run, comparison=args.comparison, world=args.world)
    weights = Path(args.weights) if args.weights else None
    launch(run, args.out, args.timeout, weights, export=args.export, device=args.device)
    return 0
