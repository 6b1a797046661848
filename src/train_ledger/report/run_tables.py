"""What a run is, as tables: the followed weight, process groups, schedule, losses, parity."""

from __future__ import annotations

from typing import Any

from train_ledger.plot.data import Results, run_steps
from train_ledger.plot.grids import partitions
from train_ledger.plot.lifeline import lanes, words
from train_ledger.plot.placement import master_words
from train_ledger.plot.schedule import pipelines
from train_ledger.plot.text import shorten
from train_ledger.spec.groups import rank_ranges

from .tables import Column, Table

MAX_GROUPS_SHOWN = 16


def lifeline_table(results: Results) -> Table:
    """A row a run: the states of the followed weight in order."""
    rows = [
        {
            "run": lane.run,
            "rank": lane.rank,
            "weight": lane.weight,
            "matrix_numel": lane.matrix_numel,
            "full_numel": lane.full_numel,
            "micro_batches": lane.micro_batches,
            "states": words(lane),
            "master": master_words(results, lane.run),
        }
        for lane in lanes(results)
    ]
    return Table(
        "lifelines",
        "States of one weight over the recorded step, in order; repetitions are told once.",
        [
            Column("run", "run", "code"),
            Column("rank", "rank", "count"),
            Column("weight", "weight", "code"),
            Column("matrix_numel", "elements of the matrix", "count"),
            Column("full_numel", "of this rank's tensor-parallel slice", "count"),
            Column("micro_batches", "micro-batches", "count"),
            Column("states", "states in order"),
            Column("master", "fp32 master on each rank"),
        ],
        rows,
    )


def group_table(results: Results) -> Table:
    """A row a run and split of its ranks."""
    rows = []
    for run in results.run_names:
        groups = next((r["groups"] for r in results.runs if r["run"] == run), None)
        groups = results.predictions[run]["groups"] if groups is None else groups
        checked = results.of("layout", run)
        for names, found in partitions(groups):
            of = checked[(checked["kind"] == "group") & checked["name"].isin(names)]
            bad = of[of["verdict"] != "exact"]
            members = " ".join(f"[{_members(g)}]" for g in found[:MAX_GROUPS_SHOWN])
            rows.append(
                {
                    "run": run,
                    "names": " = ".join(names),
                    "groups": len(found),
                    "size": max(len(g) for g in found),
                    "members": members + (" …" if len(found) > MAX_GROUPS_SHOWN else ""),
                    "verdict": "" if of.empty else "exact" if bad.empty else "differs",
                }
            )
    return Table(
        "groups",
        "Process groups of two or more ranks; names that split the ranks alike share a row.",
        [
            Column("run", "run", "code"),
            Column("names", "names", "code"),
            Column("groups", "groups", "count"),
            Column("size", "ranks each", "count"),
            Column("members", "members"),
            Column("verdict", "as the ranks say", "verdict"),
        ],
        rows,
    )


def _members(ranks: tuple[int, ...]) -> str:
    ascending = list(ranks) == list(range(ranks[0], ranks[-1] + 1)) and len(ranks) > 2
    return f"{ranks[0]}-{ranks[-1]}" if ascending else shorten(", ".join(str(r) for r in ranks), 60)


def schedule_table(results: Results) -> Table:
    """A row a run with a pipeline."""
    rows = []
    for p in pipelines(results):
        agree = [s for s in p.measured if p.agrees(s)]
        other = sorted(set(p.measured) - set(agree))
        seen = "not measured"
        if p.measured:
            seen = f"as predicted on stage {rank_ranges(agree)}" if agree else ""
            seen += ("; " if seen and other else "") + (f"another order on stage {rank_ranges(other)}" if other else "")
        rows.append(
            {
                "run": p.run,
                "stages": p.stages,
                "chunks": p.chunks,
                "micro_batches": p.micro_batches,
                "bubble": 100 * p.bubble_share,
                "order": seen,
                "verdict": "" if not p.measured else "differs" if other else "exact",
            }
        )
    return Table(
        "schedule",
        "1F1B pipelines (v > 1: interleaved): predicted order of forward and backward work, and the measured one.",
        [
            Column("run", "run", "code"),
            Column("stages", "stages p", "count"),
            Column("chunks", "model chunks of a stage v", "count"),
            Column("micro_batches", "micro-batches m", "count"),
            Column("bubble", "bubble (p-1)/(vm+p-1) [%]", "percent"),
            Column("order", "measured order"),
            Column("verdict", "verdict", "verdict"),
        ],
        rows,
    )


def loss_table(results: Results) -> Table:
    """A row a run and step: loss and gradient norm of the whole run; of many steps, the first and the last three."""
    rows: list[dict[str, Any]] = []
    for run in results.run_names:
        steps = [s for s in run_steps(results, run) if s.loss is not None]
        shown = steps if len(steps) <= 10 else [*steps[:3], *steps[-3:]]
        rows += [{"run": run, "step": s.step, "loss": s.loss, "grad_norm": s.grad_norm} for s in shown]
    return Table(
        "losses",
        "Mean loss a token over the global batch, and the gradient norm before clipping.",
        [
            Column("run", "run", "code"),
            Column("step", "step", "count"),
            Column("loss", "loss [nat a token]", "loss"),
            Column("grad_norm", "gradient norm", "loss"),
        ],
        rows,
    )


def parity_table(results: Results) -> Table:
    """A row a pair of runs that trained the same weights on the same tokens; empty where the stage did not run."""
    pairs = results.parity.summary["pairs"] if results.parity else []
    rows = []
    for pair in pairs:
        row: dict[str, Any] = {k: pair[k] for k in ("left", "right", "verdict", "why")}
        for quantity in ("loss", "grad_norm", "update"):
            worst = pair[quantity] or {}
            row[quantity], row[f"{quantity}_bound"] = worst.get("worst"), worst.get("bound")
        rows.append(row)
    return Table(
        "parity",
        "Runs that start from the same weights and see the same tokens: the largest relative difference of each pair.",
        [
            Column("left", "run", "code"),
            Column("right", "compared with", "code"),
            Column("loss", "loss", "small"),
            Column("loss_bound", "its bound", "small"),
            Column("grad_norm", "gradient norm", "small"),
            Column("grad_norm_bound", "its bound", "small"),
            Column("update", "update", "small"),
            Column("update_bound", "its bound", "small"),
            Column("verdict", "verdict", "verdict"),
            Column("why", "why"),
        ],
        rows,
    )
