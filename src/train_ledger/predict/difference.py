"""What changes between two predictions, container by container and call by call."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from train_ledger.predict.table import WIDTH, collectives_by_kind, columns, group_sizes
from train_ledger.spec.ledger import Prediction, RankLedger


@dataclass(frozen=True)
class ContainerChange:
    """A container on the rank that keeps most, before and after, bytes. `dtype` reads `a -> b` where it changed."""

    name: str
    dtype: str
    before_bytes: int
    after_bytes: int


@dataclass(frozen=True)
class CallChange:
    """Calls of one kind by the rank that keeps most in one step: count, and bytes that it sends in a ring."""

    op: str
    group: str
    dtype: str
    before_count: int
    after_count: int
    before_wire_bytes: int
    after_wire_bytes: int


@dataclass(frozen=True)
class Difference:
    """Both sides by the rank that keeps most, which need not be the same rank."""

    before_rank: int
    after_rank: int
    containers: tuple[ContainerChange, ...]
    calls: tuple[CallChange, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "before_rank": self.before_rank,
            "after_rank": self.after_rank,
            "containers": [vars(c) for c in self.containers],
            "calls": [vars(c) for c in self.calls],
        }


def heaviest(prediction: Prediction) -> RankLedger:
    """The first rank of those that keep most."""
    return max(prediction.ranks, key=lambda ledger: ledger.resident_bytes)


def difference(before: Prediction, after: Prediction) -> Difference:
    """Container by container and kind of call by kind of call, rows of both sides in order of first appearance."""
    a, b = heaviest(before), heaviest(after)
    sums = [_containers(x) for x in (a, b)]
    containers = []
    for name in dict.fromkeys([*sums[0], *sums[1]]):
        (old_type, old), (new_type, new) = (s.get(name, ("", 0)) for s in sums)
        dtype = new_type if old_type in ("", new_type) else old_type if not new_type else f"{old_type} -> {new_type}"
        containers.append(ContainerChange(name, dtype, old, new))
    kinds = [_calls(p, x) for p, x in ((before, a), (after, b))]
    calls = []
    for key in dict.fromkeys([*kinds[0], *kinds[1]]):
        (old_count, old_wire), (new_count, new_wire) = (k.get(key, (0, 0)) for k in kinds)
        calls.append(CallChange(*key, old_count, new_count, old_wire, new_wire))
    return Difference(a.rank, b.rank, tuple(containers), tuple(calls))


def _containers(ledger: RankLedger) -> dict[str, tuple[str, int]]:
    out: dict[str, tuple[str, int]] = {}
    for c in ledger.containers:
        dtype, n_bytes = out.get(c.name, (c.dtype, 0))
        out[c.name] = (dtype if c.dtype in dtype.split("+") else f"{dtype}+{c.dtype}", n_bytes + c.bytes)
    return out


def _calls(prediction: Prediction, ledger: RankLedger) -> dict[tuple[str, str, str], tuple[int, int]]:
    sizes = group_sizes(prediction.groups, [ledger.rank])
    wire: dict[tuple[str, str, str], float] = {}
    for c in ledger.collectives:
        key = (c.op, c.group, c.dtype)
        wire[key] = wire.get(key, 0.0) + c.wire_bytes(sizes.get((ledger.rank, c.group), 1))
    return {key: (count, round(wire[key])) for key, (count, _) in collectives_by_kind(ledger.collectives).items()}


def difference_table(d: Difference, names: Sequence[str]) -> str:
    """The difference as text; rows that are equal are left out and counted."""
    changed = [c for c in d.containers if c.before_bytes != c.after_bytes or "->" in c.dtype]
    rows = [["container", "dtype", "before, bytes", "after, bytes", "change, bytes", ""]]
    for row in changed:
        rows.append([row.name, row.dtype, *_numbers(row.before_bytes, row.after_bytes)])
    total = [sum(c.before_bytes for c in d.containers), sum(c.after_bytes for c in d.containers)]
    rows.append(["all containers", "", *_numbers(*total)])
    parts = [
        "\n".join(
            textwrap.fill(f"{side}: {name}, rank {rank}", WIDTH, subsequent_indent="    ")
            for side, name, rank in (("before", names[0], d.before_rank), ("after", names[1], d.after_rank))
        ),
        f"(each by the rank that keeps most; {len(d.containers) - len(changed)} containers are equal)",
        columns(rows, "<<>>>>"),
    ]
    moved = [c for c in d.calls if (c.before_count, c.before_wire_bytes) != (c.after_count, c.after_wire_bytes)]
    rows = [["call", "group", "dtype", "calls", "-> calls", "wire, bytes", "-> wire, bytes"]]
    for c in moved:
        counts = [f"{n:,}" for n in (c.before_count, c.after_count, c.before_wire_bytes, c.after_wire_bytes)]
        rows.append([c.op, c.group, c.dtype, *counts])
    sums = [
        sum(getattr(c, f"{side}_{what}") for c in d.calls)
        for what in ("count", "wire_bytes")
        for side in ("before", "after")
    ]
    rows.append(["all calls", "", "", *(f"{n:,}" for n in sums)])
    parts += [f"(of one step; {len(d.calls) - len(moved)} kinds of call are equal)", columns(rows, "<<<>>>>")]
    return "\n\n".join(parts)


def _numbers(before: int, after: int) -> list[str]:
    share = f"{(after - before) / before:+.1%}" if before else "new"
    return [f"{before:,}", f"{after:,}", f"{after - before:+,}", "gone" if not after and before else share]
