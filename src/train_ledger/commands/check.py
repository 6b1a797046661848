"""`train-ledger check`: predict a run, run it in its framework, and hold the one against the other."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import add_run_arguments, is_rank, run_from

if TYPE_CHECKING:
    from train_ledger.reconcile.compare import Reconciliation
    from train_ledger.spec.run import Run

HELP = "predict, run and reconcile ranks of a run; ends with 1 if a byte or a call differs"

#: The frameworks' first step is unlike the others (DeepSpeed records, torchtitan resets); the third is a steady one.
STEPS = 3
MAX_STEPS = 10**8  # as a run file's
#: From this many ranks on, a rank that is exact is one line and no table.
TABLES_UP_TO_RANKS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_run_arguments(parser)
    parser.add_argument(
        "--rank",
        metavar="R",
        action="append",
        help="this rank (may be repeated), `all`, or `distinct`: one of each kind (default)",
    )
    parser.add_argument(
        "--world",
        choices=["fake", "cpu", "shared", "nccl"],
        default="fake",
        help="fake (default): each rank alone, without its peers; or all ranks together",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="world fake: where a rank computes")
    parser.add_argument("--steps", type=int, metavar="N", help=f"train N steps (default {STEPS})")
    parser.add_argument("--step", choices=["steady", "first"], default="steady", help="kind of step that is compared")
    parser.add_argument("--timeout", type=float, default=900, metavar="S", help="end after so many seconds")
    parser.add_argument("--out", metavar="DIR", help="keep what was measured there")


def main(args: argparse.Namespace) -> int:
    """Prints a table and a verdict; 1 on any residual or difference."""
    from train_ledger.reconcile.compare import difference_lines, summary_line
    from train_ledger.spec.errors import ConfigError

    run = run_from(args)
    if args.steps is not None and not 1 <= args.steps <= MAX_STEPS:
        raise ConfigError(f"{args.steps} is not between 1 and {MAX_STEPS:,}", key="--steps")
    if args.device == "cuda" and args.world != "fake":
        raise ConfigError("goes with world fake only; the other worlds know their device", key="--device")
    ranks = chosen_ranks(run, args.rank or ["distinct"])
    with tempfile.TemporaryDirectory(prefix="train-ledger-") as scratch:
        result = check_run(
            run,
            ranks,
            Path(args.out or scratch),
            world=args.world,
            device=args.device,
            steps=args.steps or STEPS,
            step=args.step,
            timeout_s=args.timeout,
        )
    print(tables(result, ranks))
    lines = difference_lines(result)
    for line in lines:
        print(f"differs: {line}", file=sys.stderr)
    print(summary_line(result))
    return 1 if lines else 0


def chosen_ranks(run: Run, asked: Sequence[str]) -> list[int]:
    """Ranks from `all`, `distinct` or numbers.

    Raises:
        ConfigError: something else, or a rank outside of the world.
    """
    from train_ledger.predict.distinct import rank_classes
    from train_ledger.spec.errors import ConfigError

    if list(asked) == ["distinct"]:
        return [ranks[0] for ranks in rank_classes(run)]
    if list(asked) == ["all"]:
        return list(range(run.world_size))
    for word in asked:
        if not is_rank(word, run.world_size):
            raise ConfigError(
                f"{word[:50]!r} is not a rank of a world of {run.world_size}, `all` or `distinct`", key="--rank"
            )
    return sorted({int(word) for word in asked})


def check_run(
    run: Run,
    ranks: Sequence[int],
    out_dir: Path,
    *,
    world: str = "fake",
    device: str = "cpu",
    steps: int = STEPS,
    step: str = "steady",
    timeout_s: float = 900,
) -> Reconciliation:
    """Predicts, launches and reconciles.

    Args:
        run: resolved; its world, steps and recorded step are replaced.
        ranks: the ranks that are compared; in world `fake` no others run.
        out_dir: for the files of the launch.
        world, device, timeout_s: as `launch` takes them.
        steps: optimizer steps. The last is compared, or step 1 when `step` is `first`.

    Raises:
        ConfigError: the framework or the prediction refuses the run.
        LaunchError: a rank did not finish.
        DataError: a rank that was asked for left no measurement.
    """
    from train_ledger.launch.launcher import launch
    from train_ledger.predict import predict
    from train_ledger.reconcile.compare import Reconciliation, check_ranks
    from train_ledger.reconcile.core import reconcile_rank
    from train_ledger.reconcile.facts import run_facts
    from train_ledger.reconcile.layout import reconcile_layout
    from train_ledger.spec.launched import read_launch

    recorded = 1 if step == "first" else steps
    run = replace(run, world=world, steps=steps, probe=replace(run.probe, collective_steps=(recorded,)))
    # A prediction knows from the world where tensors are; the fake world has a GPU only when it is given one.
    predicted_run = replace(run, world="nccl") if device == "cuda" else run
    prediction = {**predict(predicted_run, ranks, step).to_dict(), "config_sha256": run.sha256()}
    launch(run, out_dir, timeout_s, ranks=ranks if world == "fake" else None, device=device)
    measured = [m for m in read_launch(out_dir).ranks if m["rank"] in ranks]
    check_ranks(run.name, ranks, (m["rank"] for m in measured))
    out = Reconciliation([], [], [], [run_facts(prediction, measured)], {})
    for rank in measured:
        resident, collectives = reconcile_rank(prediction, rank)
        out.resident.extend(resident)
        out.collectives.extend(collectives)
        out.layout.extend(reconcile_layout(prediction, rank))
    return out


def tables(result: Reconciliation, ranks: Sequence[int]) -> str:
    """For each rank its containers and calls, predicted and measured; one line a rank when there are many."""
    from train_ledger.reconcile.rows import CLEAN

    lines = []
    for rank in ranks:
        resident = [r for r in result.resident if r.rank == rank]
        calls = [r for r in result.collectives if r.rank == rank]
        clean = all(r.verdict in CLEAN for r in (*resident, *calls, *(r for r in result.layout if r.rank == rank)))
        total = sum(r.measured_bytes for r in resident)
        count = sum(r.measured_count for r in calls)
        verdict = "exact" if clean else "DIFFERS"
        lines.append(f"rank {rank}: {total:,} B resident, {count:,} calls: {verdict}")
        if clean and len(ranks) > TABLES_UP_TO_RANKS:
            continue
        row = "  {:<34}{:>18}{:>18}{:>14}  {}"
        lines.append(row.format("container", "predicted B", "measured B", "residual B", "verdict"))
        for r in resident:
            name = f"{r.container} {r.dtype}"
            figures = (f"{n:,}" for n in (r.predicted_bytes, r.measured_bytes, r.residual_bytes))
            lines.append(row.format(name, *figures, r.verdict))
        row = "  {:<34}{:>9}{:>9}{:>18}{:>14}  {}"
        lines.append(row.format("call", "predicted", "measured", "predicted B", "residual B", "verdict"))
        for c in calls:
            name = f"{c.op} {c.dtype} on {c.group}"
            figures = (f"{n:,}" for n in (c.predicted_count, c.measured_count, c.predicted_bytes, c.residual_bytes))
            lines.append(row.format(name, *figures, c.verdict))
    return "\n".join(lines)
