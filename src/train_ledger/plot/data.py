"""What is drawn and reported: the files of a results folder, read once and checked. A missing stage is an empty one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from train_ledger.reconcile.compare import RUNS_FILE, RUNS_SCHEMA, check_written
from train_ledger.reconcile.facts import FACT_TABLES
from train_ledger.reconcile.read import read_prediction
from train_ledger.reconcile.rows import CollectiveRow, LayoutRow, ResidentRow, columns
from train_ledger.spec.errors import DataError
from train_ledger.spec.io import read_json
from train_ledger.spec.registry import FRAMEWORKS
from train_ledger.spec.steps import GlobalStep, global_steps

PARITY_SCHEMA = "train-ledger/parity/1"
PROVENANCE_FILE, PROVENANCE_SCHEMA = "provenance.json", "train-ledger/evidence/1"

_WHOLE = {
    *("rank", "step", "micro_batch", "order", "count", "numel", "in_numel", "out_numel", "full_numel", "storages"),
    *("predicted_bytes", "measured_bytes", "residual_bytes", "predicted_numel", "pad_numel", "measured_numel"),
    *("predicted_count", "measured_count", "predicted_wire_bytes", "measured_wire_bytes", "storage_bytes"),
    *("bytes", "blocks", "group_size"),
}
_NUMBER = {"loss", "grad_norm", "time_s", "requested_bytes", "allocated_bytes", "peak_bytes", "master_numel"}
_NUMBER |= {"rel_difference", "bound", "span_s", "compute_s", "communication_s", "exposed_communication_s"}
_NUMBER |= {"matrix_flop_per_s"}
TABLES: dict[str, list[str]] = {
    "resident": columns(ResidentRow),
    "collectives": columns(CollectiveRow),
    "layout": columns(LayoutRow),
    **FACT_TABLES,
}


@dataclass(frozen=True)
class Parity:
    """What the parity stage wrote: its summary, the curves of all runs, and the pairs' losses step by step."""

    summary: Mapping[str, Any]
    curves: pd.DataFrame
    losses: pd.DataFrame


@dataclass(frozen=True)
class Results:
    """A results folder. Every table is there, empty where its stage did not run; `missing` names those stages.

    `provenance` is what a set of kept measurements says of itself (reference/<set>/provenance.json), else empty.
    """

    name: str
    runs: Sequence[Mapping[str, Any]]
    tables: Mapping[str, pd.DataFrame]
    predictions: Mapping[str, Mapping[str, Any]]
    parity: Parity | None = None
    missing: Sequence[str] = field(default_factory=tuple)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, table: str) -> pd.DataFrame:
        return self.tables[table]

    def of(self, table: str, run: str) -> pd.DataFrame:
        """Rows of one run."""
        frame = self.tables[table]
        return frame[frame["run"] == run]

    @property
    def run_names(self) -> list[str]:
        """Runs in the order of the comparison; those that are only predicted come last."""
        names = [r["run"] for r in self.runs]
        return names + [n for n in self.predictions if n not in names]

    def framework(self, run: str) -> str:
        """The framework of a run."""
        for r in self.runs:
            if r["run"] == run:
                return str(r["framework"])
        return str(self.predictions[run]["framework"])


def framework_title(framework: str) -> str:
    """How the framework writes its own name."""
    return FRAMEWORKS[framework].title if framework in FRAMEWORKS else framework


def run_size(run: Mapping[str, Any]) -> tuple[int, int]:
    """How large a run of `Results.runs` is: width times layers of its model, then ranks."""
    model = (run.get("config") or {}).get("model", {})
    return int(model.get("hidden_size", 0)) * int(model.get("num_layers", 0)), int(run["world_size"])


def read_results(folder: str | Path) -> Results:
    """A results folder, `results/<comparison>/`.

    Raises:
        DataError: there is no such folder, it holds no results, or a file in it is not as its stage writes it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError("there is no such folder", file=folder)
    predictions = {}
    for file in sorted(folder.glob("predict/*.json")):
        data = read_prediction(file)
        predictions[data["run"]] = data
    missing = [] if predictions else ["predict"]
    runs: Sequence[Mapping[str, Any]] = ()
    if (folder / "reconcile" / RUNS_FILE).is_file():
        runs = _read_runs(folder / "reconcile" / RUNS_FILE)
        tables = {name: _read_table(folder / "reconcile" / f"{name}.csv", TABLES[name]) for name in TABLES}
    else:
        missing.append("reconcile")
        tables = {name: _typed(pd.DataFrame(columns=TABLES[name], dtype=str)) for name in TABLES}
    parity = read_parity(folder / "parity")
    if not runs and not predictions and parity is None:
        raise DataError("holds no results: neither predict/*.json nor reconcile/runs.json with a run", file=folder)
    return Results(
        folder.resolve().name,
        runs,
        tables,
        predictions,
        parity,
        tuple(missing),
        read_json(said, PROVENANCE_SCHEMA, "evidence") if (said := folder / PROVENANCE_FILE).is_file() else {},
    )


def read_parity(folder: Path) -> Parity | None:
    """What the parity stage wrote into `folder`; None where it did not run.

    Raises:
        DataError: a file is missing or not as the stage writes it.
    """
    if not (folder / "parity.json").is_file():
        return None
    curves = ["run", "step", "loss", "grad_norm"]
    losses = ["left", "right", "step", "rel_difference", "bound", "verdict"]
    return Parity(
        read_json(folder / "parity.json", PARITY_SCHEMA, "parity"),
        _read_table(folder / "curves.csv", curves),
        _read_table(folder / "losses.csv", losses),
    )


def _read_runs(file: Path) -> Sequence[Mapping[str, Any]]:
    data = read_json(file, RUNS_SCHEMA)
    runs = data.get("runs")
    wanted = {"run", "framework", "world", "world_size", "versions", "hosts", "devices", "ranks", "groups"}
    if not isinstance(runs, list) or not all(isinstance(r, dict) and wanted <= set(r) for r in runs):
        raise DataError(f"must list runs with {', '.join(sorted(wanted))}", file=file, key="runs")
    check_written(file.parent, TABLES, data.get("files"))
    return runs


def _read_table(file: Path, wanted: Sequence[str]) -> pd.DataFrame:
    try:
        # Everything as text first: a group that is named NA or 007 keeps its name.
        frame = pd.read_csv(file, dtype=str, keep_default_na=False, encoding="utf-8")
    except OSError as e:
        raise DataError(f"cannot be read: {e.strerror or e}", file=file) from e
    except (ValueError, pd.errors.ParserError) as e:
        raise DataError(f"is not complete CSV ({e})", file=file) from e
    lacking = [c for c in wanted if c not in frame.columns]
    if lacking:
        raise DataError("is missing", file=file, key=lacking[0])
    try:
        return _typed(frame)
    except ValueError as e:
        raise DataError(f"holds text where a number belongs ({e})", file=file) from e


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    for name in frame.columns:
        if name in _WHOLE:
            frame[name] = frame[name].astype("int64")
        elif name in _NUMBER:
            frame[name] = frame[name].map(lambda cell: float(cell) if cell else math.nan).astype("float64")
    return frame


def run_steps(results: Results, run: str) -> list[GlobalStep]:
    """Loss and gradient norm of each step of a run, from all of its ranks."""
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for r in results.of("steps", run).to_dict("records"):
        known = {k: None if pd.isna(r[k]) else r[k] for k in ("loss", "grad_norm")}
        by_rank.setdefault(r["rank"], []).append({"step": r["step"], **known})
    return global_steps([{"steps": by_rank[rank]} for rank in sorted(by_rank)])


def unit_for(largest_bytes: float) -> tuple[str, float]:
    """The decimal unit of an axis that reaches `largest_bytes`, and its size in bytes."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if largest_bytes >= size:
            return unit, size
    return "B", 1.0
