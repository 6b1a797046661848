"""`train-ledger`: the command line.

A user's mistake ends in one line on stderr and exit code 2, never in a traceback.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import pkgutil
import sys
from types import ModuleType
from typing import NoReturn

from . import __version__, commands
from .spec.errors import LaunchError, LedgerError

ABOUT = """
Predict, measure and reconcile, to the byte and to the call, what Megatron Core, DeepSpeed and torchtitan keep on each
GPU and send. `predict`, `groups`, `diff`, `explain` and `sweep` run nothing; `check` holds a prediction against the
framework itself.
"""


class Parser(argparse.ArgumentParser):
    """A parser whose error is one line; the usage, of up to ten, is what `--help` is for. Sub-parsers are such too."""

    def error(self, message: str) -> NoReturn:
        """One line, exit code 2."""
        said = " ".join(message.split())
        self.exit(2, f"{self.prog}: {said.removeprefix('argument ')} (see {self.prog} --help)\n")


def _names() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(commands.__path__))


def parser() -> argparse.ArgumentParser:
    """The argument parser with every command, for the help and for a command that there is not."""
    top = Parser(prog="train-ledger", description=ABOUT, allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"train-ledger {__version__}")
    sub = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in _names():
        module = _module(name)
        _fill(sub.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False), module)
    return top


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{commands.__name__}.{name}")


def _fill(part: argparse.ArgumentParser, module: ModuleType) -> None:
    module.add_arguments(part)
    part.set_defaults(main=module.main)


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments of a command line.

    Only the command's own module is imported, so that `predict` never waits for others. Options may stand between
    positional arguments (`export RUN.yaml --model M DIR`).
    """
    if not argv or argv[0] not in _names():
        return parser().parse_args(argv)
    module = _module(argv[0])
    part = Parser(prog=f"train-ledger {argv[0]}", description=module.HELP, allow_abbrev=False)
    _fill(part, module)
    part.set_defaults(command=argv[0])
    _refuse_empty(argv, part)
    # argparse cannot mix options into the arguments of a command that has commands of its own (evidence).
    nested = any(action.nargs == argparse.PARSER for action in part._actions)
    return part.parse_args(argv[1:]) if nested else part.parse_intermixed_args(argv[1:])


def _refuse_empty(argv: list[str], parser: argparse.ArgumentParser) -> None:
    """An empty argument is a shell variable that was not set; as a path it would mean the working folder."""
    for i, word in enumerate(argv):
        option, equals, value = word.partition("=")
        if not word or (option.startswith("--") and equals and not value):
            before = argv[i - 1] if not word and argv[i - 1].startswith("--") else option
            parser.error(f"{before}: is empty" if before else "an argument is empty")


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit codes: 0 done, 1 a difference or a failed run, 2 bad input."""
    argv = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that knows no "…" gets a "?", not an error
        sys.stdout.reconfigure(errors="replace")
    args = parse(argv)
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
    except OSError as e:
        # An output that cannot be written, mostly; `filename2` is the file that a finished one was to replace.
        where = e.filename2 or e.filename
        print(f"train-ledger {args.command}: {f'{where}: ' if where else ''}{e.strerror or e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"train-ledger {args.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
