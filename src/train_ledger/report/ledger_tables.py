"""Memory and communication as tables: by class of ranks for reading, and row by row for looking something up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from train_ledger.plot.data import Results
from train_ledger.plot.resident import resident_frame
from train_ledger.plot.traffic import traffic_frame
from train_ledger.reconcile.rows import FOREIGN_OWNERS
from train_ledger.spec.dtypes import ELEMENT_BYTES
from train_ledger.spec.groups import rank_ranges

from .tables import Column, Table

_MEMORY = [
    Column("run", "run", "code"),
    Column("ranks", "ranks"),
    Column("container", "container", "code"),
    Column("dtype", "type", "code"),
    Column("owner", "owner"),
    Column("predicted_bytes", "predicted [B]", "bytes"),
    Column("measured_bytes", "measured [B]", "bytes"),
    Column("residual_bytes", "residual [B]", "bytes"),
    Column("verdict", "verdict", "verdict"),
    Column("cause", "likely cause"),
]
_TRAFFIC = [
    Column("run", "run", "code"),
    Column("ranks", "ranks"),
    Column("op", "operation", "code"),
    Column("group", "group", "code"),
    Column("dtype", "type", "code"),
    Column("predicted_count", "calls, predicted", "count"),
    Column("measured_count", "calls, measured", "count"),
    Column("predicted_bytes", "payload, predicted [B]", "bytes"),
    Column("measured_bytes", "payload, measured [B]", "bytes"),
    Column("predicted_wire_bytes", "on the wire [B]", "bytes"),
    Column("verdict", "verdict", "verdict"),
    Column("cause", "likely cause"),
]


def _by_class(frame: pd.DataFrame, order: Sequence[str], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Rows that are alike on several ranks, once, with those ranks; runs in order, rows in first-seen order."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for record in frame.to_dict("records"):
        alike.setdefault(tuple(record[k] for k in keys), []).append(int(record["rank"]))
    rows = [{**dict(zip(keys, key, strict=True)), "ranks": rank_ranges(ranks)} for key, ranks in alike.items()]
    return sorted(rows, key=lambda r: list(order).index(r["run"]))


def memory_table(results: Results) -> Table:
    """Containers of the framework, its optimizer and the model; a row a container and class of ranks."""
    frame = results["resident"]
    if frame.empty:
        frame = resident_frame(results)
        columns = [c for c in _MEMORY if c.key in {"run", "ranks", "container", "owner", "predicted_bytes"}]
        keys = [c.key for c in columns if c.key != "ranks"]
        rows = _by_class(frame, results.run_names, keys)
        return Table("memory", "Predicted resident bytes by container and rank.", columns, rows)
    owned = frame[~frame["owner"].isin(FOREIGN_OWNERS)]
    keys = [c.key for c in _MEMORY if c.key != "ranks"]
    return Table(
        "memory",
        "Resident bytes of one rank by container, predicted and measured; ranks that agree share a row.",
        _MEMORY,
        _by_class(owned, results.run_names, keys),
    )


def foreign_table(results: Results) -> Table:
    """What is resident and not the framework's: the script's, libraries', the allocator's, and what nobody claims."""
    frame = results["resident"]
    foreign = frame[frame["owner"].isin(FOREIGN_OWNERS)]
    columns = [c for c in _MEMORY if c.key != "cause"]
    columns.insert(5, Column("storages", "storages", "count"))
    keys = [c.key for c in columns if c.key != "ranks"]
    return Table(
        "not_the_frameworks",
        "Resident, but not the framework's: named, with its size, and predicted where a device is.",
        columns,
        _by_class(foreign, results.run_names, keys),
    )


def traffic_table(results: Results) -> Table:
    """Calls of one step by kind and group; a row a kind and class of ranks."""
    frame = traffic_frame(results)
    if results["collectives"].empty:
        keys = ["run", "rank", "op", "group", "dtype"]
        sums = ["predicted_count", "predicted_bytes", "predicted_wire_bytes"]
        frame = frame.groupby(keys, as_index=False, sort=False)[sums].sum()
        columns = [c for c in _TRAFFIC if c.key in {*keys, *sums, "ranks"}]
    else:
        columns = _TRAFFIC
    return Table(
        "communication",
        "Collectives of one step of one rank by operation, group and type; ranks that agree share a row.",
        columns,
        _by_class(frame, results.run_names, [c.key for c in columns if c.key != "ranks"]),
    )


def ledger_table(results: Results) -> Table:
    """Everything, one row a container on a rank and one row a kind of call at a call site on a rank."""
    rows: list[dict[str, Any]] = []
    for r in results["resident"].to_dict("records"):
        rows.append(
            {
                **{k: r[k] for k in ("run", "rank", "verdict", "predicted_bytes", "measured_bytes")},
                "what": "container",
                "name": r["container"],
                "detail": r["owner"],
                "dtype": r["dtype"],
                "where": r["rule"],
                "count": r["storages"],
            }
        )
    for r in results["collectives"].to_dict("records"):
        rows.append(
            {
                **{k: r[k] for k in ("run", "rank", "verdict", "predicted_bytes", "measured_bytes", "dtype")},
                "what": "collective",
                "name": r["op"],
                "detail": r["group"],
                "where": f"ranks {r['ranks']}",
                "count": r["measured_count"],
            }
        )
    rows += _call_sites(results)
    order = {run: i for i, run in enumerate(results.run_names)}
    kinds = ("container", "collective", "call site")
    rows.sort(key=lambda r: (order[r["run"]], r["rank"], kinds.index(r["what"])))
    return Table(
        "ledger",
        "The whole ledger: every container on every rank, every kind of call, and every call site of it.",
        [
            Column("run", "run", "code"),
            Column("rank", "rank", "count"),
            Column("what", "what"),
            Column("name", "name", "code"),
            Column("detail", "owner or group", "code"),
            Column("dtype", "type", "code"),
            Column("where", "rule, ranks or call site", "code"),
            Column("count", "storages or calls", "count"),
            Column("predicted_bytes", "predicted [B]", "bytes"),
            Column("measured_bytes", "measured [B]", "bytes"),
            Column("verdict", "verdict", "verdict"),
        ],
        rows,
    )


def _call_sites(results: Results) -> list[dict[str, Any]]:
    frame = results["calls"]
    if frame.empty:
        return []
    frame = frame.assign(
        size=frame[["in_numel", "out_numel"]].max(axis=1)
        * frame["count"]
        * frame["dtype"].map(lambda d: ELEMENT_BYTES.get(d, 0))
    )
    keys = ["run", "rank", "op", "group", "dtype", "site", "phase"]
    sums = frame.groupby(keys, as_index=False, sort=False)[["count", "size"]].sum()
    return [
        {
            **{k: r[k] for k in ("run", "rank", "dtype", "count")},
            "what": "call site",
            "name": r["op"],
            "detail": r["group"],
            "where": f"{r['site']} ({r['phase']})",
            "measured_bytes": r["size"],
            "verdict": "",
        }
        for r in sums.to_dict("records")
    ]


def merged_ledger(table: Table) -> Table:
    """The ledger with rows that are alike on several ranks told once."""
    keys = [c.key for c in table.columns if c.key != "rank"]
    alike: dict[tuple[Any, ...], list[int]] = {}
    for row in table.rows:
        alike.setdefault(tuple(row.get(k) for k in keys), []).append(int(row["rank"]))
    rows = [{**dict(zip(keys, key, strict=True)), "rank": rank_ranges(ranks)} for key, ranks in alike.items()]
    columns = [Column("rank", "ranks") if c.key == "rank" else c for c in table.columns]
    return Table(table.name, f"{table.caption} Ranks that agree share a row.", columns, rows)
