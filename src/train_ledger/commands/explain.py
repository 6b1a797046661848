"""`train-ledger explain`: answers to questions that people ask, from the numbers of the run in hand."""

from __future__ import annotations

import argparse

from . import add_run_arguments, run_from

HELP = "answer a question from the numbers of a run; `list` names the questions, `all` answers all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("question", metavar="QUESTION", help="a question's name, `list` or `all`")
    add_run_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Prints the answer in one or two lines."""
    import textwrap

    from train_ledger.predict.explain import QUESTIONS, explain

    if args.question == "list":
        for name, answer in QUESTIONS.items():
            print(f"{name:15} {answer.__doc__}")
        return 0
    run = run_from(args)
    names = list(QUESTIONS) if args.question == "all" else [args.question]
    for i, name in enumerate(names):
        text = explain(name, run)
        if len(names) > 1:
            print(("\n" if i else "") + str(QUESTIONS[name].__doc__))
        for line in text.split("\n"):
            print(textwrap.fill(line, 100, break_on_hyphens=False, break_long_words=False))
    return 0
