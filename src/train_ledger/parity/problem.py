"""What a run trains, apart from how: runs of one problem must agree, whatever their framework and layout."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from train_ledger.spec.errors import ConfigError
from train_ledger.spec.model import ModelShape
from train_ledger.spec.run import Optimizer, Run

#: What the first loss and the first gradient norm depend on; the rest of a problem acts from the second step on.
_FIRST_STEP = ("model", "seed", "seq_length", "global_batch")


@dataclass(frozen=True)
class Problem:
    """Model, data and optimizer. `steps` belongs to it: the learning rate decays over them."""

    model: ModelShape
    seed: int
    seq_length: int
    global_batch: int
    steps: int
    optimizer: Optimizer

    @classmethod
    def of(cls, run: Run) -> Problem:
        """The problem that a run works on."""
        return cls(run.model, run.seed, run.seq_length, run.global_batch, run.steps, run.optimizer)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Problem:
        """The inverse of `to_dict`."""
        return cls(**{**data, "model": ModelShape(**data["model"]), "optimizer": Optimizer(**data["optimizer"])})

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON and for hashing."""
        return asdict(self)

    def sha256(self) -> str:
        """Identity of the problem."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class Selection:
    """Which runs of a comparison are compared.

    `first_step` and `left_out` say why, by run: the first are compared at step 1 only, the others only shown.
    """

    problem: Problem
    compared: tuple[str, ...]
    first_step: Mapping[str, str]
    left_out: Mapping[str, str]


def select(runs: Mapping[str, Run]) -> Selection:
    """Choose the problem that most runs work on (the first of them if several) and say how the others differ from it.

    Raises:
        ConfigError: no run trains anything (world `fake` receives nothing from its peers).
    """
    real = {name: Problem.of(run) for name, run in runs.items() if run.world != "fake"}
    if not real:
        raise ConfigError("no run of this comparison trains: in world fake, losses mean nothing", key="world")
    often = Counter(p.sha256() for p in real.values())
    most = max(often.values())
    problem = next(p for p in real.values() if often[p.sha256()] == most)
    compared, first, out = [], {}, {name: "world fake" for name in runs if name not in real}
    for name, other in real.items():
        differs = _differences(problem, other)
        if not differs:
            compared.append(name)
        elif all(key.split(".")[0] not in _FIRST_STEP for key in differs):
            first[name] = "; ".join(differs.values())
        else:
            out[name] = "; ".join(differs.values())
    return Selection(problem, tuple(compared), first, out)


def _differences(problem: Problem, other: Problem) -> dict[str, str]:
    """Dotted key to a sentence, for each key in which `other` is not `problem`."""

    def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in data.items():
            out.update(flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
        return out

    ours, theirs = flat(problem.to_dict()), flat(other.to_dict())
    keys = [k for k in {**ours, **theirs} if ours.get(k) != theirs.get(k)]
    return {k: f"{k} is {theirs.get(k)}, not {ours.get(k)}" for k in keys}
