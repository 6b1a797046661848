"""Trains one run in its framework and keeps what its ranks measured; on this machine, or on the hosts of a Slurm job.

By hand: python workflow/scripts/launch.py --run "$(cat resolved-run.json)" --out DIR --log FILE
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import stage

from train_ledger.spec.errors import LedgerError
from train_ledger.spec.run import Run
from train_ledger.workflow import slurm, twins


def command(job: Any) -> list[str]:
    """The command line for a Snakemake job."""
    words = ["--run", job.params.run, "--env", job.params.env, "--timeout-s", str(job.resources.timeout_s)]
    words += ["--out", str(Path(job.output[0]).parent), "--log", job.log[0], "--nodes", str(job.resources.nodes)]
    if job.input.get("weights"):
        words += ["--weights", str(job.input.weights), "--export"]
    return [sys.executable, __file__, *words]


def main() -> int:
    """Exit code 0 when every rank finished, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", required=True, help="a resolved run (Run.to_dict) as JSON text")
    parser.add_argument("--out", required=True, type=Path, help="folder for rank<r>.json and run.json")
    parser.add_argument("--log", required=True, type=Path, help="what is said here is kept there")
    parser.add_argument("--env", default="", help="identity of the environment that this runs in")
    parser.add_argument("--timeout-s", type=float, default=900)
    parser.add_argument("--nodes", type=int, default=1, help="hosts of the Slurm job")
    parser.add_argument("--weights", type=Path, help="canonical weights to start from")
    parser.add_argument("--export", action="store_true", help="also write the trained weights")
    args = parser.parse_args()
    run = Run.from_dict(json.loads(args.run))
    with stage.kept(args.log):
        try:
            with twins.alone(args.out, run.sha256(), args.env) as already_done:
                if not already_done:
                    train(run, args)
        except LedgerError as e:
            print(f"train-ledger launch: {run.name}: {e}", file=sys.stderr, flush=True)
            return 1
        except KeyboardInterrupt:  # Ctrl-C, or SIGTERM from Snakemake or Slurm: the ranks are ended by now
            print(f"train-ledger launch: {run.name}: ended by a signal", file=sys.stderr, flush=True)
            return 130
    return 0


def train(run: Run, args: argparse.Namespace) -> None:
    """Across the hosts of the Slurm job that this is in, when the run needs several; else on this machine."""
    if args.nodes > 1 and slurm.nodes_of_this_job() == args.nodes:
        from train_ledger.workflow import hosts

        hosts.launch(run, args.out, args.timeout_s, args.weights, args.export, args.nodes)
    else:
        from train_ledger.launch.launcher import launch

        launch(run, args.out, args.timeout_s, args.weights, export=args.export)


if __name__ == "__main__":
    snakemake_job = globals().get("snakemake")
    if snakemake_job:
        # A process of its own: Snakemake puts its own packages on this one's path, which the framework must not see.
        words = command(snakemake_job)
        os.execv(words[0], words)
    sys.exit(main())
