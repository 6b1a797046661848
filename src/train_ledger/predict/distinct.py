"""Ranks that keep and send the same, predicted once: a world of 16,384 ranks has a few dozen kinds of rank."""

from __future__ import annotations

from collections.abc import Hashable

from train_ledger.predict import framework, predict
from train_ledger.spec.ledger import Prediction
from train_ledger.spec.run import Run


def rank_classes(run: Run) -> list[tuple[int, ...]]:
    """The ranks that are alike (`rank_class` of the run's framework), ordered by their first rank.

    Raises:
        ConfigError: the framework refuses the run.
    """
    module = framework(run)
    module.check(run)
    classes: dict[Hashable, list[int]] = {}
    for rank in range(run.world_size):
        classes.setdefault(module.rank_class(run, rank), []).append(rank)
    return [tuple(ranks) for ranks in classes.values()]


def predict_distinct(run: Run, step: str = "steady") -> tuple[Prediction, list[tuple[int, ...]]]:
    """The prediction of one rank of each class, and the ranks that each stands for, in the same order."""
    classes = rank_classes(run)
    return predict(run, [ranks[0] for ranks in classes], step), classes


def ranges(ranks: tuple[int, ...]) -> str:
    """Ascending ranks in short: `0-3,8`; with a stride, `0-12:4` is 0, 4, 8, 12."""
    parts = []
    i = 0
    while i < len(ranks):
        stride = ranks[i + 1] - ranks[i] if i + 1 < len(ranks) else 1
        j = i
        while j + 1 < len(ranks) and ranks[j + 1] - ranks[j] == stride:
            j += 1
        if j == i or (stride > 1 and j == i + 1):
            parts.append(str(ranks[i]))
            i += 1
            continue
        parts.append(f"{ranks[i]}-{ranks[j]}" + (f":{stride}" if stride > 1 else ""))
        i = j + 1
    return ",".join(parts)
