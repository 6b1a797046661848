"""What NCCL itself did in a profiled step: its kernels, its own records of each call, and how much of it was hidden.

Pure functions of the events of a Chrome trace, as torch.profiler writes it. Times in a trace are microseconds.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]

#: ncclDevKernel_AllGather_RING_LL, ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL, ncclDevKernel_SendRecv, …
KERNEL = re.compile(
    r"nccl(?:Dev)?Kernel_(AllGather|ReduceScatter|AllReduce|Broadcast|Reduce|SendRecv|AllToAll)"
    r"(?:_(?:Sum|Prod|Min|Max|MinMax|PreMulSum|SumPostDiv|Avg)_(\w+?))?(?:_|\(|$)",
    re.IGNORECASE,
)
KINDS = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "sendrecv": "send_recv",
    "alltoall": "all_to_all",
}
KERNEL_TYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "u8": "uint8",
    "i8": "int8",
    "u32": "int32",
    "i32": "int32",
    "u64": "int64",  # NCCL adds signed and unsigned integers with one kernel
    "i64": "int64",
}
#: Names in `record_param_comms` -> the ledger's word. A coalesced call is one record with the sums of its tensors.
RECORDS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "_allgather_base": "all_gather",
    "all_gather": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "broadcast": "broadcast",
    "_broadcast_oop": "broadcast",
    "reduce": "reduce",
    "_reduce_oop": "reduce",
    "all_to_all": "all_to_all",
    "all_to_allv": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
}
RECORD_TYPES = {
    "BFloat16": "bfloat16",
    "Half": "float16",
    "Float": "float32",
    "Double": "float64",
    "Long": "int64",
    "Int": "int32",
    "Byte": "uint8",
    "Char": "int8",
    "Bool": "bool",
}
#: Records of waiting, not of sending.
WAITS = ("wait", "barrier", "init", "coalesced")


def read_trace(profiler: Any) -> list[Event]:
    """The events of a finished torch.profiler.profile."""
    with tempfile.TemporaryDirectory(prefix="train-ledger-") as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return list(data["traceEvents"])


def kernels(events: Iterable[Event], step: int) -> list[dict[str, Any]]:
    """NCCL kernels: step, kind, dtype (empty where the kernel's name has none), count, time_s."""
    found: dict[tuple[str, str], list[float]] = {}
    for event in events:
        match = KERNEL.match(event["name"]) if event.get("cat") == "kernel" else None
        if match:
            dtype = KERNEL_TYPES.get(match[2] or "", match[2] or "")
            dtype = dtype or RECORD_TYPES.get(event.get("args", {}).get("dtype", ""), "")
            found.setdefault((KINDS[match[1].lower()], dtype), []).append(event["dur"])
    return [
        {"step": step, "kind": kind, "dtype": dtype, "count": len(times), "time_s": sum(times) / 1e6}
        for (kind, dtype), times in sorted(found.items())
    ]


def records(events: Iterable[Event], step: int) -> list[dict[str, Any]]:
    """`record_param_comms`, one an NCCL call: step, op, group, dtype, in_numel, out_numel, group_size, count.

    A second count of the calls, beside the dispatcher's. A coalesced call is one record; `coalesced` says so.
    """
    found: dict[tuple[Any, ...], int] = {}
    for event in events:
        if event["name"] != "record_param_comms" or event.get("ph") != "X":
            continue
        a = event.get("args", {})
        name = a.get("Collective name", "")
        if name in WAITS or not name:
            continue
        key = (
            RECORDS.get(name, name),
            a.get("Process Group Description", ""),
            RECORD_TYPES.get(a.get("dtype", ""), a.get("dtype", "")),
            int(a.get("In msg nelems", 0)),
            int(a.get("Out msg nelems", 0)),
            int(a.get("Group size", 0)),
            name.endswith("_coalesced"),
        )
        found[key] = found.get(key, 0) + 1
    keys = ("op", "group", "dtype", "in_numel", "out_numel", "group_size", "coalesced")
    return [{"step": step, **dict(zip(keys, key, strict=True)), "count": n} for key, n in found.items()]


def timeline(events: Iterable[Event], step: int) -> dict[str, Any]:
    """Seconds of one step on the GPU, each moment counted once: span, compute, communication, exposed communication.

    Exposed is the communication during which no other kernel ran.
    """
    compute, communication = [], []
    for event in events:
        if event.get("cat") == "kernel" and event.get("ph") == "X":
            span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
            (communication if "nccl" in event["name"].lower() else compute).append(span)
    every = compute + communication
    busy, computing = covered(every), covered(compute)
    return {
        "step": step,
        "span_s": (max(e for _, e in every) - min(b for b, _ in every)) / 1e6 if every else 0.0,
        "compute_s": computing / 1e6,
        "communication_s": covered(communication) / 1e6,
        "exposed_communication_s": (busy - computing) / 1e6,
    }


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(spans):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total
