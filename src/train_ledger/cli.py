"""`train-ledger`: the command line.

A user's mistake ends in one line on stderr and exit code 2, never in a traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys

from . import __version__, commands
from .spec.errors import LaunchError, LedgerError


def _names() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(commands.__path__))


def parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The argument parser.

    With `chosen`, only that command's module is imported, so that `predict` never waits for others.
    """
    top = argparse.ArgumentParser(prog="train-ledger", description=__doc__.split("\n")[0], allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"train-ledger {__version__}")
    sub = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in _names() if chosen is None else [chosen]:
        module = importlib.import_module(f"{commands.__name__}.{name}")
        part = sub.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False)
        module.add_arguments(part)
        part.set_defaults(main=module.main)
    return top


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit codes: 0 done, 1 a difference or a failed run, 2 bad input."""
    argv = sys.argv[1:] if argv is None else argv
    chosen = argv[0] if argv and argv[0] in _names() else None
    args = parser(chosen).parse_args(argv)
    try:
        return int(args.main(args))
    except LaunchError as e:
        print(f"train-ledger {args.command}: {e}", file=sys.stderr)
        return 1
    except LedgerError as e:
        print(f"train-ledger {args.command}: {e}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
