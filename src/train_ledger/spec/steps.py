"""One loss and one gradient norm a step for a whole run, from what its ranks reported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GlobalStep:
    """`loss` is the mean a token over the global batch, `grad_norm` the norm before clipping; None where not known."""

    step: int
    loss: float | None
    grad_norm: float | None


def global_steps(ranks: Sequence[Mapping[str, Any]]) -> list[GlobalStep]:
    """Combine the `steps` of all rank files of one run, ordered by step.

    The loss of a step is the mean over the ranks that report one. A rank reports either the mean over the whole batch
    (Megatron Core's last stage, torchtitan's log line) or the mean over its own tokens (DeepSpeed's engine); all
    data-parallel ranks have equally many tokens and each is reported by equally many ranks, so that the mean is the
    global one either way. The gradient norm is global on every rank already; the mean of equal numbers is that number.
    """
    losses: dict[int, list[float]] = {}
    norms: dict[int, list[float]] = {}
    for rank in ranks:
        for record in rank["steps"]:
            for values, key in ((losses, "loss"), (norms, "grad_norm")):
                found = values.setdefault(int(record["step"]), [])
                if record[key] is not None:
                    found.append(float(record[key]))
    return [GlobalStep(step, _mean(losses[step]), _mean(norms[step])) for step in sorted(losses)]


def _mean(values: Sequence[float]) -> float | None:
    """None for no values; exactly the value where all are the same."""
    if not values:
        return None
    return values[0] if len(set(values)) == 1 else math.fsum(values) / len(values)
