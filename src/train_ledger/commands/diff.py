"""`train-ledger diff A B`: what changes, container by container and call by call, between two layouts."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from . import print_json

if TYPE_CHECKING:
    from train_ledger.spec.run import Run

HELP = "show what changes between two runs, container by container and call by call"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("before", metavar="A", help="a run file (.yaml), or a resolved run (.json)")
    parser.add_argument("after", metavar="B", nargs="?", help="another; without it A, changed by --set")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="any key of B, dotted")
    parser.add_argument("--model", metavar="M", help="a model for both: a name in config/models, or a .yaml file")
    parser.add_argument(
        "--comparison", metavar="NAME", help="take both as this comparison of config/comparisons has them"
    )
    parser.add_argument("--step", choices=["steady", "first", "log"], default="steady", help="kind of step")
    parser.add_argument(
        "--format", choices=["table", "json"], default="table", help="table for people, JSON for programs"
    )


def main(args: argparse.Namespace) -> int:
    """Prints the difference."""
    from train_ledger.predict.difference import difference, difference_table
    from train_ledger.predict.distinct import predict_distinct
    from train_ledger.spec.errors import ConfigError

    if args.after is None and not args.set:
        raise ConfigError("give a second run, or what changes by --set", key="B")
    runs = [_run(args, args.before, []), _run(args, args.after or args.before, args.set)]
    before, after = (predict_distinct(run, args.step)[0] for run in runs)
    found = difference(before, after)
    names = [args.before, args.after or f"{args.before} with {', '.join(args.set)}"]
    if args.format == "json":
        print_json({"before": names[0], "after": names[1], **found.to_dict()})
    else:
        print(difference_table(found, names))
    return 0


def _run(args: argparse.Namespace, path: str, assignments: list[str]) -> Run:
    from . import run_from

    names = ("seq_length", "megatron_args", "deepspeed", "hf_config", "torchtitan", "world_size")
    blank = dict.fromkeys(names)
    own = {"run": path, "set": assignments, "model": args.model, "comparison": args.comparison, "without": []}
    return run_from(argparse.Namespace(**blank, **own))
