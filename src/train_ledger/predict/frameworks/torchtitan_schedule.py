"""The order in which one rank of torch's pipeline works: forwards, backwards, and what FSDP does in between.

Source: `torch/distributed/pipelining/schedules.py` of torch 2.14.1. Sends and receives do not change this order.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

#: Stages whose parameters a rank of a multi-stage schedule keeps whole at once (`_add_unshard_reshard`).
MAX_ACTIVE_STAGES = 3


class Action(NamedTuple):
    """`forward`, `backward`, `unshard`, `reshard` or `reduce` (gradients) of a stage, by its number in the pipeline."""

    kind: str
    stage: int


@functools.lru_cache(maxsize=1024)
def order(schedule: str, ranks: int, rank: int, stages_per_rank: int, micro_batches: int) -> tuple[Action, ...]:
    """One pass of `schedule` on pipeline rank `rank` of `ranks`.

    Args:
        schedule: `1F1B`, `GPipe`, `Interleaved1F1B` or `LoopedBFS`.
        ranks: pipeline ranks.
        rank: one of them.
        stages_per_rank: 1 for the first two.
        micro_batches: of one pass.
    """
    forward, backward = Action("forward", rank), Action("backward", rank)
    if schedule == "Interleaved1F1B":
        return _with_fsdp(_interleaved(ranks, rank, stages_per_rank, micro_batches), micro_batches)
    if schedule == "LoopedBFS":
        mine = range(rank, ranks * stages_per_rank, ranks)
        actions = [Action("forward", stage) for stage in mine for _ in range(micro_batches)]
        actions += [Action("backward", stage) for stage in reversed(mine) for _ in range(micro_batches)]
        return _with_fsdp(actions, micro_batches)
    if schedule == "GPipe":
        return (*[forward] * micro_batches, *[backward] * micro_batches, Action("reduce", rank))
    ahead = min(micro_batches, ranks - rank)  # Schedule1F1B._step_microbatches
    steady = [action for _ in range(micro_batches - ahead) for action in (backward, forward)]
    return (*[forward] * ahead, *steady, *[backward] * ahead, Action("reduce", rank))


def _interleaved(ranks: int, rank: int, per_rank: int, micro_batches: int) -> list[Action]:
    """`ScheduleInterleaved1F1B._calculate_single_rank_operations` and `_get_1f1b_rank_ops`."""
    a_round = micro_batches // max(1, micro_batches // ranks)
    total = per_rank * micro_batches
    ahead = min((per_rank - 1) * a_round + 2 * (ranks - 1 - rank), total)

    def forward(op: int) -> Action:
        return Action("forward", op // a_round % per_rank * ranks + rank)

    def backward(op: int) -> Action:
        return Action("backward", (per_rank - 1 - (op - ahead) // a_round % per_rank) * ranks + rank)

    out = [forward(op) for op in range(ahead)]
    for op in range(ahead, total):
        out += [forward(op), backward(op)]
    return out + [backward(op) for op in range(total, total + ahead)]


def _with_fsdp(actions: list[Action], micro_batches: int) -> tuple[Action, ...]:
    """Unshards the next stages ahead, reshards what they have no room for (`_add_unshard_reshard`), and reduces a
    stage's gradients after its last backward (`_add_reduce_grad`).
    """
    out: list[Action] = []
    active: list[int] = []
    done: dict[int, int] = {}
    for i, action in enumerate(actions):
        ahead = list(dict.fromkeys(a.stage for a in actions[i:]))[:MAX_ACTIVE_STAGES]
        out += [Action("reshard", stage) for stage in active if stage not in ahead]
        out += [Action("unshard", stage) for stage in ahead if stage not in active]
        active = ahead
        out.append(action)
        if action.kind == "backward":
            done[action.stage] = done.get(action.stage, 0) + 1
            if done[action.stage] == micro_batches:
                out.append(Action("reduce", action.stage))
    return (*out, *(Action("reshard", stage) for stage in active))
