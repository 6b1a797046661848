"""One tidy table a run: every fact of the rank files is one row, told apart by `kind`. It holds all that the files hold.

| kind | one row a | columns that are filled |
|---|---|---|
| rank, census | rank file, its census | detail: run, framework, world, versions, host, device as JSON |
| coord, group | coordinate, process group | name, count; name, ranks |
| step, memory | figure of a step | step, name, value; step, name, count (torch.cuda.memory_stats) |
| container, other | container, unclaimed storage | step, name, owner, dtype, device, numel, bytes, count (storages), detail |
| collective | kind of call | step, op, ranks, name (group), dtype, in_numel, out_numel, count, phase, site |
| weight, lifeline | followed weight, event of it | name, site (module), numel; step, micro_batch, event, state, dtype, numel, bytes, detail (master) |
| kernel, record, timeline, memory_event, peak | what only CUDA or NCCL tells | detail as JSON |
"""  # noqa: E501

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from train_ledger.spec.errors import DataError
from train_ledger.spec.io import validate, whole_file
from train_ledger.spec.launched import IDENTITY, RANK_SCHEMA, Launch, check_references, check_steps

TABLE_SCHEMA = "train-ledger/probe/1"

_TEXT = ("kind", "name", "owner", "dtype", "device", "op", "ranks", "phase", "site", "event", "state", "detail")
_WHOLE = ("rank", "step", "micro_batch", "numel", "bytes", "count", "in_numel", "out_numel")
COLUMNS = pa.schema(
    [(c, pa.string()) for c in _TEXT] + [(c, pa.int64()) for c in _WHOLE] + [("value", pa.float64())],
    metadata={"schema": TABLE_SCHEMA},
)
_META = (*IDENTITY, "versions", "host", "device")
_WHOLE_PARTS = ("timeline", "peak")
#: Columns that a row of a kind cannot do without. All kinds need `kind` and `rank`; those not listed need `detail`.
_NEEDED: dict[str, tuple[str, ...]] = {
    "census": ("step",),
    "coord": ("name", "count"),
    "group": ("name", "ranks"),
    "step": ("step", "name"),
    "memory": ("step", "name", "count"),
    "container": ("step", "name", "owner", "dtype", "device", "numel", "bytes", "count", "detail"),
    "other": ("step", "dtype", "device", "bytes", "count", "detail"),
    "collective": ("step", "op", "ranks", "name", "dtype", "in_numel", "out_numel", "count", "phase", "site"),
    "weight": ("name", "site", "numel"),
    "lifeline": ("step", "micro_batch", "event", "state", "dtype", "numel", "bytes", "detail"),
}
#: What tells rows of a kind apart on one rank; a second row of the same is a rank, a step or a part given twice.
_UNIQUE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("rank", "census", "weight", "timeline", "peak"), ()),
    "coord": ("name",),
    "step": ("step", "name"),
    "memory": ("step", "name"),
}
_STEP_FIGURES = ("loss", "grad_norm", "time_s")
_LOOSE = {"kernel": "kernels", "record": "records", "memory_event": "memory_events"}
KINDS = ("rank", *_NEEDED, *_LOOSE, *_WHOLE_PARTS)


def write_tidy(launch: Launch, out: str | Path) -> None:
    """Write the tidy table of a launch as Parquet, whole or not at all.

    Raises:
        DataError: the file cannot be written there.
    """
    rows = [row for rank in launch.ranks for row in _rank_rows(rank)]
    table = pa.Table.from_pylist(rows, schema=COLUMNS)
    try:
        with whole_file(out) as f:
            pq.write_table(table, f, write_page_checksum=True)
    except OSError as e:
        raise DataError(f"cannot be written: {e.strerror or e}", file=out) from e


def read_tidy(file: str | Path) -> list[dict[str, Any]]:
    """The rank files' contents again, in rank order.

    Raises:
        DataError: missing, truncated, not a table of ours, a cell that its row needs is empty or of another type, a
            rank is there twice or trained other steps than the first, or a rank is not as its schema says.
    """
    try:
        table = pq.read_table(file, page_checksum_verification=True)
    except FileNotFoundError as e:
        raise DataError("cannot be read: there is no such file", file=file) from e
    except (OSError, pa.ArrowException) as e:
        raise DataError(f"is not complete Parquet ({e}); it may be truncated", file=file) from e
    found = (table.schema.metadata or {}).get(b"schema", b"").decode(errors="replace")
    if found != TABLE_SCHEMA:
        raise DataError(f"is {found!r}, expected {TABLE_SCHEMA!r}", file=file, key="schema")
    if table.schema.names != COLUMNS.names:
        raise DataError(f"columns are not {', '.join(COLUMNS.names)}", file=file, key="columns")
    for column in COLUMNS:
        if table.schema.field(column.name).type != column.type:
            what = f"is of type {table.schema.field(column.name).type}, expected {column.type}"
            raise DataError(what, file=file, key=column.name)
    by_rank: dict[int, list[dict[str, Any]]] = {}
    try:
        for i, row in enumerate(table.to_pylist()):
            _check_row(row, i, file)
            by_rank.setdefault(row["rank"], []).append(row)
        ranks = [_rank_data(rank, by_rank[rank], file) for rank in sorted(by_rank)]
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as e:
        raise DataError(f"a row is not as the stage writes it ({type(e).__name__}: {e})", file=file) from e
    for rank in ranks:
        validate(rank, "rank", file=file, prefix=f"rank {rank['rank']}", error=DataError)
        check_steps(ranks[0], rank, file)
        check_references(rank, file, f"rank {rank['rank']}.")
    return ranks


def _check_row(row: Mapping[str, Any], i: int, file: str | Path) -> None:
    kind = row["kind"]
    for column in ("kind", "rank"):
        if row[column] is None:
            raise DataError(f"row {i} has none", file=file, key=column)
    if kind not in KINDS:
        raise DataError(f"row {i} is {kind[:50]!r}, which is none of {', '.join(KINDS)}", file=file, key="kind")
    for column in _NEEDED.get(kind, ("detail",)):
        if row[column] is None:
            raise DataError(f"row {i}, a {kind} of rank {row['rank']}, has none", file=file, key=column)
    if kind == "step" and row["name"] not in _STEP_FIGURES:
        what = f"row {i} is {row['name'][:50]!r}, which is no figure of a step"
        raise DataError(what, file=file, key="name")
    for column, parse in (("ranks", _numbers), ("detail", json.loads)):
        try:
            if row[column] is not None:
                parse(row[column])
        except ValueError as e:
            what = f"row {i}, a {kind} of rank {row['rank']}, cannot be read: {e}"
            raise DataError(what, file=file, key=column) from e


def _refuse_twice(rank: int, kinds: Mapping[str, Iterable[Mapping[str, Any]]], file: str | Path) -> None:
    for kind, columns in _UNIQUE.items():
        seen = set()
        for row in kinds.get(kind, []):
            which = tuple(row[c] for c in columns)
            if which in seen:
                named = " ".join([kind, *map(str, which)]) if kind != "rank" else "it"
                raise DataError(f"rank {rank}: {named} is there twice", file=file, key=columns[-1] if columns else kind)
            seen.add(which)


def _rank_rows(data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    def row(kind: str, **cells: Any) -> dict[str, Any]:
        return {"kind": kind, "rank": data["rank"], **cells}

    yield row("rank", detail=_json({k: data[k] for k in _META}))
    for name, at in data["coords"].items():
        yield row("coord", name=name, count=at)
    for g in data["groups"]:
        yield row("group", name=g["name"], ranks=_spaced(g["ranks"]))
    for s in data["steps"]:
        for name in _STEP_FIGURES:
            yield row("step", step=s["step"], name=name, value=s[name])
        for name, count in sorted((s["memory"] or {}).items()):
            yield row("memory", step=s["step"], name=name, count=count)
    at = data["census"]["step"]
    yield row("census", step=at)
    for c in data["census"]["containers"]:
        same = {k: c[k] for k in ("name", "owner", "dtype", "device", "numel", "bytes")}
        yield row("container", step=at, count=c["storages"], detail=_json(c.get("blocks", [])), **same)
    for c in data["census"]["other"]:
        same = {k: c[k] for k in ("dtype", "device", "bytes", "count")}
        yield row("other", step=at, detail=_json(c["shape"]), **same)
    for c in data["collectives"]:
        same = {k: c[k] for k in ("step", "op", "dtype", "in_numel", "out_numel", "count", "phase", "site")}
        yield row("collective", name=c.get("group", ""), ranks=_spaced(c["ranks"]), **same)
    life = data["lifeline"]
    if life:
        yield row("weight", name=life["weight"], site=life.get("module", ""), numel=life["full_numel"])
        for e in life["events"]:
            same = {k: e[k] for k in ("step", "micro_batch", "event", "state", "dtype", "numel")}
            yield row("lifeline", bytes=e["storage_bytes"], detail=_json(e["master"]), **same)
    for kind, key in _LOOSE.items():
        for item in data.get(key, []):
            yield row(kind, detail=_json(item))
    for kind in _WHOLE_PARTS:
        if data.get(kind):
            yield row(kind, detail=_json(data[kind]))


def _rank_data(rank: int, rows: Iterable[Mapping[str, Any]], file: str | Path) -> dict[str, Any]:
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(row["kind"], []).append(row)
    for kind in ("rank", "census"):
        if kind not in kinds:
            raise DataError(f"rank {rank} has no row of kind {kind}", file=file, key="kind")
    _refuse_twice(rank, kinds, file)

    def some(kind: str) -> list[Mapping[str, Any]]:
        return kinds.get(kind, [])

    def pick(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
        return {k: row[k] for k in names}

    steps: dict[int, dict[str, Any]] = {}
    for row in some("step"):
        steps.setdefault(row["step"], {"step": row["step"], "memory": None})[row["name"]] = row["value"]
    for row in some("memory"):
        memory = steps[row["step"]]["memory"] or {}
        steps[row["step"]]["memory"] = {**memory, row["name"]: row["count"]}
    containers = [
        {
            **pick(r, "name", "owner", "dtype", "device", "numel", "bytes"),
            "storages": r["count"],
            "blocks": json.loads(r["detail"]),
        }
        for r in some("container")
    ]
    other = [{**pick(r, "dtype", "device", "bytes", "count"), "shape": json.loads(r["detail"])} for r in some("other")]
    calls = ("step", "op", "dtype", "in_numel", "out_numel", "count", "phase", "site")
    events = ("step", "micro_batch", "event", "state", "dtype", "numel")
    life = [
        {
            "weight": w["name"],
            "module": w["site"],
            "full_numel": w["numel"],
            "events": [
                {**pick(r, *events), "storage_bytes": r["bytes"], "master": json.loads(r["detail"])}
                for r in some("lifeline")
            ],
        }
        for w in some("weight")
    ]
    out = {
        "schema": RANK_SCHEMA,
        "rank": rank,
        **json.loads(some("rank")[0]["detail"]),
        "coords": {r["name"]: r["count"] for r in some("coord")},
        "groups": [{"name": r["name"], "ranks": _numbers(r["ranks"])} for r in some("group")],
        "steps": list(steps.values()),
        "census": {"step": some("census")[0]["step"], "containers": containers, "other": other},
        "collectives": [
            {**pick(r, *calls), "ranks": _numbers(r["ranks"]), "group": r["name"]} for r in some("collective")
        ],
        "lifeline": life[0] if life else None,
    }
    for kind, key in _LOOSE.items():
        if some(kind):
            out[key] = [json.loads(r["detail"]) for r in some(kind)]
    for kind in _WHOLE_PARTS:
        if some(kind):
            out[kind] = json.loads(some(kind)[0]["detail"])
    return out


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _spaced(ranks: Iterable[int]) -> str:
    return " ".join(str(r) for r in ranks)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split()]
