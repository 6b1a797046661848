"""Where within a step a call falls: the reconciliation joins calls without their phase, so tests compare it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from train_ledger.reconcile.core import group_ranks


def misplaced(prediction: dict[str, Any], ledger: dict[str, Any], measured: dict[str, Any], step: int) -> list[str]:
    """Calls that fall into another phase of the step than predicted, as text."""
    ranks = group_ranks(prediction, measured["rank"])
    said, seen = Counter[tuple[Any, ...]](), Counter[tuple[Any, ...]]()
    for c in ledger["collectives"]:
        said[c["op"], ranks[c["group"]], c["dtype"], c["in_numel"], c["out_numel"], c["phase"]] += c["count"]
    for c in measured["collectives"]:
        if c["step"] == step:
            key = (c["op"], tuple(c["ranks"]), c["dtype"], c["in_numel"], c["out_numel"], c["phase"])
            seen[key] += c["count"]
    return [f"{key}: predicted {said[key]}, measured {seen[key]}" for key in said | seen if said[key] != seen[key]]
