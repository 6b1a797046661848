"""Trains one run in its framework and keeps what its ranks measured; on this machine, or on the hosts of a Slurm job.

By hand: python workflow/scripts/launch.py --run "$(cat resolved-run.json)" --out DIR --log FILE
"""

import argparse
import json
import sys
from pathlib import Path

import stage

from train_ledger.launch import launcher
from train_ledger.spec.errors import LedgerError
from train_ledger.spec.run import Run
from train_ledger.workflow import hosts, slurm, twins


def main() -> int:
    """Exit code 0 when every rank finished, 1 when not, 2 for bad input."""
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
                if already_done:
                    return 0
                if args.nodes > 1 and slurm.nodes_of_this_job() == args.nodes:
                    hosts.launch(run, args.out, args.timeout_s, args.weights, args.export, args.nodes)
                else:
                    launcher.launch(run, args.out, args.timeout_s, args.weights, export=args.export)
        except LedgerError as e:
            print(f"train-ledger launch: {run.name}: {e}", file=sys.stderr, flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
