"""Subcommands of `train-ledger`, one module each: `HELP`, `add_arguments(parser)`, `main(args) -> exit code`."""
