"""The stage: predictions and tidy measurements of any number of runs in, the reconciliation's files out."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train_ledger.spec.errors import DataError
from train_ledger.spec.groups import rank_ranges
from train_ledger.spec.io import write_json, write_text

from . import rows
from .core import predicted_rank, reconcile_collectives, reconcile_resident, recorded_step
from .facts import FACT_TABLES, rank_facts, run_facts
from .layout import reconcile_layout
from .read import read_prediction
from .rows import CollectiveRow, LayoutRow, ResidentRow
from .tidy import read_tidy

RUNS_SCHEMA = "train-ledger/reconcile/1"
RUNS_FILE = "runs.json"

Data = Mapping[str, Any]


@dataclass(frozen=True)
class Reconciliation:
    """All rows of a comparison. `runs` are the facts about each run; `facts` the rows of the other tables, by name."""

    resident: list[ResidentRow]
    collectives: list[CollectiveRow]
    layout: list[LayoutRow]
    runs: list[dict[str, Any]]
    facts: dict[str, list[dict[str, Any]]]

    def differences(self) -> list[ResidentRow | CollectiveRow | LayoutRow]:
        """Every row that is not explained."""
        return [r for r in (*self.resident, *self.collectives, *self.layout) if r.verdict not in rows.CLEAN]


def reconcile_files(
    predict_files: Sequence[str | Path], probe_files: Sequence[str | Path], *, partial: bool = False
) -> Reconciliation:
    """Join predict files with tidy tables, run by run, in the order of the predict files.

    Args:
        predict_files, probe_files: one of each a run.
        partial: only a part of the predicted ranks was measured, and that is meant: a fake world of chosen ranks.

    Raises:
        DataError: a file is not as its schema says, a run or (unless `partial`) a rank is predicted but not measured,
            measured but not predicted, or a run is there twice.
    """
    predictions = _by_run((read_prediction(f), f) for f in predict_files)
    measurements = _by_run(((_same_run(read_tidy(f), f)), f) for f in probe_files)
    for run, (_, file) in predictions.items():
        if run not in measurements:
            raise DataError(f"run {run!r} is predicted here, but no measurement of it was given", file=file, key="run")
    for run, (_, file) in measurements.items():
        if run not in predictions:
            raise DataError(f"run {run!r} was measured here, but no prediction of it was given", file=file, key="run")
    out = Reconciliation([], [], [], [], {name: [] for name in FACT_TABLES})
    for run, (prediction, _) in predictions.items():
        ranks, file = measurements[run]
        try:
            _reconcile_run(prediction, ranks["ranks"], out, partial)
        except DataError as e:
            raise DataError(e.message, file=e.file or file, key=e.key) from e
    return out


def _by_run(files: Iterable[tuple[Data, str | Path]]) -> dict[str, tuple[Data, str | Path]]:
    out: dict[str, tuple[Data, str | Path]] = {}
    for data, file in files:
        if data["run"] in out:
            raise DataError(f"run {data['run']!r} is also in {out[data['run']][1]}", file=file, key="run")
        out[data["run"]] = (data, file)
    return out


def _same_run(ranks: list[dict[str, Any]], file: str | Path) -> dict[str, Any]:
    if not ranks:
        raise DataError("holds no rank", file=file)
    if len({r["run"] for r in ranks}) != 1:
        raise DataError("holds more than one run", file=file, key="run")
    return {"run": ranks[0]["run"], "ranks": ranks}


def check_ranks(run: str, wanted: Iterable[int], measured: Iterable[int]) -> None:
    """Refuse a run of which a rank is missing: half of the ranks, exact, are not an exact run.

    Raises:
        DataError: names the run and the ranks that were not measured.
    """
    gone = set(wanted) - set(measured)
    if gone:
        one = len(gone) == 1
        what = f"rank {rank_ranges(gone)} is" if one else f"ranks {rank_ranges(gone)} are"
        raise DataError(f"run {run!r}: {what} predicted, but not measured", key="ranks")


def _reconcile_run(prediction: Data, ranks: Sequence[Data], out: Reconciliation, partial: bool) -> None:
    if not partial:
        check_ranks(prediction["run"], (r["rank"] for r in prediction["ranks"]), (r["rank"] for r in ranks))
    for measured in ranks:
        ledger = predicted_rank(prediction, measured)
        step = recorded_step(prediction, measured)
        out.resident.extend(reconcile_resident(prediction, ledger, measured))
        out.collectives.extend(reconcile_collectives(prediction, ledger, measured, step))
        out.collectives.extend(_other_steps(prediction, ledger, measured, step))
        out.layout.extend(reconcile_layout(prediction, measured))
        for name, facts in rank_facts(prediction, measured, step).items():
            out.facts[name].extend(facts)
    out.runs.append(run_facts(prediction, ranks))


def _other_steps(prediction: Data, ledger: Data, measured: Data, compared: int) -> list[CollectiveRow]:
    """Where another recorded step than the compared one differs. Step 1 is no steady step and is left out."""
    others = sorted({c["step"] for c in measured["collectives"]} - {1, compared})
    if prediction.get("step", "steady") != "steady":
        return []
    found = [r for step in others for r in reconcile_collectives(prediction, ledger, measured, step)]
    return [r for r in found if r.verdict not in rows.CLEAN]


def write(result: Reconciliation, out_dir: str | Path) -> None:
    """resident.csv, collectives.csv, layout.csv, one CSV a table of facts, and runs.json, each whole or not at all.

    runs.json is last and says of each CSV how many rows it has and its sha256: a reader sees whether they belong
    together (`check_written`).

    Raises:
        DataError: a file cannot be written there.
    """
    out_dir = Path(out_dir)
    texts = {
        "resident.csv": _csv(rows.columns(ResidentRow), rows.to_dicts(result.resident)),
        "collectives.csv": _csv(rows.columns(CollectiveRow), rows.to_dicts(result.collectives)),
        "layout.csv": _csv(rows.columns(LayoutRow), rows.to_dicts(result.layout)),
        **{f"{name}.csv": _csv(columns, result.facts[name]) for name, columns in FACT_TABLES.items()},
    }
    files = {name: file_entry(text.encode()) for name, text in texts.items()}
    for name, text in texts.items():
        _write(write_text, out_dir / name, text)
    _write(write_json, out_dir / RUNS_FILE, {"schema": RUNS_SCHEMA, "files": files, "runs": result.runs})


def _write(writer: Callable[[Path, Any], None], file: Path, content: Any) -> None:
    try:
        writer(file, content)
    except OSError as e:
        raise DataError(f"cannot be written: {e.strerror or e}", file=file) from e


def file_entry(content: bytes) -> dict[str, Any]:
    """What runs.json says of a CSV: `rows` without the head, and `sha256` of its bytes."""
    rows_in = max(sum(1 for _ in csv.reader(io.StringIO(content.decode(errors="replace"), newline=""))) - 1, 0)
    return {"rows": rows_in, "sha256": hashlib.sha256(content).hexdigest()}


def check_written(folder: str | Path, tables: Iterable[str], files: Any) -> None:
    """Refuse a folder whose CSVs are not those that were written together with its runs.json.

    Args:
        folder: what `write` wrote.
        tables: names of the tables that are read from it.
        files: `files` of its runs.json.

    Raises:
        DataError: a CSV is missing, or has other rows or bytes than runs.json says.
    """
    folder = Path(folder)
    if not isinstance(files, Mapping):
        raise DataError("says nothing of the CSV files; reconcile again", file=folder / RUNS_FILE, key="files")
    for name in (f"{table}.csv" for table in tables):
        if name not in files:
            raise DataError("is missing; reconcile again", file=folder / RUNS_FILE, key=f"files.{name}")
        try:
            found = file_entry((folder / name).read_bytes())
        except OSError as e:
            raise DataError(f"cannot be read: {e.strerror or e}", file=folder / name) from e
        except csv.Error as e:
            raise DataError(f"is not complete CSV ({e})", file=folder / name) from e
        if found != files[name]:
            wanted = files[name].get("rows") if isinstance(files[name], Mapping) else None
            what = f"has {found['rows']} rows" + (f", {RUNS_FILE} says {wanted}" if wanted != found["rows"] else "")
            what += " and other bytes than were written" if wanted == found["rows"] else ""
            raise DataError(f"{what}; it was changed after {RUNS_FILE} was written", file=folder / name)


def _csv(columns: Sequence[str], records: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def difference_lines(result: Reconciliation, limit: int = 40) -> list[str]:
    """One line a difference, ranks that differ alike on one line; at most `limit`, then how many more there are."""
    alike: dict[tuple[str, str, str], list[int]] = {}
    for r in result.differences():
        alike.setdefault((r.run, _what(r), r.cause), []).append(r.rank)
    lines = []
    for (run, what, cause), ranks in alike.items():
        where = "rank" if len(ranks) == 1 else "ranks"
        lines.append(f"{run}, {where} {rank_ranges(ranks)}: {what}" + (f" ({cause})" if cause else ""))
    if len(lines) > limit:
        lines = [*lines[:limit], f"and {len(lines) - limit} differences more, all in the CSV files"]
    return lines


def _what(r: ResidentRow | CollectiveRow | LayoutRow) -> str:
    if isinstance(r, ResidentRow):
        figures = (
            f"predicted {r.predicted_bytes:,} B, measured {r.measured_bytes:,} B, residual {r.residual_bytes:+,} B"
        )
        return f"{r.container} {r.dtype} of {r.owner}: {r.verdict}, {figures}"
    if isinstance(r, CollectiveRow):
        figures = (
            f"predicted {r.predicted_count:,} calls and {r.predicted_bytes:,} B, "
            f"measured {r.measured_count:,} and {r.measured_bytes:,} B"
        )
        return f"{r.op} {r.dtype} on {r.group}, step {r.step}: {r.verdict}, {figures}"
    return f"{r.kind} {r.name}: {r.verdict}, predicted {r.predicted or 'none'}, measured {r.measured or 'none'}"


def summary_line(result: Reconciliation) -> str:
    """The verdict in one line, computed from the rows."""
    bad = result.differences()
    resident = [r for r in bad if isinstance(r, ResidentRow)]
    calls = [r for r in bad if isinstance(r, CollectiveRow)]
    layout = [r for r in bad if isinstance(r, LayoutRow)]
    n_ranks = len({(r.run, r.rank) for r in result.layout})
    n_bytes = sum(abs(r.residual_bytes) for r in resident)
    n_calls = sum(abs(r.measured_count - r.predicted_count) or r.measured_count for r in calls)
    runs = "all " * (len(result.runs) > 1) + _plural(len(result.runs), "run")
    text = f"{runs}, {_plural(n_ranks, 'rank')}: {_plural(n_bytes, 'byte')}, {_plural(n_calls, 'call')} unexplained"
    if layout:
        text += f", {len(layout)} coordinates or groups differ"
    return text


def _plural(count: int, one: str) -> str:
    return f"{count:,} {one}{'' if count == 1 else 's'}"
