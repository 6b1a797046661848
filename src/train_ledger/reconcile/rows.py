"""The rows of the reconciliation, and the words of their verdicts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

EXACT = "exact"  # predicted and measured agree in every figure that is compared
DIFFERS = "differs"  # both are there, a figure is not equal
MISSING = "missing"  # predicted, not measured
UNPREDICTED = "unpredicted"  # measured, not predicted
SIZES_DIFFER = "sizes differ"  # count and bytes agree, the sizes of the single calls do not
FOREIGN = "not the framework's"  # measured, not predicted, and of a library or the allocator

#: Verdicts that leave nothing of the framework unexplained.
CLEAN = frozenset({EXACT, FOREIGN})

#: Owner of a storage that no container claims.
UNCLAIMED = "unclaimed"

#: Owners other than the framework.
FOREIGN_OWNERS = frozenset({"script", "library", "allocator", UNCLAIMED})

#: Owners whose bytes follow the hardware: a prediction that was made for no device does not know them, and they are
#: listed. All else that was not predicted is a difference, were it one byte.
OF_THE_HARDWARE = frozenset({"library", "allocator"})


@dataclass(frozen=True)
class ResidentRow:
    """One container of one dtype on one rank at a step boundary. `residual_bytes` is measured minus predicted."""

    run: str
    rank: int
    container: str
    predicted_bytes: int
    measured_bytes: int
    residual_bytes: int
    verdict: str
    cause: str
    owner: str
    dtype: str
    predicted_numel: int
    pad_numel: int
    measured_numel: int
    storages: int
    rule: str


@dataclass(frozen=True)
class CollectiveRow:
    """All calls of one op, group and dtype within one step of one rank.

    `predicted_bytes` and `measured_bytes` are payload (the larger of input and output of each call, summed);
    `predicted_wire_bytes` and `measured_wire_bytes` what this rank puts on the wire with a ring. `ranks` are the global
    ranks of the group, with blanks between; `residual_bytes` is measured minus predicted payload.
    """

    run: str
    rank: int
    op: str
    group: str
    dtype: str
    predicted_count: int
    measured_count: int
    predicted_bytes: int
    measured_bytes: int
    residual_bytes: int
    verdict: str
    cause: str
    step: int
    ranks: str
    predicted_wire_bytes: int
    measured_wire_bytes: int


@dataclass(frozen=True)
class LayoutRow:
    """Where a rank stands: one coordinate (`kind` coord) or one process group it is in (`kind` group)."""

    run: str
    rank: int
    kind: str
    name: str
    predicted: str
    measured: str
    verdict: str
    cause: str


def columns(row: type) -> list[str]:
    """Column names of a row class, in file order."""
    return [f.name for f in fields(row)]


def to_dicts(rows: list[Any]) -> list[dict[str, Any]]:
    """Rows as plain dicts, in file order."""
    return [asdict(r) for r in rows]
