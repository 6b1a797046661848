"""Worlds: how the ranks of a run start. One module each, found by name here.

A world's module offers `run_ranks(job)`: it starts every rank of `job.ranks`, each of which calls `loop.run_rank`, and
returns when all have written their file into `job.directory`, or raises LaunchError when one did not. Either way no
process of it is left.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train_ledger.spec.errors import ConfigError
from train_ledger.spec.run import Run

WORLDS: dict[str, str] = {
    "cpu": "train_ledger.launch.worlds.cpu",
    "fake": "train_ledger.launch.worlds.fake",
    "shared": "train_ledger.launch.worlds.shared",
    "nccl": "train_ledger.launch.worlds.nccl",
}


@dataclass(frozen=True)
class Job:
    """What a world is asked to do.

    Args:
        run: resolved.
        ranks: the ranks to start; all of them but in the `fake` world.
        directory: a folder of this launch alone: rank files and logs go there.
        timeout_s: after so many seconds everything is ended.
        weights: canonical weights to start from, or None for the framework's own initialisation.
        export: also write the trained weights.
        device: `cpu` or `cuda`; only the `fake` world takes either.
        at_once: how many ranks of the `fake` world run at the same time; None leaves it to the world.
    """

    run: Run
    ranks: tuple[int, ...]
    directory: Path
    timeout_s: float
    weights: Path | None = None
    export: bool = False
    device: str = "cpu"
    at_once: int | None = None


def world(name: str) -> Any:
    """The module of a world.

    Raises:
        ConfigError: there is no such world.
    """
    if name not in WORLDS:
        raise ConfigError(f"there is no world {name!r}; known: {', '.join(WORLDS)}", key="world")
    return importlib.import_module(WORLDS[name])
