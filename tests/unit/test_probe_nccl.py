"""Parsing of profiler traces, on small traces written by hand."""

from __future__ import annotations

import pytest

from train_ledger.probe.nccl import covered, kernels, records, timeline


def kernel(name: str, ts: float, dur: float, **args: object) -> dict:
    return {"cat": "kernel", "ph": "X", "name": name, "ts": ts, "dur": dur, "args": args}


def record(name: str, n_in: int, n_out: int, dtype: str = "BFloat16", group: str = "DATA_PARALLEL_GROUP") -> dict:
    args = {
        "Collective name": name,
        "In msg nelems": n_in,
        "Out msg nelems": n_out,
        "dtype": dtype,
        "Group size": 2,
        "Process Group Name": "1",
        "Process Group Description": group,
    }
    return {"cat": "cpu_op", "ph": "X", "name": "record_param_comms", "ts": 0, "dur": 1, "args": args}


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather", ""),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "reduce_scatter", "bfloat16"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_SIMPLE(x)", "reduce_scatter", "float32"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "all_reduce", "float32"),
        ("ncclDevKernel_AllReduce_Max_f64_TREE_LL(x)", "all_reduce", "float64"),
        ("ncclDevKernel_AllReduce_Sum_u64_RING_LL(x)", "all_reduce", "int64"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(x)", "all_reduce", ""),
        ("ncclDevKernel_SendRecv(x)", "send_recv", ""),
        ("ncclDevKernel_Broadcast_RING_LL(x)", "broadcast", ""),
        ("ncclDevKernel_Reduce_Sum_f16_RING_LL(x)", "reduce", "float16"),
    ],
)
def test_kernel_names(name: str, kind: str, dtype: str) -> None:
    rows = kernels([kernel(name, 0, 2_000_000)], step=3)
    assert rows == [{"step": 3, "kind": kind, "dtype": dtype, "count": 1, "time_s": 2.0}]


def test_kernels_are_added_up_and_others_are_left_out() -> None:
    events = [
        kernel("ncclDevKernel_AllGather_RING_LL(x)", 0, 10, dtype="BFloat16"),
        kernel("ncclDevKernel_AllGather_RING_LL(x)", 20, 30, dtype="BFloat16"),
        kernel("sm90_xmma_gemm_bf16", 0, 100),
        {"cat": "cpu_op", "ph": "X", "name": "ncclDevKernel_AllGather_RING_LL", "ts": 0, "dur": 1},
    ]
    assert kernels(events, 1) == [
        {"step": 1, "kind": "all_gather", "dtype": "bfloat16", "count": 2, "time_s": pytest.approx(40e-6)}
    ]


def test_records_leave_waiting_out_and_add_up() -> None:
    events = [
        record("_allgather_base", 10, 20),
        record("_allgather_base", 10, 20),
        record("wait", 0, 0),
        record("barrier", 0, 0),
        record("allreduce", 5, 5, "Float", "default_pg"),
        record("reduce_scatter_tensor_coalesced", 40, 20, "Float"),
        record("a_new_collective", 1, 1),
    ]
    rows = [tuple(r[k] for k in ("op", "group", "dtype", "in_numel", "out_numel", "count")) for r in records(events, 2)]
    assert rows == [
        ("all_gather", "DATA_PARALLEL_GROUP", "bfloat16", 10, 20, 2),
        ("all_reduce", "default_pg", "float32", 5, 5, 1),
        ("reduce_scatter", "DATA_PARALLEL_GROUP", "float32", 40, 20, 1),
        ("a_new_collective", "DATA_PARALLEL_GROUP", "bfloat16", 1, 1, 1),
    ]
    assert [r["coalesced"] for r in records(events, 2)] == [False, False, True, False]


def test_timeline_counts_each_moment_once() -> None:
    events = [
        kernel("gemm", 0, 100),
        kernel("gemm", 50, 100),  # to 150, 50 of it beside the first
        kernel("ncclDevKernel_AllGather_RING_LL(x)", 140, 60),  # 10 hidden, 50 exposed
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 190, 20),  # 10 of it beside the other
    ]
    assert timeline(events, 7) == {
        "step": 7,
        "span_s": pytest.approx(210e-6),
        "compute_s": pytest.approx(150e-6),
        "communication_s": pytest.approx(70e-6),
        "exposed_communication_s": pytest.approx(60e-6),
    }


def test_a_step_without_kernels() -> None:
    empty = timeline([], 1)
    assert set(empty) == {"step", "span_s", "compute_s", "communication_s", "exposed_communication_s"}
    assert all(v == 0 for k, v in empty.items() if k != "step")
    assert kernels([], 1) == records([], 1) == []


def test_covered() -> None:
    assert covered([]) == 0
    assert covered([(0, 1), (5, 6)]) == 2
    assert covered([(0, 10), (2, 3), (4, 12)]) == 12
