"""The order of work in a pipeline, plain and interleaved: complete, possible, its bubble; and what is drawn of it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from made_results import make_results

from train_ledger.plot import schedule
from train_ledger.plot.data import Results, read_results
from train_ledger.plot.orders import BACKWARD, FORWARD, Op, order_of, start_times
from train_ledger.report.run_tables import schedule_table

WEIGHT = "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks"),
    [*itertools.product([1, 2, 3, 4, 8], [1, 2, 3, 8, 16], [1]), *itertools.product([2, 4], [4, 8, 16], [2, 3])],
)
def test_all_work_is_done_once_and_in_an_order_that_can_be(stages: int, micro_batches: int, chunks: int) -> None:
    starts = start_times(stages, micro_batches, chunks)
    assert len(starts) == 2 * stages * micro_batches * chunks
    for stage in range(stages):
        order = order_of(stage, stages, micro_batches, chunks)
        every = itertools.product((FORWARD, BACKWARD), range(micro_batches), range(chunks))
        assert sorted(order) == sorted(Op(*op) for op in every)
        held = list(itertools.accumulate(1 if op.kind == FORWARD else -1 for op in order))
        if chunks == 1:
            # No stage holds more activations than there are stages from it to the end.
            assert max(held) <= min(stages - stage, micro_batches)
        for m, c in itertools.product(range(micro_batches), range(chunks)):
            forward, backward = Op(FORWARD, m, c), Op(BACKWARD, m, c)
            assert starts[stage, backward] >= starts[stage, forward] + 1
            if stage:
                assert starts[stage, forward] >= starts[stage - 1, forward] + 1
                assert starts[stage - 1, backward] >= starts[stage, backward] + 2
            elif c:  # from the last stage to the next chunk on the first
                assert starts[0, forward] >= starts[stages - 1, Op(FORWARD, m, c - 1)] + 1
                assert starts[stages - 1, Op(BACKWARD, m, c - 1)] >= starts[0, backward] + 2


@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks"), [(4, 12, 1), (2, 8, 1), (2, 8, 2), (4, 12, 2), (4, 8, 3)]
)
def test_the_bubble_of_the_drawn_schedule_is_the_formula(stages: int, micro_batches: int, chunks: int) -> None:
    starts = start_times(stages, micro_batches, chunks)
    span = max(t + (1 if op.kind == FORWARD else 2) for (_, op), t in starts.items())
    busy = 3 * micro_batches * chunks
    told = schedule.Pipeline("run", "megatron", stages, chunks, micro_batches, {}).bubble_share
    assert (span - busy) / span == pytest.approx(told)
    assert told == pytest.approx((stages - 1) / (chunks * micro_batches + stages - 1))


def interleaved(folder: Path, spoil: bool = False) -> Results:
    """A run of two stages with two chunks of one layer each: layer 1 is the first chunk of stage 1."""

    def change(prediction: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        degrees = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "data_parallel": 2, "tensor_parallel": 2}
        sizes = {"micro_batch": 1, "global_batch": 16}
        prediction["config"] = {"parallel": degrees, **sizes, "model": {"name": "x", "num_layers": 4}}
        template = ranks[0]["lifeline"]
        work = [op for op in order_of(1, 2, 8, 2) if op.chunk == 0]
        if spoil:
            work[3], work[4] = work[4], work[3]
        events = [e for e in template["events"] if e["event"] == "step_begin"]
        for op in work:
            name = "before_forward" if op.kind == FORWARD else "before_backward"
            events.append({**events[0], "event": name, "micro_batch": op.micro_batch})
        for r in ranks:
            r["lifeline"] = {**template, "events": events} if r["coords"]["pp"] == 1 else None

    return read_results(make_results(folder, {"mg-vp": "megatron"}, change))


def test_an_interleaved_schedule_is_drawn_and_judged_by_the_chunk_that_was_followed(tmp_path: Path) -> None:
    results = interleaved(tmp_path / "good")
    (found,) = schedule.pipelines(results)
    assert (found.stages, found.chunks, found.micro_batches) == (2, 2, 8)
    assert {op.chunk for op in found.measured[1]} == {0}
    assert found.agrees(1)
    (drawn,) = schedule.draw(results)
    assert "order measured as predicted" in drawn.caption
    assert "lighter boxes are later model chunks" in drawn.caption
    assert "2 stages, 2 model chunks a stage, 8 micro-batches" in drawn.alt
    (row,) = schedule_table(results).rows
    assert (row["chunks"], row["verdict"]) == (2, "exact")
    (bad,) = schedule_table(interleaved(tmp_path / "bad", spoil=True)).rows
    assert bad["verdict"] == "differs"
    assert "another order on stage 1" in bad["order"]


def test_a_weight_that_the_layers_do_not_place_has_no_measured_row(tmp_path: Path) -> None:
    results = interleaved(tmp_path / "r")
    for config in (r["config"] for r in results.runs):
        config["model"]["num_layers"] = 8  # layer 1 would be on stage 0
    (found,) = schedule.pipelines(results)
    assert found.measured == {}
