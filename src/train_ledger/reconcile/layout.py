"""Joins where a rank was predicted to stand with where the framework says it stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import rows
from .core import group_ranks, predicted_rank, spaced
from .rows import LayoutRow

Data = Mapping[str, Any]


def reconcile_layout(prediction: Data, measured: Data) -> list[LayoutRow]:
    """Coordinates and process groups of one rank, one row each.

    A group is compared by name; where a framework names it otherwise, it is enough that some group has the same ranks.
    """
    ledger = predicted_rank(prediction, measured)
    where = {"run": measured["run"], "rank": measured["rank"]}
    out = []
    for name in sorted({*ledger["coords"], *measured["coords"]}):
        pair = [side.get(name) for side in (ledger["coords"], measured["coords"])]
        out.append(_layout_row(where, "coord", name, *("" if v is None else str(v) for v in pair)))
    predicted = group_ranks(prediction, measured["rank"])
    found = {g["name"]: tuple(sorted(g["ranks"])) for g in measured["groups"] if measured["rank"] in g["ranks"]}
    for name in sorted({*predicted, *found}):
        pair = [predicted.get(name), found.get(name)]
        if pair[0] is None and pair[1] in predicted.values():
            pair[0] = pair[1]
        if pair[1] is None and pair[0] in found.values():
            pair[1] = pair[0]
        out.append(_layout_row(where, "group", name, *("" if v is None else spaced(v) for v in pair)))
    return out


def _layout_row(where: Data, kind: str, name: str, predicted: str, measured: str) -> LayoutRow:
    if predicted == measured:
        verdict, cause = rows.EXACT, ""
    elif not measured:
        verdict, cause = rows.MISSING, f"the framework does not tell this {kind}"
    elif not predicted:
        verdict, cause = rows.UNPREDICTED, f"no rule predicts this {kind}"
    else:
        verdict, cause = rows.DIFFERS, "another order of the parallel dimensions"
    return LayoutRow(
        **where, kind=kind, name=name, predicted=predicted, measured=measured, verdict=verdict, cause=cause
    )
