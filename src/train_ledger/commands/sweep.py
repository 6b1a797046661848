"""`train-ledger sweep`: which layouts of a model fit a device, first order, and which of those send least."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from . import print_json

if TYPE_CHECKING:
    from train_ledger.predict.sweep import Swept

HELP = "rank the layouts of a model on N ranks by whether they fit a device and by what they send (first order)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--model", metavar="M", required=True, help="a model's name in config/models, or a .yaml file")
    parser.add_argument("--world-size", metavar="N", required=True, action="append", help="ranks; may be repeated")
    parser.add_argument("--global-batch", metavar="B", required=True, help="sequences of one optimizer step")
    parser.add_argument("--seq-length", metavar="S", help="tokens of a sequence (default: the model's)")
    parser.add_argument("--device", metavar="D", default="h100", help="h200, h100, a100, b200, … (default h100)")
    parser.add_argument(
        "--keep-free-gb", metavar="GB", default="20", help="GB (10^9) left for activations and buffers (default 20)"
    )
    parser.add_argument(
        "--precision",
        metavar="P",
        default="bf16-fp32-grad",
        help="bf16-fp32-grad (Megatron), bf16 (DeepSpeed), fp32-mixed (torchtitan) or fp32",
    )
    parser.add_argument("--top", metavar="K", default="10", help="rows to show (default 10)")
    parser.add_argument(
        "--format", choices=["table", "json"], default="table", help="table for people, JSON for programs"
    )


def main(args: argparse.Namespace) -> int:
    """Prints the best layouts."""
    from dataclasses import asdict

    from train_ledger.predict.device import find_device
    from train_ledger.predict.first_order import state_bytes
    from train_ledger.predict.sweep import grid, sweep
    from train_ledger.predict.table import columns
    from train_ledger.spec.config import load_model
    from train_ledger.spec.units import fmt

    model = load_model(args.model, "config")
    state = state_bytes(model, args.precision)
    device = find_device(args.device)
    worlds = [_count(n, "--world-size") for n in args.world_size]
    seq = _count(args.seq_length, "--seq-length") if args.seq_length is not None else None
    layouts = grid(model, worlds, _count(args.global_batch, "--global-batch"), seq_length=seq)
    keep_free = 10**9 * _count(args.keep_free_gb, "--keep-free-gb", least=0)
    found = sweep(state, layouts, device.memory_bytes, keep_free_bytes=keep_free)
    top = _count(args.top, "--top")
    if args.format == "json":
        print_json(
            [
                {
                    "world_size": int(layouts.world_size[i]),
                    **asdict(layouts.layout(i)),
                    "state_bytes": int(found.state_bytes[i]),
                    "wire_bytes": int(found.wire_bytes[i]),
                    "fits": bool(found.fits[i]),
                }
                for i in map(int, found.order[:top])
            ]
        )
        return 0
    print(
        f"{model.name}, {state.numel:,} parameters: {len(layouts):,} layouts\n"
        f"{int(found.fits.sum()):,} keep {args.keep_free_gb} GB free of {device.title}, {fmt(device.memory_bytes)}\n"
        "First order: no padding, buffers or activations. Best first: fits, fewest ranks, least sent.\n"
    )
    rows = [["ranks", "TP", "PP", "CP", "shard", "copies", "ZeRO", "micro-batch", "state, GB", "sent, GB", "fits"]]
    for row, sizes in _alike(found, top):
        rows.append([*row[:7], ", ".join(sizes), *row[7:]])
    print(columns(rows, ">" * 10 + "<"))
    return 0


def _alike(found: Swept, top: int) -> list[tuple[tuple[str, ...], list[str]]]:
    """The best `top` rows of the table, best first, each with the sizes of a micro-batch that come out the same."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for i in map(int, found.order):
        lay = found.grid.layout(i)
        degrees = (lay.tensor_parallel, lay.pipeline_parallel, lay.context_parallel, lay.shard, lay.replicate)
        sizes = [f"{n / 1e9:,.3f}" for n in (int(found.state_bytes[i]), int(found.wire_bytes[i]))]
        fits = "yes" if found.fits[i] else "no"
        row = (f"{found.grid.world_size[i]:,}", *map(str, degrees), str(lay.zero_stage), *sizes, fits)
        if row not in rows and len(rows) == top:
            break
        rows.setdefault(row, []).append(str(lay.micro_batch))
    return list(rows.items())


def _count(text: str, option: str, least: int = 1) -> int:
    from train_ledger.spec.errors import ConfigError

    if not (text.isascii() and text.isdigit() and len(text) <= 12 and int(text) >= least):
        raise ConfigError(f"{text[:50]!r} is not a whole number of {least} or more", key=option)
    return int(text)
