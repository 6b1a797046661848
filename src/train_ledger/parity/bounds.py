"""How much two correct runs may differ: measured on reference runs that differ in the order of their sums only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train_ledger.spec.errors import DataError
from train_ledger.spec.io import read_json

from .problem import Problem

SCHEMA = "train-ledger/reference/1"
QUANTITIES = ("loss", "grad_norm", "update", "along")

#: A difference is accepted up to five times the root mean square of what a change of summation order alone makes: five
#: standard deviations, the usual threshold where some thousand numbers are looked at and none may be wrong by chance.
DEVIATIONS = 5.0

#: Losses and norms are fp32 numbers when they are reported: two units in the last place are no difference.
RESOLUTION = 2.0**-22

#: Besides, the losses of the first step, before anything can drift, are within this, relative.
FIRST_STEP_LOSS = 1e-3


@dataclass(frozen=True)
class Bound:
    """Largest accepted |difference| of a quantity: `DEVIATIONS` times the `rms` of `samples` measured ones, at least
    `RESOLUTION` for losses and norms, which are relative."""

    quantity: str
    left_dtype: str
    right_dtype: str
    bound: float
    rms: float
    samples: int
    source: str


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
    for i, run in enumerate(data["runs"]):
        for key in ("losses", "grad_norms"):
            if len(run[key]) != problem.steps:
                raise DataError(f"has {len(run[key])} of {problem.steps} steps", file=path, key=f"runs[{i}].{key}")
    return Reference(Problem.from_dict(data["problem"]), tuple(data["runs"]), Path(path).parent)


def measure(reference: Reference, left_dtype: str, right_dtype: str) -> dict[str, Bound]:
    """The bound of each quantity of `QUANTITIES` between runs that compute in these two types.

    Between runs of one type: from the reordered reference runs against the plain one. Between two types: from all bf16
    runs against the plain fp32 one.

    Raises:
        DataError: the reference holds no two runs to measure it on.
    """
    mixed = left_dtype != right_dtype
    base = reference.plain("float32" if mixed else left_dtype)
    kind = "bfloat16" if mixed else left_dtype
    others = [r for r in reference.runs if r["dtype"] == kind and r is not base]
    if base is None or not others:
        raise DataError(
            f"holds no runs to measure {left_dtype} against {right_dtype}", file=reference.folder / "reference.json"
        )
    names = ", ".join(r["name"] for r in others)
    out = {}
    compared = any(r["compared_to"] for r in reference.runs)  # else the reference was made without weights
    for quantity in QUANTITIES if compared else ("loss", "grad_norm"):
        values = [v for other in others for v in _samples(quantity, other, base)]
        rms = math.sqrt(math.fsum(v * v for v in values) / len(values))
        source = f"{DEVIATIONS:g} x the root mean square difference of {names} from {base['name']}"
        bound = DEVIATIONS * rms
        if quantity in ("loss", "grad_norm"):
            bound = max(bound, RESOLUTION)
        out[quantity] = Bound(quantity, left_dtype, right_dtype, bound, rms, len(values), source)
    return out


def _samples(quantity: str, run: Mapping[str, Any], base: Mapping[str, Any]) -> Sequence[float]:
    if quantity == "loss":
        return relative(run["losses"], base["losses"])
    if quantity == "grad_norm":
        return relative(run["grad_norms"], base["grad_norms"])
    by_tensor = run["compared_to"].get(base["name"], {})
    if not by_tensor:
        raise DataError(f"{run['name']} was not compared to {base['name']}", key="compared_to")
    return [t[0 if quantity == "update" else 1] for t in by_tensor.values()]


def relative(left: Iterable[float], right: Iterable[float]) -> list[float]:
    """(left - right) / |right|, one by one."""
    return [(a - b) / abs(b) if b else float(a != b) for a, b in zip(left, right, strict=True)]
