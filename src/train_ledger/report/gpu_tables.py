"""What only a GPU can tell: the allocator explained to the byte, the peak and its owners, NCCL's own counts, time."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import pandas as pd

from train_ledger.plot.data import Results
from train_ledger.plot.schedule import config_of
from train_ledger.reconcile.rows import CLEAN
from train_ledger.spec.groups import rank_ranges
from train_ledger.spec.hardware import datasheet_rate, flop_per_token

from .tables import Column, Table

#: Owner of what a rank file does not tell apart (probe/peak.py).
REST = "the rest"
OUTSIDE = ("library_workspace", "block_rounding")
WARM_UP_STEPS = 2


def evidence_table(sources: Sequence[Results]) -> Table:
    """A row a run and class of ranks that were measured on CUDA: what the allocator read, and what explains it."""
    rows: list[dict[str, Any]] = []
    for results in sources:
        for run in results.run_names:
            rows += _allocator_rows(results, run)
    devices = ", ".join(dict.fromkeys(row["gpu"] for row in rows))
    return Table(
        "evidence",
        f"On real GPUs ({devices}): bytes that PyTorch's allocator counts at a step boundary, and what explains them.",
        [
            Column("where", "results", "code"),
            Column("model", "model", "code"),
            Column("run", "run", "code"),
            Column("world", "world", "code"),
            Column("gpu", "GPU"),
            Column("ranks", "ranks"),
            Column("requested_bytes", "requested [B]", "bytes"),
            Column("container_bytes", "containers, predicted [B]", "bytes"),
            Column("library_bytes", "library workspaces [B]", "bytes"),
            Column("left_bytes", "left over [B]", "bytes"),
            Column("allocated_bytes", "allocated [B]", "bytes"),
            Column("peak_bytes", "peak of a step [B]", "bytes"),
            Column("verdict", "verdict", "verdict"),
        ],
        rows,
    )


def _allocator_rows(results: Results, run: str) -> list[dict[str, Any]]:
    steps = results.of("steps", run).dropna(subset=["requested_bytes"])
    if steps.empty:
        return []
    found = next((r for r in results.runs if r["run"] == run), {})
    devices = sorted({str(d.get("name", d.get("type", ""))) for d in found.get("devices", [])})
    resident, calls = results.of("resident", run), results.of("collectives", run)
    peaks = results.of("peaks", run)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for rank, part in steps.groupby("rank", sort=True):
        last = part.sort_values("step").iloc[-1]
        mine = resident[resident["rank"] == rank]
        library = int(mine[mine["container"] == "library_workspace"]["measured_bytes"].sum())
        bad = [f[~f["verdict"].isin(CLEAN)] for f in (mine, calls[calls["rank"] == rank])]
        # The allocator counts what is on the GPU.
        inside = mine[~mine["container"].isin(OUTSIDE) & ~mine["container"].str.endswith(" on the host")]
        left = int((inside["measured_bytes"] - inside["predicted_bytes"]).sum())
        # The recorded step's own peak: torchtitan resets the allocator's counter when it logs (components/metrics.py).
        peak = peaks[peaks["rank"] == rank]["peak_bytes"].max()
        alike.setdefault(
            (
                int(last["requested_bytes"]),
                int(last["requested_bytes"]) - library - left,
                library,
                left,
                int(last["allocated_bytes"]),
                int(part["peak_bytes"].max() if pd.isna(peak) else peak),
                "exact" if all(f.empty for f in bad) else "differs",
            ),
            [],
        ).append(int(rank))
    keys = ("requested_bytes", "container_bytes", "library_bytes", "left_bytes", "allocated_bytes", "peak_bytes")
    return [
        {
            "where": results.name,
            "model": str(((found.get("config") or {}).get("model") or {}).get("name", "")),
            "run": run,
            "world": str(found.get("world", "")),
            "gpu": ", ".join(devices),
            "ranks": rank_ranges(ranks),
            **dict(zip((*keys, "verdict"), key, strict=True)),
        }
        for key, ranks in alike.items()
    ]


#: Owners of less than this part of a peak, in percent, are told together on the page; the CSV has each.
SMALL_SHARE = 0.1


def peak_table(sources: Sequence[Results]) -> Table:
    """Who owns the most that was allocated within the recorded step, for the lowest rank of each run."""
    rows: list[dict[str, Any]] = []
    for results in sources:
        for run in results.run_names:
            part = results.of("peaks", run)
            part = part[part["rank"] == part["rank"].min()]
            for r in part.to_dict("records"):
                rows.append({"where": results.name, **r, "share": 100 * r["bytes"] / r["peak_bytes"]})
    return Table(
        "peaks",
        "What the peak within a step consists of, by the line of code that asked for it.",
        [
            Column("where", "results", "code"),
            Column("run", "run", "code"),
            Column("rank", "rank", "count"),
            Column("site", "owner", "code"),
            Column("bytes", "at the peak [B]", "bytes"),
            Column("share", "of the peak [%]", "percent"),
            Column("blocks", "blocks", "count"),
        ],
        rows,
    )


def large_peaks(table: Table) -> Table:
    """The table of peaks with the small owners of each run in one row, so that its rows still add up to the peak."""
    rows: list[dict[str, Any]] = []
    for key in dict.fromkeys((r["where"], r["run"]) for r in table.rows):
        own = [r for r in table.rows if (r["where"], r["run"]) == key]
        small = [r for r in own if r["share"] < SMALL_SHARE or r["site"] == REST]
        rows += [r for r in own if r not in small]
        if small:
            sums = {k: sum(r[k] for r in small) for k in ("bytes", "share", "blocks")}
            rows.append({**small[0], "site": REST, **sums})
    return Table(table.name, f"{table.caption} Small owners are told together; the CSV has each.", table.columns, rows)


def time_table(sources: Sequence[Results]) -> Table:
    """Step times where they mean something: a GPU a rank, NCCL. The first steps warm up and are left out."""
    rows: list[dict[str, Any]] = []
    for results in sources:
        real = {r["run"] for r in results.runs if r["world"] == "nccl"}
        for run in results.run_names:
            steps = results.of("steps", run)
            steps = steps[steps["step"] > WARM_UP_STEPS]
            if run not in real or steps.empty:
                continue
            # A step is as long as its slowest rank.
            step_s = median(steps.groupby("step")["time_s"].max())
            config: Any = config_of(results, run)
            tokens = config["global_batch"] * config["seq_length"] if config else None
            line = results.of("timeline", run)
            parts = {} if line.empty else line[["compute_s", "communication_s", "exposed_communication_s"]].median()
            known = line["matrix_flop_per_s"].dropna()
            measured = None if known.empty else float(known.median())
            per_gpu = flop_per_token(config) * tokens / step_s / config["world_size"] if tokens else None
            rows.append(
                {
                    "where": results.name,
                    "run": run,
                    "step_s": step_s,
                    "tokens_per_s": tokens / step_s if tokens else None,
                    "mfu": _percent(per_gpu, _datasheet_rate(results, run)),
                    "mfu_measured": _percent(per_gpu, measured),
                    "matrix_tflop_per_s": measured / 1e12 if measured else None,
                    **{k: float(v) for k, v in dict(parts).items()},
                }
            )
    return Table(
        "time",
        "Time of a steady step: median over steps, profiled parts median over ranks and recorded steps. MFU counts 6 "
        "operations for each matrix element and token and causal attention, no recomputation, as a share of what the "
        f"GPU's datasheet states for dense bf16 ({_rates(sources)})"
        + (
            "; the measured rate is that of 8192 x 8192 bf16 products on the same GPU after the last step, in the same "
            "process."
            if any(row["mfu_measured"] for row in rows)
            else ". What these GPUs reach in a matrix product was not measured."
        )
        + " Baselines as configured here, not each framework at its best: Megatron Core without Transformer Engine and "
        "its fusions, torchtitan without compilation, DeepSpeed with a plain Llama (it brings no model).",
        [
            Column("where", "results", "code"),
            Column("run", "run", "code"),
            Column("step_s", "step [s]", "seconds"),
            Column("tokens_per_s", "tokens a second, all ranks", "count"),
            Column("mfu", "MFU against the datasheet's dense bf16 rate [%]", "percent"),
            Column("mfu_measured", "MFU against the measured bf16 rate [%]", "percent"),
            Column("matrix_tflop_per_s", "measured bf16 rate [Tflop/s]", "rate"),
            Column("compute_s", "compute kernels [s]", "seconds"),
            Column("communication_s", "communication kernels [s]", "seconds"),
            Column("exposed_communication_s", "of it exposed [s]", "seconds"),
        ],
        rows,
    )


def _rates(sources: Sequence[Results]) -> str:
    """`NVIDIA H200: 989 Tflop/s` of each device that has a datasheet here."""
    names = dict.fromkeys(str(d.get("name", "")) for s in sources for r in s.runs for d in r["devices"])
    known = {name: rate for name in names if (rate := datasheet_rate(name))}
    return ", ".join(f"{name}: {rate / 1e12:,.0f} Tflop/s" for name, rate in known.items()) or "none known here"


def _percent(part: float | None, whole: float | None) -> float | None:
    return 100 * part / whole if part and whole else None


def _datasheet_rate(results: Results, run: str) -> float | None:
    """None for devices that differ, or without a datasheet here."""
    found = next((r for r in results.runs if r["run"] == run), {})
    rates = {datasheet_rate(str(d.get("name", ""))) for d in found.get("devices", [])}
    return rates.pop() if len(rates) == 1 else None


def nccl_table(sources: Sequence[Results]) -> Table:
    """Three counts of a steady step: calls at the dispatcher, NCCL's own records, kernels; by operation and type."""
    rows: list[dict[str, Any]] = []
    for results in sources:
        for run in results.run_names:
            records, kernels = results.of("records", run), results.of("kernels", run)
            if records.empty and kernels.empty:
                continue
            rank = int(pd.concat([records["rank"], kernels["rank"]]).min())
            counts = {
                "calls": _counts(results.of("calls", run), rank, "op"),
                "records": _counts(records, rank, "op"),
                "kernels": _counts(kernels, rank, "kind"),
            }
            for op, dtype in sorted({k for side in counts.values() for k in side}):
                row = {name: side.get((op, dtype), 0) for name, side in counts.items()}
                rows.append({"where": results.name, "run": run, "rank": rank, "op": op, "dtype": dtype, **row})
    return Table(
        "nccl",
        "A steady step counted three times: calls at the dispatcher, NCCL's records, kernels on the GPU. On a group "
        "of one rank no kernel runs; a send and a receive at once are one kernel.",
        [
            Column("where", "results", "code"),
            Column("run", "run", "code"),
            Column("rank", "rank", "count"),
            Column("op", "operation", "code"),
            Column("dtype", "type", "code"),
            Column("calls", "calls", "count"),
            Column("records", "NCCL records", "count"),
            Column("kernels", "kernels", "count"),
        ],
        rows,
    )


def _counts(frame: pd.DataFrame, rank: int, kind: str) -> dict[tuple[str, str], int]:
    """Of the last step that was recorded in this way: the profiled step has kernels and no calls (probe/memory.py)."""
    part = frame[frame["rank"] == rank]
    part = part[part["step"] == part["step"].max()]
    return {(str(op), str(dtype)): int(n) for (op, dtype), n in part.groupby([kind, "dtype"])["count"].sum().items()}
