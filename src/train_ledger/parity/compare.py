"""Every pair of runs of one problem, step by step and tensor by tensor, each difference with its bound."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from train_ledger.spec.errors import DataError
from train_ledger.spec.io import write_json, write_text
from train_ledger.spec.launched import read_launch
from train_ledger.spec.model import ModelShape, canonical_tensors
from train_ledger.spec.run import Run
from train_ledger.spec.steps import global_steps

from .bounds import FIRST_STEP_LOSS, Bounds, Reference, measure, relative
from .difference import Exported, Get, difference, exported, tensor_file
from .problem import Selection

SCHEMA = "train-ledger/parity/1"

Row = dict[str, Any]


def _step_columns(quantity: str) -> tuple[str, ...]:
    gap = ("abs_difference", "rel_difference", "bound", "verdict")
    return ("left", "right", "step", f"left_{quantity}", f"right_{quantity}", *gap)


#: Columns of each table, in file order.
COLUMNS = {
    "curves": ("run", "step", "loss", "grad_norm"),
    "losses": _step_columns("loss"),
    "grad_norms": _step_columns("grad_norm"),
    "weights": (*("left", "right", "tensor", "numel", "update", "along", "max_abs", "bound", "verdict"),),
}


@dataclass
class Party:
    """One side of a pair: losses and norms by step, of which `steps` are compared, and the weights that were exported.

    `get` reads trained weights; None where they are not complete, or not comparable since the optimizer differs.
    """

    name: str
    framework: str
    dtype: str
    losses: dict[int, float]
    grad_norms: dict[int, float]
    steps: frozenset[int]
    weights: Exported | None = None
    get: Get | None = None


@dataclass
class Result:
    """What the stage writes: the four tables, and `parity.json`."""

    curves: list[Row] = field(default_factory=list)
    losses: list[Row] = field(default_factory=list)
    grad_norms: list[Row] = field(default_factory=list)
    weights: list[Row] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)


def compute_dtype(run: Run) -> str:
    """Type of the matrix products: bfloat16 but for torchtitan's `mixed_precision_param`."""
    return str(run.settings.get("mixed_precision_param", "bfloat16"))


def read_party(run: Run, launch_dir: Path, steps: Sequence[int]) -> Party:
    """What a launch measured, and the weights that its ranks exported.

    Raises:
        DataError: no finished launch; a rank file that is missing, truncated or of another configuration; a tensor
            that is truncated or of another shape.
    """
    launch = read_launch(launch_dir)
    if launch.meta["config_sha256"] != run.sha256():
        raise DataError("is of another configuration of this run", file=launch_dir / "run.json", key="config_sha256")
    combined = global_steps(launch.ranks)
    files = [launch_dir / f"weights{rank['rank']}.safetensors" for rank in launch.ranks]
    files = [f for f in files if f.exists()]
    weights = exported(files, run.model) if files else None
    return Party(
        name=run.name,
        framework=run.framework,
        dtype=compute_dtype(run),
        losses={s.step: s.loss for s in combined if s.loss is not None},
        grad_norms={s.step: s.grad_norm for s in combined if s.grad_norm is not None},
        steps=frozenset(steps),
        weights=weights,
        get=weights.get if weights and weights.complete else None,
    )


def reference_parties(reference: Reference) -> list[Party]:
    """The plain reference runs, one a compute type, whose weights were kept."""
    out = []
    every = range(1, reference.problem.steps + 1)
    for dtype in ("bfloat16", "float32"):
        run = reference.plain(dtype)
        if run is not None:
            get = tensor_file(reference.folder / run["weights"], reference.problem.model) if run["weights"] else None
            losses, norms = (dict(zip(every, run[k], strict=True)) for k in ("losses", "grad_norms"))
            out.append(Party(f"reference-{run['name']}", "reference", dtype, losses, norms, frozenset(every), get=get))
    return out


def compare(
    runs: Mapping[str, Run],
    selection: Selection,
    launch_dirs: Mapping[str, Path],
    reference: Reference,
    initial: Get,
    *,
    need_weights: bool = True,
) -> Result:
    """All pairs of the comparison, with bounds and verdicts.

    Args:
        runs: resolved, by name.
        selection: which of them are compared (`problem.select`).
        launch_dirs: folder of each run's finished launch.
        reference: the reference of `selection.problem`.
        initial: the canonical weights that all began with.
        need_weights: whether a run that exported no weights is a failure.

    Raises:
        DataError: a file that is missing, truncated or of something else.
    """
    problem, result, failures = selection.problem, Result(), list[str]()
    every = range(1, problem.steps + 1)
    parties = [read_party(runs[name], launch_dirs[name], every) for name in selection.compared]
    for name in selection.first_step:
        party = read_party(runs[name], launch_dirs[name], [1])
        party.get = None
        parties.append(party)
    shown = [read_party(runs[n], launch_dirs[n], []) for n in selection.left_out if runs[n].world != "fake"]
    references = reference_parties(reference)
    for party in parties:
        failures += _incomplete(party)
        if need_weights and party.weights is None:
            failures.append(f"{party.name} exported no weights")
    bounds: dict[tuple[str, str], Bounds] = {}
    pairs = []
    for left, right in _pairs(parties, references):
        types = (left.dtype, right.dtype)
        if types not in bounds:
            bounds[types] = measure(reference, *types)
        pairs.append(_compare_pair(left, right, bounds[types], problem.model, initial, references, result))
    failures += [f"{p['left']} and {p['right']} differ: {p['why']}" for p in pairs if p["why"]]
    for party in [*parties, *shown, *references]:
        for step in sorted(party.losses):
            norm = party.grad_norms.get(step)
            result.curves.append({"run": party.name, "step": step, "loss": party.losses[step], "grad_norm": norm})
    result.summary = {
        "schema": SCHEMA,
        "verdict": "differs" if failures else "equal",
        "problem_sha256": problem.sha256(),
        "steps": problem.steps,
        "runs": [_describe(runs[n], selection, {p.name: p for p in [*parties, *shown]}.get(n)) for n in runs],
        "references": [r.name for r in references],
        "bounds": [asdict(b) for group in bounds.values() for b in group.all()],
        "pairs": pairs,
        "failures": failures,
    }
    return result


def _pairs(parties: Sequence[Party], references: Sequence[Party]) -> Iterator[tuple[Party, Party]]:
    """Run with run, then run with reference."""
    yield from itertools.combinations(parties, 2)
    yield from itertools.product(parties, references)


def _incomplete(party: Party) -> list[str]:
    out = []
    for what, have in (("loss", party.losses), ("gradient norm", party.grad_norms)):
        gone = sorted(party.steps - set(have))
        if gone:
            out.append(f"{party.name} reports no {what} of steps {gone[:5]}{' ...' if len(gone) > 5 else ''}")
    if party.weights and not party.weights.complete:
        w = party.weights
        for what, names in (
            ("is exported by no rank", w.missing),
            ("comes twice", w.double),
            ("is unknown", w.unknown),
        ):
            out += [f"{party.name}: tensor {name} {what}" for name in names[:3]]
    return out


def _compare_pair(
    left: Party,
    right: Party,
    bounds: Bounds,
    model: ModelShape,
    initial: Get,
    references: Sequence[Party],
    result: Result,
) -> dict[str, Any]:
    """Adds the pair's rows to `result`. Returns its line of the summary, with `why` it differs ('' if it does not)."""
    out: dict[str, Any] = {"left": left.name, "right": right.name}
    why: list[str] = []
    for quantity, table, a, b, limit in (
        ("loss", result.losses, left.losses, right.losses, bounds.loss.bound),
        ("grad_norm", result.grad_norms, left.grad_norms, right.grad_norms, bounds.grad_norm.bound),
    ):
        rows = []
        for step in sorted(left.steps & right.steps & set(a) & set(b)):
            first = quantity == "loss" and step == 1
            rows.append(
                _row(left, right, quantity, step, a[step], b[step], min(limit, FIRST_STEP_LOSS) if first else limit)
            )
        table += rows
        out[quantity] = _worst(rows, "rel_difference", "step")
        wrong = [r for r in rows if r["verdict"] != "equal"]
        why += [f"{quantity} of step {r['step']} by {r['rel_difference']:.2e}" for r in wrong[:1]]
    rows = _weight_rows(left, right, bounds, model, initial, references)
    result.weights += rows
    for quantity in ("update", "along"):
        out[quantity] = _worst(rows, quantity, "tensor")
    wrong = [r for r in rows if r["verdict"] != "equal"]
    if wrong:
        worst = max(wrong, key=lambda r: r["update"] / r["bound"] if r["bound"] else math.inf)
        why.append(
            f"{len(wrong)} of {len(rows)} trained tensors, {worst['tensor']} most ({worst['update']:.2e} of its update)"
        )
    return {**out, "verdict": "differs" if why else "equal", "why": "; ".join(why)}


def _row(left: Party, right: Party, quantity: str, step: int, a: float, b: float, limit: float) -> Row:
    gap = abs(a - b)
    (scaled,) = map(abs, relative([a], [b]))
    return {
        "left": left.name,
        "right": right.name,
        "step": step,
        f"left_{quantity}": a,
        f"right_{quantity}": b,
        "abs_difference": gap,
        "rel_difference": scaled,
        "bound": limit,
        "verdict": "equal" if scaled <= limit else "differs",
    }


def _weight_rows(
    left: Party, right: Party, bounds: Bounds, model: ModelShape, initial: Get, references: Sequence[Party]
) -> list[Row]:
    """Name by name, where both have trained weights that can be compared."""
    trained = next((r.get for r in reversed(references) if r.get), None)  # fp32 if there is one
    if left.get is None or right.get is None or trained is None:
        return []
    rows = []
    for tensor in canonical_tensors(model):
        arrays = [get(tensor.name) for get in (left.get, right.get, initial, trained)]
        d = difference(*arrays)
        limit = bounds.of_tensor(tensor.name)
        rows.append(
            {
                "left": left.name,
                "right": right.name,
                "tensor": tensor.name,
                "numel": tensor.numel,
                "update": d.update,
                "along": d.along,
                "max_abs": d.max_abs,
                "bound": limit,
                "verdict": "equal" if max(d.update, abs(d.along)) <= limit else "differs",
            }
        )
    return rows


def _worst(rows: Sequence[Row], key: str, where: str) -> dict[str, Any] | None:
    """The row that comes nearest to its bound, or goes furthest beyond."""
    if not rows:
        return None
    row = max(rows, key=lambda r: abs(r[key]) / r["bound"] if r["bound"] else math.inf)
    return {"worst": row[key], "at": row[where], "bound": row["bound"]}


def _describe(run: Run, selection: Selection, party: Party | None) -> dict[str, Any]:
    """One run's line in the summary."""
    how = "all" if run.name in selection.compared else "first_step" if run.name in selection.first_step else "no"
    w = party.weights if party else None
    names = None
    if w:
        expected = len(canonical_tensors(run.model))
        names = {"expected": expected, "missing": w.missing, "double": w.double, "unknown": w.unknown}
        names = {k: list(v) if isinstance(v, tuple) else v for k, v in names.items()}
    return {
        "run": run.name,
        "framework": run.framework,
        "dtype": compute_dtype(run),
        "compared": how,
        "reason": selection.first_step.get(run.name) or selection.left_out.get(run.name, ""),
        "weights": names,
    }


def write(result: Result, out_dir: str | Path) -> None:
    """curves.csv, losses.csv, grad_norms.csv, weights.csv and, last, parity.json."""
    for name in ("curves", "losses", "grad_norms", "weights"):
        write_text(Path(out_dir) / f"{name}.csv", _csv(getattr(result, name), COLUMNS[name]))
    write_json(Path(out_dir) / "parity.json", result.summary)


def _csv(rows: Sequence[Row], columns: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
