"""`train-ledger weights`: the canonical initial weights of a model and a seed, as one safetensors file."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "write the initial weights that every framework starts from"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--model", required=True, metavar="M", help="name of a file in config/models, or a path to one")
    parser.add_argument("--seed", type=int, default=1234, metavar="S", help="seed of the values (default 1234)")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the file; FILE.json gets its sha256")
    parser.add_argument("--config", type=Path, default=Path("config"), metavar="DIR", help="folder of models/")
    parser.add_argument(
        "--record-only",
        action="store_true",
        help="write FILE.json only: given as --weights to launch, each rank makes the same values by itself",
    )


def main(args: argparse.Namespace) -> int:
    """Writes the file and prints its hash."""
    from train_ledger.launch.weights import write_initial, write_record
    from train_ledger.spec.config import load_model
    from train_ledger.spec.errors import ConfigError

    if not 0 <= args.seed < 2**32:
        raise ConfigError(f"{args.seed} is not between 0 and {2**32 - 1}, as a run's seed is", key="--seed")
    model = load_model(args.model, args.config)
    if args.record_only:
        print(write_record(model, args.seed, args.out))
        return 0
    record = write_initial(model, args.seed, args.out)
    print(f"{record['sha256']}  {args.out}")
    return 0
