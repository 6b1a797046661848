"""What plot and report show besides the reconciled rows: calls by site, steps, lifelines, who measured what on what."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .core import group_ranks, spaced

Data = Mapping[str, Any]

#: Columns of each table of facts, in file order.
FACT_TABLES: dict[str, list[str]] = {
    "calls": [
        "run",
        "rank",
        "step",
        "op",
        "group",
        "ranks",
        "dtype",
        "in_numel",
        "out_numel",
        "count",
        "phase",
        "site",
    ],
    "predicted_calls": [
        *(
            "run",
            "rank",
            "op",
            "group",
            "ranks",
            "dtype",
            "in_numel",
            "out_numel",
            "count",
            "component",
            "phase",
            "rule",
        ),
    ],
    "steps": ["run", "rank", "step", "loss", "grad_norm", "time_s", "requested_bytes", "allocated_bytes", "peak_bytes"],
    "lifeline": [
        *("run", "rank", "weight", "full_numel", "order", "step", "micro_batch", "event", "state", "dtype", "numel"),
        *("storage_bytes", "master_name", "master_dtype", "master_numel", "master_device", "master_same_storage"),
    ],
    "memory_events": ["run", "rank", "order", "step", "event", "module", "time_s", "allocated_bytes"],
    "peaks": ["run", "rank", "peak_bytes", "site", "bytes", "blocks"],
    "kernels": ["run", "rank", "step", "kind", "dtype", "count", "time_s"],
    "records": [
        *("run", "rank", "step", "op", "group", "dtype", "in_numel", "out_numel", "group_size", "coalesced", "count"),
    ],
    "timeline": [
        *("run", "rank", "step", "span_s", "compute_s", "communication_s", "exposed_communication_s"),
        "matrix_flop_per_s",
    ],
}

_MEMORY = {
    "requested_bytes": "requested_bytes.all.current",
    "allocated_bytes": "allocated_bytes.all.current",
    "peak_bytes": "allocated_bytes.all.peak",
}


def rank_facts(prediction: Data, measured: Data, step: int) -> dict[str, list[dict[str, Any]]]:
    """Rows of every table of `FACT_TABLES` for one rank; calls are those of `step`."""
    where = {"run": measured["run"], "rank": measured["rank"]}
    named = group_ranks(prediction, measured["rank"])
    by_ranks: dict[tuple[int, ...], str] = {}
    for name, ranks in named.items():
        by_ranks.setdefault(ranks, name)
    calls = []
    for c in measured["collectives"]:
        if c["step"] == step:
            ranks = tuple(sorted(c["ranks"]))
            same = {k: c[k] for k in ("step", "op", "dtype", "in_numel", "out_numel", "count", "phase", "site")}
            group = by_ranks.get(ranks) or c.get("group", "")
            calls.append({**where, **same, "group": group, "ranks": spaced(ranks)})
    predicted = []
    for ledger in prediction["ranks"]:
        if ledger["rank"] == measured["rank"]:
            for c in ledger["collectives"]:
                predicted.append({**where, "rule": "", **c, "ranks": spaced(named[c["group"]])})
    steps = []
    for s in measured["steps"]:
        memory = {k: (s["memory"] or {}).get(key) for k, key in _MEMORY.items()}
        steps.append({**where, **{k: s[k] for k in ("step", "loss", "grad_norm", "time_s")}, **memory})
    peak = measured.get("peak") or {}
    return {
        "calls": calls,
        "predicted_calls": predicted,
        "steps": steps,
        "lifeline": _lifeline(where, measured["lifeline"]),
        "memory_events": _listed(where, "memory_events", measured.get("memory_events", [])),
        "peaks": [
            {**where, "peak_bytes": peak["peak_bytes"], **{k: owner[k] for k in ("site", "bytes", "blocks")}}
            for owner in peak.get("owners", [])
        ],
        "kernels": _listed(where, "kernels", measured.get("kernels", [])),
        "records": _listed(where, "records", measured.get("records", [])),
        "timeline": _timeline(where, measured.get("timeline") or {}),
    }


def _listed(where: Data, table: str, items: Sequence[Data]) -> list[dict[str, Any]]:
    """What only CUDA or NCCL tells, in the table's columns; what an item lacks stays empty."""
    known = [c for c in FACT_TABLES[table] if c not in {"run", "rank", "order"}]
    order = {"order": 0} if "order" in FACT_TABLES[table] else {}
    return [{**where, **dict.fromkeys(order, i), **{k: item.get(k) for k in known}} for i, item in enumerate(items)]


def _timeline(where: Data, timeline: Data) -> list[dict[str, Any]]:
    """The GPU's matrix rate is one for all steps."""
    rate = timeline.get("matrix_flop_per_s")
    return [{**row, "matrix_flop_per_s": rate} for row in _listed(where, "timeline", timeline.get("steps", []))]


def _lifeline(where: Data, life: Data | None) -> list[dict[str, Any]]:
    out = []
    for i, e in enumerate(life["events"] if life else []):
        master = e["master"] or {}
        out.append(
            {
                **where,
                "weight": life["weight"],
                "full_numel": life["full_numel"],
                "order": i,
                **{k: e[k] for k in ("step", "micro_batch", "event", "state", "dtype", "numel", "storage_bytes")},
                **{f"master_{k}": master.get(k) for k in ("name", "dtype", "numel", "device", "same_storage")},
            }
        )
    return out


def run_facts(prediction: Data, ranks: Sequence[Data]) -> dict[str, Any]:
    """What holds for a run as a whole: identity, versions, machine, process groups and the resolved config."""
    hosts = {_json(r["host"]): r["host"] for r in ranks}
    devices = {_json(r["device"]): r["device"] for r in ranks}
    return {
        "run": prediction["run"],
        "framework": prediction["framework"],
        "world": ranks[0]["world"],
        "world_size": prediction["world_size"],
        "step_kind": prediction.get("step", "steady"),
        "config_sha256": ranks[0]["config_sha256"],
        "versions": ranks[0]["versions"],
        "hosts": [hosts[k] for k in sorted(hosts)],
        "devices": [devices[k] for k in sorted(devices)],
        "ranks": [{"rank": r["rank"], "coords": r["coords"]} for r in ranks],
        "groups": prediction["groups"],
        "config": prediction.get("config", {}),
    }


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
