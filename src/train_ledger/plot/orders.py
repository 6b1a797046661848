"""The order of forward and backward work on each pipeline stage, plain 1F1B and interleaved, and when it can start."""

from __future__ import annotations

from typing import NamedTuple

FORWARD, BACKWARD = "F", "B"


class Op(NamedTuple):
    """One forward or backward of a micro-batch through one model chunk of a stage; without virtual stages chunk 0."""

    kind: str
    micro_batch: int
    chunk: int = 0


def order_of(stage: int, stages: int, micro_batches: int, chunks: int = 1) -> list[Op]:
    """Order of work of one stage: warm-up forwards, then one forward and one backward in turn, then the rest backward.

    Source: megatron `core/pipeline_parallel/schedules.py`: `forward_backward_pipelining_without_interleaving` (torch's
    `Schedule1F1B` is the same), and with virtual stages `get_schedule_table` and `get_pp_rank_microbatches`, where as
    many micro-batches as there are stages go through one chunk before the next (`microbatch_group_size_per_vp_stage`,
    whose default that is); backward takes the chunks the other way round.
    """
    table = [
        (m, chunk)
        for first in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for m in range(first, min(first + stages, micro_batches))
    ]
    behind = stages - stage - 1
    warm_up = min(behind if chunks == 1 else 2 * behind + (chunks - 1) * stages, len(table))
    forwards = [Op(FORWARD, m, chunk) for m, chunk in table]
    backwards = [Op(BACKWARD, m, chunks - 1 - chunk) for m, chunk in table]
    steady = [op for pair in zip(forwards[warm_up:], backwards, strict=False) for op in pair]
    return forwards[:warm_up] + steady + backwards[len(table) - warm_up :]


def start_times(
    stages: int, micro_batches: int, chunks: int = 1, forward: int = 1, backward: int = 2
) -> dict[tuple[int, Op], int]:
    """When each stage starts each piece of work, in units of a chunk's forward, if sending takes no time."""
    orders = [order_of(s, stages, micro_batches, chunks) for s in range(stages)]
    at, free = [0] * stages, [0] * stages
    done: dict[tuple[int, Op], int] = {}
    out: dict[tuple[int, Op], int] = {}
    moved = True
    while moved:
        moved = False
        for s in range(stages):
            while at[s] < len(orders[s]):
                op = orders[s][at[s]]
                needs = _needs(s, op, stages, chunks)
                if needs is not None and needs not in done:
                    break
                out[s, op] = max(free[s], done[needs] if needs else 0)
                free[s] = done[s, op] = out[s, op] + (forward if op.kind == FORWARD else backward)
                at[s], moved = at[s] + 1, True
    return out


def _needs(stage: int, op: Op, stages: int, chunks: int) -> tuple[int, Op] | None:
    """What must be done before: the stage before, through the last stage to the next chunk, and back again."""
    last = stages - 1
    if op.kind == FORWARD:
        if stage > 0:
            return stage - 1, op
        return (last, op._replace(chunk=op.chunk - 1)) if op.chunk else None
    if stage < last:
        return stage + 1, op
    if op.chunk < chunks - 1:
        return 0, op._replace(chunk=op.chunk + 1)
    return stage, op._replace(kind=FORWARD)
