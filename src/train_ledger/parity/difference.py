"""How trained weights differ, tensor by tensor, and the trained weights of a run put together from its ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from train_ledger.spec.errors import DataError
from train_ledger.spec.model import ModelShape, canonical_tensors
from train_ledger.spec.tensorfile import TensorFile

#: `get(name)` is the whole tensor, fp32, flat.
Get = Callable[[str], np.ndarray]

_CHUNK = 1 << 22  # elements that are taken to float64 at once


@dataclass(frozen=True)
class Difference:
    """One tensor of two runs, `left` - `right`, in units that are alike for tensors of any size.

    Args:
        update: norm of the difference over the norm of what training changed in the reference. Two unrelated trainings
            give about 1.4, rounding some percent.
        along: signed component of the difference along the initial tensor, over the norm of the change and times the
            root of the number of elements, so that a difference without direction gives about `update`. Weight decay
            that one of the two did not apply has that very direction, and stands out.
        max_abs: largest difference of an element.
    """

    update: float
    along: float
    max_abs: float


def difference(left: np.ndarray, right: np.ndarray, initial: np.ndarray, trained: np.ndarray) -> Difference:
    """Compare two flat tensors; `initial` is where both began, `trained` where the reference ended. Sums in float64."""
    squares = changed = inner = length = largest = 0.0
    for at in range(0, left.size, _CHUNK):
        part = slice(at, at + _CHUNK)
        start = initial[part].astype(np.float64)
        delta = left[part].astype(np.float64) - right[part]
        step = trained[part] - start
        squares += float(delta @ delta)
        changed += float(step @ step)
        inner += float(delta @ start)
        length += float(start @ start)
        largest = max(largest, float(np.abs(delta).max()))
    if not changed:  # a tensor that training did not touch must not differ at all
        return Difference(float(squares > 0), 0.0, largest)
    along = inner * math.sqrt(left.size / (length * changed)) if length else 0.0
    return Difference(math.sqrt(squares / changed), along, largest)


def tensor_file(path: str | Path, model: ModelShape) -> Get:
    """Tensors of one safetensors file.

    Raises (also `get`):
        DataError: missing file; a tensor that is missing, truncated or of another shape, by name.
    """
    file = TensorFile(path)
    return _getter({t.name: file for t in canonical_tensors(model)}, model)


def _getter(where: Mapping[str, TensorFile], model: ModelShape) -> Get:
    shapes = {t.name: t.shape for t in canonical_tensors(model)}

    def get(name: str) -> np.ndarray:
        if name not in where:
            raise DataError("is in no rank's weights", key=name)
        return np.frombuffer(where[name].data(name, "F32", shapes[name]), dtype=np.float32)

    return get


@dataclass(frozen=True)
class Exported:
    """The trained weights of a run, over all its ranks. `get` gives the tensors that are there exactly once."""

    get: Get
    missing: tuple[str, ...]
    double: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Every canonical name is there, on exactly one rank, and nothing else is."""
        return not (self.missing or self.double or self.unknown)


def exported(files: Sequence[Path], model: ModelShape) -> Exported:
    """Put the ranks' files together and account for every name.

    Raises:
        DataError: a file that cannot be read; a tensor that is truncated or of another shape, by name.
    """
    wanted = {t.name: t.shape for t in canonical_tensors(model)}
    where: dict[str, TensorFile] = {}
    double, unknown = [], []
    for path in files:
        file = TensorFile(path)
        for name in file.names():
            if name not in wanted:
                unknown.append(name)
            elif name in where:
                double.append(name)
            else:
                file.data(name, "F32", wanted[name])
                where[name] = file
    missing = [name for name in wanted if name not in where]
    return Exported(_getter(where, model), tuple(missing), tuple(double), tuple(unknown))
