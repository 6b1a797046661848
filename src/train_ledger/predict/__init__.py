"""Prediction: what each rank keeps resident and what it sends in a step. Pure Python, no torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from train_ledger.spec.errors import ConfigError
from train_ledger.spec.ledger import Prediction
from train_ledger.spec.registry import FRAMEWORKS
from train_ledger.spec.run import Run


def framework(run: Run) -> Any:
    """The predicting module of the run's framework."""
    return importlib.import_module(FRAMEWORKS[run.framework].predict)


def predict(run: Run, ranks: Iterable[int] | None = None, step: str = "steady") -> Prediction:
    """The exact prediction of a run.

    Args:
        run: resolved.
        ranks: which ranks; None means all.
        step: `steady`, `first` (what a framework does once) or `log` (a step that logs).

    Raises:
        ConfigError: the layout is one that the framework refuses or that is not modelled; a rank outside the world.
    """
    module = framework(run)
    module.check(run)
    wanted = range(run.world_size) if ranks is None else list(ranks)
    for rank in wanted:
        if not 0 <= rank < run.world_size:
            raise ConfigError(
                f"{rank} is not a rank of a world of {run.world_size}", file=run.source or None, key="rank"
            )
    return Prediction(
        run=run.name,
        framework=run.framework,
        world_size=run.world_size,
        groups=tuple(module.groups(run)),
        ranks=tuple(module.rank_ledger(run, rank, step) for rank in wanted),
        step=step,
        config_sha256=run.sha256(),
        extra={"config": run.to_dict()},
    )
