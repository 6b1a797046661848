"""`train-ledger launch`: train a run in its framework, with the probes around, and keep what every rank measured."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from . import WORLDS, add_run_arguments, run_from

HELP = "run a framework's ranks and record what each keeps and sends"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_run_arguments(parser)
    parser.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="folder for rank<r>.json, rank<r>.log and run.json; an older launch of the same configuration goes",
    )
    parser.add_argument("--world", choices=WORLDS, help="goes before the run's own world")
    parser.add_argument("--timeout", type=float, default=900, metavar="S", help="end after so many seconds (900)")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="start from these canonical weights")
    parser.add_argument("--export", action="store_true", help="also write the trained weights, by canonical name")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="world fake: where a rank computes")
    parser.add_argument("--at-once", type=int, metavar="N", help="world fake: ranks that run at the same time")


def main(args: argparse.Namespace) -> int:
    """Exit code 0 when every rank finished."""
    from train_ledger.launch.launcher import launch, refuse_other

    run = run_from(args)
    if args.world:
        run = replace(run, world=args.world)
    refuse_other(args.out, run)
    launch(run, args.out, args.timeout, args.weights, export=args.export, device=args.device, at_once=args.at_once)
    return 0
