"""`train-ledger predict`: what each rank keeps and sends, to the byte and to the call, without running anything."""

from __future__ import annotations

import argparse
from dataclasses import replace

from . import add_run_arguments, is_rank, print_json, run_from

HELP = "predict what each rank keeps resident and what it sends in a step"

#: Above this many ranks, JSON lists one rank of each kind unless ranks are asked for.
ALL_RANKS_UP_TO = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_run_arguments(parser)
    parser.add_argument(
        "--rank",
        metavar="R",
        action="append",
        help="this rank (may be repeated), `all`, or `distinct`: one of each kind; default: distinct, in JSON all",
    )
    parser.add_argument("--step", choices=["steady", "first", "log"], default="steady", help="kind of step")
    parser.add_argument(
        "--format", choices=["table", "json"], default="table", help="table for people, JSON for programs"
    )
    parser.add_argument(
        "--device", metavar="D", help="also what this GPU's allocator will read: h200, h100, a100, b200, …"
    )


def main(args: argparse.Namespace) -> int:
    """Prints the prediction."""
    from train_ledger.predict import predict
    from train_ledger.predict.distinct import predict_distinct, ranges
    from train_ledger.spec.errors import ConfigError

    run = run_from(args)
    asked = args.rank or (["all"] if args.format == "json" and run.world_size <= ALL_RANKS_UP_TO else ["distinct"])
    if asked == ["distinct"]:
        prediction, classes = predict_distinct(run, args.step)
    else:
        ranks = None
        if asked != ["all"]:
            for word in asked:
                if not is_rank(word, run.world_size):
                    what = f"{word[:50]!r} is not a rank of a world of {run.world_size}, `all` or `distinct`"
                    raise ConfigError(what, key="--rank")
            ranks = [int(r) for r in dict.fromkeys(asked)]
        prediction = predict(run, ranks, args.step)
        classes = [(ledger.rank,) for ledger in prediction.ranks]
    if args.device:
        from train_ledger.predict.device import find_device, on_device

        find_device(args.device)
        gpu = replace(run, world="nccl")  # a world without GPUs keeps its containers on the host
        ledgers = predict(gpu, [ledger.rank for ledger in prediction.ranks], args.step).ranks
        readings = [on_device(gpu, ledger, args.device) for ledger in ledgers]
    if args.format == "json":
        out = prediction.to_dict()
        if asked == ["distinct"]:
            out["rank_classes"] = [{"rank": r[0], "count": len(r), "ranks": ranges(r)} for r in classes]
        if args.device:
            out["device"] = {"name": args.device, "ranks": [reading.to_dict() for reading in readings]}
        print_json(out)
        return 0
    from train_ledger.predict.table import table

    print(table(run, prediction, classes))
    if args.device:
        from train_ledger.predict.device import device_table

        print(f"\n{device_table(readings, classes)}")
    return 0
