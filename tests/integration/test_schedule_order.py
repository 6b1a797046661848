"""The drawn order of a pipeline, against the functions with which Megatron Core makes its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from train_ledger.plot.orders import BACKWARD, FORWARD, order_of


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches"), [(2, 2, 8), (4, 2, 8), (4, 3, 16), (8, 2, 8), (2, 1, 8)]
)
def test_warm_up_and_table_are_megatrons(stages: int, chunks: int, micro_batches: int) -> None:
    table = get_schedule_table(micro_batches, chunks, stages)
    for stage in range(stages):
        group = SimpleNamespace(size=lambda: stages, rank=lambda stage=stage: stage)
        virtual = chunks if chunks > 1 else None
        world = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=virtual)
        total, _, warm_up, left = get_pp_rank_microbatches(micro_batches, chunks, stages, p2p_communicator=world)
        order = order_of(stage, stages, micro_batches, chunks)
        assert len(order) == 2 * total
        assert [op.kind for op in order[:warm_up]] == [FORWARD] * warm_up
        assert [op.kind for op in order[warm_up : warm_up + 2 * left]] == [FORWARD, BACKWARD] * left
        assert [(op.micro_batch, op.chunk) for op in order if op.kind == FORWARD] == table
        backward = [(op.micro_batch, chunks - 1 - op.chunk) for op in order if op.kind == BACKWARD]
        assert backward == table
