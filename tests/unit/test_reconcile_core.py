"""Every verdict can occur, and each for the reason that it names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from made_results import made_run

from train_ledger.reconcile import rows
from train_ledger.reconcile.core import reconcile_rank
from train_ledger.reconcile.layout import reconcile_layout
from train_ledger.spec.errors import DataError


@pytest.fixture
def pair() -> tuple[dict[str, Any], dict[str, Any]]:
    prediction, ranks = copy.deepcopy(made_run("run", "megatron"))
    return prediction, ranks[0]


def container(measured: dict[str, Any], name: str) -> dict[str, Any]:
    return next(c for c in measured["census"]["containers"] if c["name"] == name)


def resident(pair: tuple[dict[str, Any], dict[str, Any]], name: str) -> rows.ResidentRow:
    return next(r for r in reconcile_rank(*pair)[0] if r.container == name)


def calls(pair: tuple[dict[str, Any], dict[str, Any]], op: str, group: str) -> list[rows.CollectiveRow]:
    return [r for r in reconcile_rank(*pair)[1] if (r.op, r.group) == (op, group)]


def test_agreement_is_exact_and_has_no_cause(pair):
    memory, traffic = reconcile_rank(*pair)
    framework = [r for r in memory if r.owner != rows.UNCLAIMED]
    assert {r.verdict for r in [*framework, *traffic]} == {rows.EXACT}
    assert all(r.cause == "" and r.residual_bytes == 0 for r in [*framework, *traffic])
    assert len(framework) == 9
    assert len(traffic) == 7


def test_one_byte_is_a_difference(pair):
    container(pair[1], "grad")["bytes"] += 1
    row = resident(pair, "grad")
    assert (row.verdict, row.residual_bytes) == (rows.DIFFERS, 1)
    assert row.cause


def test_padding_that_is_not_there_is_named(pair):
    c = container(pair[1], "param")
    c["bytes"] -= 362 * 2
    c["numel"] -= 362
    row = resident(pair, "param")
    assert row.verdict == rows.DIFFERS
    assert row.cause.startswith("padding")


def test_elements_are_compared_beside_bytes(pair):
    container(pair[1], "param")["numel"] = 1000
    row = resident(pair, "param")
    assert (row.verdict, row.residual_bytes) == (rows.DIFFERS, 0)
    assert row.cause.startswith("elements")


def test_elements_without_the_padding_agree(pair):
    container(pair[1], "param")["numel"] = 46230
    assert resident(pair, "param").verdict == rows.EXACT


def test_missing_and_unpredicted_and_the_type_that_explains_both(pair):
    container(pair[1], "grad")["dtype"] = "bfloat16"
    found = [r for r in reconcile_rank(*pair)[0] if r.container == "grad"]
    assert {r.verdict for r in found} == {rows.MISSING, rows.UNPREDICTED}
    assert all(r.cause.startswith("type") for r in found)


def test_what_the_script_holds_unpredicted_is_not_the_frameworks(pair):
    extra = {"name": "loss_record", "owner": "script", "dtype": "float32", "numel": 2, "bytes": 8}
    pair[1]["census"]["containers"].append({**extra, "storages": 1, "device": "cpu"})
    assert resident(pair, "loss_record").verdict == rows.UNPREDICTED


def test_what_the_framework_holds_unpredicted_is_not_forgiven(pair):
    extra = {"name": "secret", "owner": "framework", "dtype": "float32", "numel": 2, "bytes": 8}
    pair[1]["census"]["containers"].append({**extra, "storages": 1, "device": "cpu"})
    assert resident(pair, "secret").verdict == rows.UNPREDICTED


def test_what_nobody_claims_is_a_difference_however_small(pair):
    pair[1]["census"]["other"] = [{"dtype": "bool", "shape": [], "bytes": 1, "count": 1, "device": "cpu"}]
    listed = [r for r in reconcile_rank(*pair)[0] if r.owner == rows.UNCLAIMED]
    assert [(r.container, r.measured_bytes, r.verdict) for r in listed] == [("unclaimed []", 1, rows.UNPREDICTED)]
    assert listed[0].cause == "no container of the framework or the script holds it"


def test_the_states_of_megatrons_generators_are_known_where_there_is_a_gpu(pair):
    """Three of 16 bytes, on the host; a fourth, or none, is a difference, and so are they without a GPU."""
    states = {"dtype": "uint8", "shape": [16], "bytes": 48, "count": 3, "device": "cpu"}
    prediction, measured = pair
    prediction["framework"] = measured["framework"] = "megatron"
    measured["census"]["other"] = [states]
    assert [r.verdict for r in reconcile_rank(*pair)[0] if r.owner == rows.UNCLAIMED] == [rows.UNPREDICTED]
    measured["device"] = {"type": "cuda"}
    assert not [r for r in reconcile_rank(*pair)[0] if r.owner == rows.UNCLAIMED]
    assert resident(pair, "rng_state").verdict == rows.EXACT
    measured["census"]["other"] = [{**states, "bytes": 64, "count": 4}]
    assert resident(pair, "rng_state").verdict == rows.DIFFERS
    measured["census"]["other"] = []
    assert resident(pair, "rng_state").verdict == rows.DIFFERS


def test_a_call_more_is_a_difference(pair):
    pair[1]["collectives"][0]["count"] += 1
    (row,) = calls(pair, "all_gather", "tp")
    assert (row.verdict, row.predicted_count, row.measured_count) == (rows.DIFFERS, 104, 105)
    assert row.residual_bytes == 1920 * 2
    assert row.cause


def test_twice_the_calls_point_at_micro_batches(pair):
    pair[1]["collectives"][0]["count"] *= 2
    assert "micro-batches" in calls(pair, "all_gather", "tp")[0].cause


def test_same_total_in_other_sizes(pair):
    call = pair[1]["collectives"][4]
    assert call["op"] == "reduce_scatter"
    call["count"], other = 1, copy.deepcopy(call)
    pair[0]["ranks"][0]["collectives"][4]["count"] = 2
    call["in_numel"] += 2
    other["in_numel"] -= 2
    pair[1]["collectives"].append(other)
    (row,) = calls(pair, "reduce_scatter", "dp")
    assert (row.verdict, row.residual_bytes) == (rows.SIZES_DIFFER, 0)


def test_output_sizes_count_too(pair):
    pair[1]["collectives"][0]["in_numel"] += 1  # the payload, the larger of both, stays as it is
    assert calls(pair, "all_gather", "tp")[0].verdict == rows.SIZES_DIFFER


def test_a_call_on_another_group_is_missing_here_and_unpredicted_there(pair):
    pair[1]["collectives"][0]["ranks"] = [0, 5]
    found = [r for r in reconcile_rank(*pair)[1] if r.op == "all_gather" and r.ranks in {"0 1", "0 5"}]
    assert {(r.ranks, r.verdict) for r in found} == {("0 1", rows.MISSING), ("0 5", rows.UNPREDICTED)}


def test_a_call_in_another_type_is_named_so(pair):
    pair[1]["collectives"][4]["dtype"] = "bfloat16"
    found = calls(pair, "reduce_scatter", "dp")
    assert {r.verdict for r in found} == {rows.MISSING, rows.UNPREDICTED}
    assert all("type" in r.cause for r in found)


def test_groups_of_equal_ranks_are_one_row(pair):
    pair[0]["groups"].append({"name": "dp_cp", "ranks": [2, 0]})
    call = pair[0]["ranks"][0]["collectives"][4]
    pair[0]["ranks"][0]["collectives"].append({**call, "group": "dp_cp"})
    pair[1]["collectives"][4]["count"] += 1
    (row,) = calls(pair, "reduce_scatter", "dp = dp_cp")
    assert (row.verdict, row.predicted_count, row.measured_count) == (rows.EXACT, 2, 2)


def test_order_of_ranks_in_a_group_does_not_matter(pair):
    for call in pair[1]["collectives"]:
        call["ranks"] = call["ranks"][::-1]
    assert {r.verdict for r in reconcile_rank(*pair)[1]} == {rows.EXACT}


def test_only_the_chosen_step_is_compared(pair):
    extra = {**pair[1]["collectives"][0], "step": 1, "count": 7}
    pair[1]["collectives"].append(extra)
    assert {r.verdict for r in reconcile_rank(*pair)[1]} == {rows.EXACT}
    pair[0]["step"] = "first"
    memory, traffic = reconcile_rank(*pair)
    assert memory == []  # the census was taken after step 4
    assert rows.DIFFERS in {r.verdict for r in traffic}


def test_first_step_that_was_not_recorded(pair):
    pair[0]["step"] = "first"
    with pytest.raises(DataError, match="step 1 was not recorded"):
        reconcile_rank(*pair)


def test_cuda_memory_beyond_the_census_is_named(pair):
    for c in pair[1]["census"]["containers"]:
        c["device"] = "cuda:0"
    total = sum(c["bytes"] for c in pair[1]["census"]["containers"])
    pair[1]["steps"][-1]["memory"] = {
        "requested_bytes.all.current": total + 64,
        "allocated_bytes.all.current": total + 512,
    }
    found = {r.container: (r.measured_bytes, r.verdict) for r in reconcile_rank(*pair)[0]}
    assert found["library_workspace"] == (64, rows.FOREIGN)
    assert found["block_rounding"] == (448, rows.FOREIGN)


def test_cuda_memory_against_the_prediction_for_a_gpu(pair):
    test_cuda_memory_beyond_the_census_is_named(pair)
    total = pair[1]["steps"][-1]["memory"]["requested_bytes.all.current"]
    lines = [
        {"name": "containers", "bytes": total - 64, "in_allocator": True, "rule": ""},
        {"name": "cublas_workspace x 1", "bytes": 64, "in_allocator": True, "rule": "CublasHandlePool.cpp"},
        {"name": "allocator_rounding", "bytes": 400, "in_allocator": True, "rule": ""},
        {"name": "cuda_context", "bytes": None, "in_allocator": False, "rule": ""},
    ]
    reading = {"rank": 0, "requested_bytes": total, "lines": lines}
    pair[0]["device"] = {"name": "h200", "ranks": [reading]}
    reading.update(allocated_bytes_at_least=total + 400, allocated_bytes_at_most=total + 500)
    found = {r.container: r for r in reconcile_rank(*pair)[0]}
    assert found["library_workspace"].verdict == found["block_rounding"].verdict == rows.EXACT
    assert "CublasHandlePool" in found["library_workspace"].rule
    reading["allocated_bytes_at_most"] = total + 447
    lines[1]["bytes"] = 65
    found = {r.container: r for r in reconcile_rank(*pair)[0]}
    assert found["library_workspace"].residual_bytes == -1
    assert found["library_workspace"].verdict == found["block_rounding"].verdict == rows.DIFFERS


@pytest.mark.parametrize(
    ("key", "value"), [("run", "other"), ("framework", "deepspeed"), ("world_size", 4), ("config_sha256", "f" * 64)]
)
def test_sides_of_different_runs_are_refused(pair, key, value):
    pair[1][key] = value
    with pytest.raises(DataError) as e:
        reconcile_rank(*pair)
    assert e.value.key == key


def test_a_rank_that_was_not_predicted_is_refused(pair):
    pair[0]["ranks"] = pair[0]["ranks"][1:]
    with pytest.raises(DataError, match="rank 0 was measured but not predicted"):
        reconcile_rank(*pair)


def test_a_name_for_two_groups_is_refused(pair):
    pair[0]["groups"].append({"name": "tp", "ranks": [0, 7]})
    with pytest.raises(DataError, match="two groups named 'tp'"):
        reconcile_rank(*pair)


def test_layout_verdicts(pair):
    assert {r.verdict for r in reconcile_layout(*pair)} == {rows.EXACT}
    pair[1]["coords"]["tp"] = 1
    del pair[1]["coords"]["dp"]
    pair[1]["coords"]["ep"] = 0
    pair[1]["groups"] = [{"name": "tp", "ranks": [0, 2]}, {"name": "renamed", "ranks": [0, 4]}]
    found = {(r.kind, r.name): r.verdict for r in reconcile_layout(*pair)}
    assert found["coord", "tp"] == rows.DIFFERS
    assert found["coord", "dp"] == rows.MISSING
    assert found["coord", "ep"] == rows.UNPREDICTED
    assert found["group", "tp"] == rows.DIFFERS
    assert found["group", "pp"] == rows.EXACT  # another name, the same ranks
    assert found["group", "renamed"] == rows.EXACT
    assert found["group", "world"] == rows.MISSING
