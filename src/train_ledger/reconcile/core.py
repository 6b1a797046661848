"""Joins what was predicted for one rank with what it measured. Pure functions of the two files' contents."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from train_ledger.spec.dtypes import ELEMENT_BYTES
from train_ledger.spec.errors import DataError
from train_ledger.spec.ledger import ring_wire_bytes

from . import rows
from .causes import collective_cause, resident_cause
from .rows import CollectiveRow, ResidentRow

#: Storages that a framework keeps on the host of a GPU, without an object that would name them: dtype, shape, how many,
#: bytes of all of them, and where they are made. They are no tensors of the training, and no prediction has them.
HOST_STATES: dict[str, tuple[str, list[int], int, int, str]] = {
    "megatron": (
        *("uint8", [16], 3, 48),
        "megatron/core/tensor_parallel/random.py:CudaRNGStatesTracker.add: the states of three CUDA generators",
    )
}

Data = Mapping[str, Any]


def reconcile_rank(
    prediction: Data, measured: Data, step: int | None = None
) -> tuple[list[ResidentRow], list[CollectiveRow]]:
    """Residents and collectives of the measured rank against its prediction.

    Args:
        prediction: contents of a predict file, schema train-ledger/predict/1.
        measured: contents of a rank file, schema train-ledger/rank/1.
        step: recorded step whose collectives are compared; see `recorded_step` for the default.

    Raises:
        DataError: the prediction lacks this rank, is of another run, framework or config, or the step was not recorded.
    """
    ledger = predicted_rank(prediction, measured)
    return reconcile_resident(prediction, ledger, measured), reconcile_collectives(prediction, ledger, measured, step)


def predicted_rank(prediction: Data, measured: Data) -> Data:
    """The prediction's entry for the rank that was measured.

    Raises:
        DataError: none, or the two are not of the same run, framework, world size or config.
    """
    for key in ("run", "framework", "world_size"):
        if prediction[key] != measured[key]:
            raise DataError(f"predicted for {prediction[key]!r}, measured on {measured[key]!r}", key=key)
    if prediction.get("config_sha256") and prediction["config_sha256"] != measured["config_sha256"]:
        raise DataError(
            f"run {measured['run']}: predicted from {prediction['config_sha256'][:12]}, measured with "
            f"{measured['config_sha256'][:12]}: the config changed in between",
            key="config_sha256",
        )
    for ledger in prediction["ranks"]:
        if ledger["rank"] == measured["rank"]:
            return ledger
    raise DataError(f"run {measured['run']}: rank {measured['rank']} was measured but not predicted", key="ranks")


def recorded_step(prediction: Data, measured: Data) -> int:
    """The recorded step that a prediction is compared with: step 1 for `first`, else the last recorded one.

    Raises:
        DataError: `first` was predicted and step 1 was not recorded.
    """
    recorded = sorted({c["step"] for c in measured["collectives"]})
    if prediction.get("step", "steady") == "first":
        if recorded and 1 not in recorded:
            raise DataError(f"step 1 was not recorded on rank {measured['rank']}, only {recorded}", key="collectives")
        return 1
    return recorded[-1] if recorded else int(measured["census"]["step"])


# --- memory ---------------------------------------------------------------------------------------------------------


@dataclass
class _Resident:
    owner: str = ""
    rule: str = ""
    predicted_bytes: int = 0
    predicted_numel: int = 0
    pad_numel: int = 0
    measured_bytes: int = 0
    measured_numel: int = 0
    storages: int = 0
    predicted: bool = False
    measured: bool = False


def reconcile_resident(prediction: Data, ledger: Data, measured: Data) -> list[ResidentRow]:
    """Containers of one rank, one row a name and dtype, then what no owner claims.

    Devices are not compared: in a world without CUDA everything is on the CPU. A prediction of the first step is
    compared only with a census taken after step 1, since optimizer state comes into being there.
    """
    if prediction.get("step") == "first" and measured["census"]["step"] != 1:
        return []
    table: dict[tuple[str, str], _Resident] = {}
    states, other = _host_states(measured)
    outside = [{**c, "pad_numel": 0} for c in _predicted_outside(prediction, ledger["rank"], measured)]
    for c in [*ledger["containers"], *outside, *states]:
        slot = table.setdefault((c["name"], c["dtype"]), _Resident(c["owner"], c["rule"]))
        slot.predicted = True
        slot.predicted_bytes += c["bytes"]
        slot.predicted_numel += c["numel"]
        slot.pad_numel += c["pad_numel"]
    for c in [*measured["census"]["containers"], *_outside_census(measured), *(s["found"] for s in states)]:
        slot = table.setdefault((c["name"], c["dtype"]), _Resident(c["owner"]))
        slot.measured = True
        slot.measured_bytes += c["bytes"]
        slot.measured_numel += c["numel"]
        slot.storages += c["storages"]
    out = [_resident_row(measured, key, slot, table) for key, slot in table.items() if slot.predicted or slot.measured]
    return [*out, *_unclaimed_rows(measured, other)]


def _host_states(measured: Data) -> tuple[list[dict[str, Any]], list[Data]]:
    """On CUDA, the framework's `HOST_STATES` as predicted, with what was `found`; and what else nobody claims."""
    other = measured["census"]["other"]
    if measured.get("device", {}).get("type") != "cuda" or measured["framework"] not in HOST_STATES:
        return [], other
    dtype, shape, count, n_bytes, rule = HOST_STATES[measured["framework"]]
    ours = [c for c in other if (c["dtype"], c["shape"]) == (dtype, shape) and not c["device"].startswith("cuda")]
    found_bytes = sum(c["bytes"] for c in ours)
    state = {"name": "rng_state", "owner": "framework", "dtype": dtype, "pad_numel": 0}
    found = {**state, "numel": found_bytes, "bytes": found_bytes, "storages": sum(c["count"] for c in ours)}
    wanted = {**state, "numel": n_bytes, "bytes": n_bytes, "storages": count, "rule": rule, "found": found}
    return [wanted], [c for c in other if c not in ours]


def _outside_census(measured: Data) -> list[dict[str, Any]]:
    """On CUDA, what the allocator knows beyond the storages: requests of libraries, and blocks rounded to 512 B.

    Sources: `torch.cuda.memory_stats`, keys `requested_bytes.all.current` and `allocated_bytes.all.current`
    (c10/cuda/CUDACachingAllocator.cpp). cuBLAS takes its workspaces from the same allocator.
    """
    last = measured["steps"][-1] if measured["steps"] else None
    memory = (last or {}).get("memory") or {}
    requested, allocated = (memory.get(f"{k}_bytes.all.current") for k in ("requested", "allocated"))
    if requested is None or allocated is None or last is None or last["step"] != measured["census"]["step"]:
        return []
    seen = sum(c["bytes"] for c in measured["census"]["containers"] if c["device"].startswith("cuda"))
    seen += sum(c["bytes"] for c in measured["census"]["other"] if c["device"].startswith("cuda"))
    beyond = (
        ("library_workspace", "library", requested - seen),
        ("block_rounding", "allocator", allocated - requested),
    )
    return [
        {"name": name, "owner": owner, "dtype": "uint8", "numel": n, "bytes": n, "storages": 0}
        for name, owner, n in beyond
    ]


def _predicted_outside(prediction: Data, rank: int, measured: Data) -> list[dict[str, Any]]:
    """What the prediction for a GPU (`predict --device`) says of the same two, if it was made and CUDA was measured.

    A block above 1 MiB may keep what is left of the block that it was cut from, so that the allocator's rounding is
    known as a range only (c10/cuda/CUDACachingAllocator.cpp:should_split): inside of it, what was measured is taken.
    """
    found = _outside_census(measured)
    readings = [r for r in (prediction.get("device") or {}).get("ranks", []) if r["rank"] == rank]
    if not found or not readings:
        return []
    r = readings[0]
    own = {"containers", "allocator_rounding", "unsplit_remainders"}
    lines = [x for x in r["lines"] if x["in_allocator"] and x["name"] not in own]
    least, most = (r[f"allocated_bytes_at_{end}"] - r["requested_bytes"] for end in ("least", "most"))
    rounding = next(c["bytes"] for c in found if c["name"] == "block_rounding")
    predicted = {
        "library_workspace": (sum(x["bytes"] for x in lines), "; ".join(f"{x['name']}: {x['rule']}" for x in lines)),
        "block_rounding": (
            rounding if least <= rounding <= most else least,
            f"c10/cuda/CUDACachingAllocator.cpp:round_size, at least {least:,} B and at most {most:,} B",
        ),
    }
    return [
        {**c, "numel": predicted[c["name"]][0], "bytes": predicted[c["name"]][0], "rule": predicted[c["name"]][1]}
        for c in found
    ]


def _resident_row(
    measured: Data, key: tuple[str, str], slot: _Resident, table: Mapping[tuple[str, str], _Resident]
) -> ResidentRow:
    name, dtype = key
    verdict, cause = rows.EXACT, ""
    if not slot.predicted:
        verdict = rows.FOREIGN if slot.owner in rows.OF_THE_HARDWARE else rows.UNPREDICTED
    elif not slot.measured and slot.predicted_bytes:
        verdict = rows.MISSING
    elif slot.measured_bytes != slot.predicted_bytes:
        verdict = rows.DIFFERS
    elif not slot.predicted_numel <= slot.measured_numel <= slot.predicted_numel + slot.pad_numel:
        verdict = rows.DIFFERS
        expected = f"{slot.predicted_numel} and {slot.pad_numel} of padding"
        cause = f"elements: predicted {expected}, measured {slot.measured_numel}"
    if verdict not in rows.CLEAN and not cause:
        other = [d for (n, d), s in table.items() if n == name and d != dtype and s.measured != slot.measured]
        cause = resident_cause(name, dtype, slot.predicted_bytes, slot.pad_numel, slot.measured_bytes, other)
    return ResidentRow(
        run=measured["run"],
        rank=measured["rank"],
        container=name,
        predicted_bytes=slot.predicted_bytes,
        measured_bytes=slot.measured_bytes,
        residual_bytes=slot.measured_bytes - slot.predicted_bytes,
        verdict=verdict,
        cause=cause,
        owner=slot.owner,
        dtype=dtype,
        predicted_numel=slot.predicted_numel,
        pad_numel=slot.pad_numel,
        measured_numel=slot.measured_numel,
        storages=slot.storages,
        rule=slot.rule,
    )


def _unclaimed_rows(measured: Data, other: Iterable[Data]) -> list[ResidentRow]:
    on_gpu = measured.get("device", {}).get("type") == "cuda"
    out = []
    for c in sorted(other, key=lambda c: (-c["bytes"], c["dtype"], c["shape"])):
        where = " on the host" if on_gpu and not c["device"].startswith("cuda") else ""
        shape = f"unclaimed {list(c['shape'])}{where}"
        out.append(
            ResidentRow(
                run=measured["run"],
                rank=measured["rank"],
                container=shape,
                predicted_bytes=0,
                measured_bytes=c["bytes"],
                residual_bytes=c["bytes"],
                verdict=rows.UNPREDICTED,
                cause="no container of the framework or the script holds it",
                owner=rows.UNCLAIMED,
                dtype=c["dtype"],
                predicted_numel=0,
                pad_numel=0,
                measured_numel=0,
                storages=c["count"],
                rule="",
            )
        )
    return out


# --- communication --------------------------------------------------------------------------------------------------


@dataclass
class _Calls:
    names: list[str] = field(default_factory=list)
    predicted: Counter[tuple[int, int]] = field(default_factory=Counter)
    measured: Counter[tuple[int, int]] = field(default_factory=Counter)


def group_ranks(prediction: Data, rank: int) -> dict[str, tuple[int, ...]]:
    """Sorted global ranks of each predicted group that `rank` is in, by the group's name.

    Raises:
        DataError: the rank is in two different groups of one name, so that a name would say nothing.
    """
    out: dict[str, tuple[int, ...]] = {}
    for group in prediction["groups"]:
        if rank in group["ranks"]:
            ranks = tuple(sorted(group["ranks"]))
            if out.setdefault(group["name"], ranks) != ranks:
                raise DataError(f"rank {rank} is in two groups named {group['name']!r}", key="groups")
    return out


def reconcile_collectives(
    prediction: Data, ledger: Data, measured: Data, step: int | None = None
) -> list[CollectiveRow]:
    """Calls of one step, joined on op, the group's global ranks, and dtype.

    Two predicted groups of equal ranks (world and data parallel, say) are one row: ranks are what can be measured.
    Agreement asks for the same number of calls, the same bytes, and the same sizes call by call.
    """
    step = recorded_step(prediction, measured) if step is None else step
    named = group_ranks(prediction, measured["rank"])
    table: dict[tuple[str, tuple[int, ...], str], _Calls] = defaultdict(_Calls)
    for i, c in enumerate(ledger["collectives"]):
        if c["group"] not in named:
            raise DataError(
                f"rank {measured['rank']} calls {c['op']} on group {c['group']!r}, which it is not in",
                key=f"ranks[{ledger['rank']}].collectives[{i}].group",
            )
        calls = table[c["op"], named[c["group"]], c["dtype"]]
        if c["group"] not in calls.names:
            calls.names.append(c["group"])
        calls.predicted[c["in_numel"], c["out_numel"]] += c["count"]
    by_ranks: dict[tuple[int, ...], str] = {}
    for name, ranks in named.items():
        by_ranks.setdefault(ranks, name)
    for c in measured["collectives"]:
        if c["step"] == step:
            ranks = tuple(sorted(c["ranks"]))
            calls = table[c["op"], ranks, c["dtype"]]
            if not calls.names:
                calls.names.append(by_ranks.get(ranks) or c.get("group") or f"ranks {spaced(ranks)}")
            calls.measured[c["in_numel"], c["out_numel"]] += c["count"]
    return [_collective_row(measured, step, key, calls, table) for key, calls in table.items()]


def _collective_row(
    measured: Data,
    step: int,
    key: tuple[str, tuple[int, ...], str],
    calls: _Calls,
    table: Mapping[tuple[str, tuple[int, ...], str], _Calls],
) -> CollectiveRow:
    op, ranks, dtype = key
    counts = [sum(side.values()) for side in (calls.predicted, calls.measured)]
    payload = [_payload_bytes(side, dtype) for side in (calls.predicted, calls.measured)]
    if +calls.predicted == +calls.measured:
        verdict = rows.EXACT
    elif not counts[1]:
        verdict = rows.MISSING
    elif not counts[0]:
        verdict = rows.UNPREDICTED
    elif counts[0] == counts[1] and payload[0] == payload[1]:
        verdict = rows.SIZES_DIFFER
    else:
        verdict = rows.DIFFERS
    cause = ""
    if verdict != rows.EXACT:
        opposite = "measured" if counts[0] else "predicted"
        other = [d for (o, r, d), c in table.items() if (o, r) == (op, ranks) and d != dtype and getattr(c, opposite)]
        cause = collective_cause(op, counts[0], counts[1], payload[0], payload[1], other)
    wire = [round(ring_wire_bytes(op, len(ranks), n)) for n in payload]
    return CollectiveRow(
        run=measured["run"],
        rank=measured["rank"],
        op=op,
        group=" = ".join(calls.names),
        dtype=dtype,
        predicted_count=counts[0],
        measured_count=counts[1],
        predicted_bytes=payload[0],
        measured_bytes=payload[1],
        residual_bytes=payload[1] - payload[0],
        verdict=verdict,
        cause=cause,
        step=step,
        ranks=spaced(ranks),
        predicted_wire_bytes=wire[0],
        measured_wire_bytes=wire[1],
    )


def _payload_bytes(calls: Mapping[tuple[int, int], int], dtype: str) -> int:
    numel = sum(max(size) * count for size, count in calls.items())
    if not numel:
        return 0  # a barrier has no type to look up
    if dtype not in ELEMENT_BYTES:
        raise DataError(f"element type {dtype!r} is not known to the ledger", key="collectives.dtype")
    return numel * ELEMENT_BYTES[dtype]


def spaced(ranks: Iterable[int]) -> str:
    """Ranks as the files hold them, with blanks between."""
    return " ".join(str(r) for r in ranks)
