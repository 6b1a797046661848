"""`train-ledger status`: what of the comparison is done, running, waiting or failed, and why."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "show what of a comparison is done, running, waiting or failed, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--comparison", metavar="NAME", help="by default the one that config/config.yaml names")


def main(args: argparse.Namespace) -> int:
    """Prints a line a launch, failed stages, and the verdict. Exit code 1 when something failed or differs.

    Where Slurm does not answer, the states are those that the files here tell, and where a job could be behind one of
    them a line says so.
    """
    from train_ledger.spec.io import read_yaml
    from train_ledger.workflow.envs import identity
    from train_ledger.workflow.plan import load_plan
    from train_ledger.workflow.state import known_jobs, states, table

    config = read_yaml(Path("config") / "config.yaml")
    if args.comparison:
        config["comparison"] = args.comparison
    plan = load_plan(config)
    environments = {run.framework: identity(Path("envs") / f"{run.framework}.yaml") for run in plan.runs.values()}
    jobs, silence = known_jobs()
    found = states(plan, environments, jobs)
    print(table(found))
    if silence and any(s.state in ("not started", "failed", "out of date") for s in found):  # a job may be behind it
        print(f"Slurm does not answer: {silence}")
    return int(any(s.state in ("failed", "not reconciled", "damaged") for s in found))
