"""How much two correct runs may differ: measured on reference runs that differ in the order of their sums only."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train_ledger.spec.errors import DataError
from train_ledger.spec.io import read_json

from .problem import Problem

SCHEMA = "train-ledger/reference/1"

#: A difference is accepted up to five times the root mean square of what a change of summation order alone makes: five
#: standard deviations, the usual threshold where some thousand numbers are looked at and none may be wrong by chance.
DEVIATIONS = 5.0

#: Losses and norms are fp32 numbers when they are reported: two units in the last place are no difference.
RESOLUTION = 2.0**-22

#: Besides, the losses of the first step, before anything can drift, are within this, relative.
FIRST_STEP_LOSS = 1e-3


@dataclass(frozen=True)
class Bound:
    """Largest accepted |difference|: `DEVIATIONS` times the `rms` of `samples` measured ones.

    `quantity` is `loss` or `grad_norm` (relative, of every step; at least `RESOLUTION`) or `update` (of tensors of one
    `kind`, see `kind_of`; at least the median kind's; holds for `difference.Difference`'s `update` and `along`).
    """

    quantity: str
    kind: str
    left_dtype: str
    right_dtype: str
    bound: float
    rms: float
    samples: int
    source: str


@dataclass(frozen=True)
class Bounds:
    """The bounds between two types of compute."""

    loss: Bound
    grad_norm: Bound
    update: Mapping[str, Bound]

    def of_tensor(self, name: str) -> float:
        """Bound of a trained tensor's `update` and |`along`|."""
        return self.update[kind_of(name)].bound

    def all(self) -> list[Bound]:
        """All of them, for the record."""
        return [self.loss, self.grad_norm, *self.update.values()]


@dataclass(frozen=True)
class Reference:
    """A reference file: the problem, its runs as in the file, and where it lies."""

    problem: Problem
    runs: tuple[Mapping[str, Any], ...]
    folder: Path

    def plain(self, dtype: str) -> Mapping[str, Any] | None:
        """The first run of a compute type, to which the reordered ones of that type are compared."""
        return next((r for r in self.runs if r["dtype"] == dtype), None)


def read_reference(path: str | Path, problem: Problem) -> Reference:
    """A reference file, checked to be of this problem.

    Raises:
        DataError: missing, truncated, of another problem, or without a loss for each step.
    """
    data = read_json(path, SCHEMA, "reference")
    if data["problem_sha256"] != problem.sha256():
        raise DataError("is of another model, seed, batch or optimizer than the runs", file=path, key="problem_sha256")
    if data["problem"] != json.loads(json.dumps(problem.to_dict())):
        raise DataError("is not the problem that problem_sha256 is of", file=path, key="problem")
    names = [run["name"] for run in data["runs"]]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise DataError(f"{name[:50]!r} is there twice", file=path, key=f"runs[{i}].name")
    for i, run in enumerate(data["runs"]):
        for key in ("losses", "grad_norms"):
            if len(run[key]) != problem.steps:
                raise DataError(f"has {len(run[key])} of {problem.steps} steps", file=path, key=f"runs[{i}].{key}")
    return Reference(Problem.from_dict(data["problem"]), tuple(data["runs"]), Path(path).parent)


def kind_of(name: str) -> str:
    """A tensor's name without the number of its layer.

    Kinds have bounds of their own: how far rounding moves a tensor depends on its gradient. A key bias without rotary
    positions is the extreme: softmax cancels it, its true gradient is 0, and AdamW makes full steps of rounding noise.
    """
    return re.sub(r"\.layers\.\d+\.", ".layers.*.", name)


def measure(reference: Reference, left_dtype: str, right_dtype: str) -> Bounds:
    """The bounds between runs that compute in these two types.

    Between runs of one type: from the reordered reference runs against the plain one. Between two types: from all bf16
    runs against the plain fp32 one.

    Raises:
        DataError: the reference holds no two runs to measure it on.
    """
    mixed = left_dtype != right_dtype
    file = reference.folder / "reference.json"
    base = reference.plain("float32" if mixed else left_dtype)
    dtype = "bfloat16" if mixed else left_dtype
    others = [r for r in reference.runs if r["dtype"] == dtype and r is not base]
    if base is None or not others:
        raise DataError(f"holds no runs to measure {left_dtype} against {right_dtype}", file=file, key="runs")
    names = ", ".join(r["name"] for r in others)
    source = f"{DEVIATIONS:g} x the root mean square difference of {names} from {base['name']}"

    def bound(quantity: str, kind: str, values: Sequence[float], least: float) -> Bound:
        limit = max(DEVIATIONS * _rms(values), least)
        return Bound(quantity, kind, left_dtype, right_dtype, limit, _rms(values), len(values), source)

    updates: dict[str, list[float]] = {}
    without_weights = not any(r["compared_to"] for r in reference.runs)  # `reference --no-weights`
    for other in () if without_weights else others:
        if base["name"] not in other["compared_to"]:
            raise DataError(f"{other['name']} was not compared to {base['name']}", file=file, key="compared_to")
        for name, (update, _, _) in other["compared_to"][base["name"]].items():
            updates.setdefault(kind_of(name), []).append(update)
    # A kind has few samples, and by chance none of them may hold an element whose first gradient is so near to 0 that
    # rounding decides its sign, which decides AdamW's first step. So no kind is held to less than the median kind.
    typical = DEVIATIONS * statistics.median(_rms(values) for values in updates.values()) if updates else 0.0
    return Bounds(
        bound("loss", "", [v for o in others for v in relative(o["losses"], base["losses"])], RESOLUTION),
        bound("grad_norm", "", [v for o in others for v in relative(o["grad_norms"], base["grad_norms"])], RESOLUTION),
        {kind: bound("update", kind, values, typical) for kind, values in updates.items()},
    )


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(v * v for v in values) / len(values))


def relative(left: Iterable[float], right: Iterable[float]) -> list[float]:
    """(left - right) / |right|, one by one."""
    return [(a - b) / abs(b) if b else float(a != b) for a, b in zip(left, right, strict=True)]
