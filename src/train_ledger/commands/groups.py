"""`train-ledger groups`: which ranks talk to each other."""

from __future__ import annotations

import argparse

from . import add_run_arguments, is_rank, print_json, run_from

HELP = "list the process groups that the framework makes, with their ranks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_run_arguments(parser)
    parser.add_argument("--rank", metavar="R", help="only the groups that this rank is in")
    parser.add_argument(
        "--format", choices=["table", "json"], default="table", help="table for people, JSON for programs"
    )


def main(args: argparse.Namespace) -> int:
    """Prints the groups."""
    from train_ledger.predict import framework
    from train_ledger.spec.errors import ConfigError

    run = run_from(args)
    rank = None
    if args.rank is not None:
        if not is_rank(args.rank, run.world_size):
            raise ConfigError(f"{args.rank[:50]!r} is not a rank of a world of {run.world_size}", key="--rank")
        rank = int(args.rank)
    module = framework(run)
    module.check(run)
    groups = [g for g in module.groups(run) if rank is None or rank in g.ranks]
    if args.format == "json":
        listed = [{"name": g.name, "ranks": list(g.ranks)} for g in groups]
        print_json({"run": run.name, "framework": run.framework, "world_size": run.world_size, "groups": listed})
        return 0
    from train_ledger.predict.table import groups_table, layout_lines

    print(f"{layout_lines(run)}\n\n{groups_table(groups)}")
    return 0
