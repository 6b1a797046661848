"""`train-ledger export`: a run as the framework's own users write it."""

from __future__ import annotations

import argparse

from . import add_run_arguments, run_from

HELP = "write a run as Megatron-LM flags, ds_config.json or a torchtitan Trainer.Config"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_run_arguments(parser)
    parser.add_argument("directory", metavar="DIR", help="folder to write into; it is made if it is not there")


def main(args: argparse.Namespace) -> int:
    """Writes the files and names them."""
    from train_ledger.interop.export import export
    from train_ledger.predict import framework

    run = run_from(args)
    framework(run).check(run)
    for path in export(run, args.directory):
        print(path)
    return 0
