"""The ledger itself: what one rank keeps (containers) and sends (collectives), as the prediction states it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .dtypes import element_bytes
from .groups import Group

SCHEMA = "train-ledger/predict/1"

#: Containers that hold model state; the rest are buffers, scalars and caches.
STATE_CONTAINERS = ("param", "grad", "main_param", "exp_avg", "exp_avg_sq")

#: Who a container belongs to. Reconciliation demands 0 bytes of residual for the first two on every rank.
OWNERS = (
    "framework",  # allocated by Megatron Core, DeepSpeed or torchtitan/FSDP2
    "optimizer",  # state of the torch optimizer that the framework steps
    "model",  # buffers of the model itself, such as a RoPE cache
    "script",  # what the training program holds: its batch, its loss records
    "library",  # workspaces of cuBLAS, cuDNN, NCCL
    "allocator",  # rounding of blocks
)

#: The words for collective operations; point-to-point calls are `send` and `recv`.
OPS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
)


@dataclass(frozen=True)
class Container:
    """Storage of one kind on one rank.

    `numel` are elements that carry data, `pad_numel` elements that only fill up; `bytes` is their storage. `blocks`
    lists
    (bytes, how many) of the single allocations, as the caching allocator sees them; empty where they are not known.
    `rule` names the framework's file and function that allocates it.
    """

    name: str
    owner: str
    dtype: str
    numel: int
    pad_numel: int
    device: str
    rule: str
    blocks: tuple[tuple[int, int], ...] = ()

    @property
    def bytes(self) -> int:
        """Storage in bytes."""
        return (self.numel + self.pad_numel) * element_bytes(self.dtype)

    def to_dict(self) -> dict[str, Any]:
        """As in the predict file."""
        return {
            "name": self.name,
            "owner": self.owner,
            "dtype": self.dtype,
            "numel": self.numel,
            "pad_numel": self.pad_numel,
            "bytes": self.bytes,
            "device": self.device,
            "rule": self.rule,
            "blocks": [list(b) for b in self.blocks],
        }


@dataclass(frozen=True)
class Collective:
    """`count` calls of the same kind and size within one step of one rank.

    `in_numel` and `out_numel` are elements of this rank's input and output of ONE call: an all-gather over n ranks
    has out = n * in, a reduce-scatter in = n * out, an all-reduce and a broadcast in = out, a send only in, a recv
    only out. `group` is a name of the prediction's group list. `component` is the part of the framework that calls,
    `phase` the part of the step: `forward`, `backward`, `optimizer` or `step`.
    """

    op: str
    group: str
    dtype: str
    in_numel: int
    out_numel: int
    count: int
    component: str
    phase: str
    rule: str = ""

    @property
    def bytes(self) -> int:
        """Payload of all `count` calls: the larger of input and output, bytes."""
        return max(self.in_numel, self.out_numel) * element_bytes(self.dtype) * self.count

    def wire_bytes(self, group_size: int) -> float:
        """What this rank puts on the wire for all `count` calls with a ring over `group_size` ranks, bytes."""
        return ring_wire_bytes(self.op, group_size, self.bytes)

    def to_dict(self) -> dict[str, Any]:
        """As in the predict file."""
        return {
            "op": self.op,
            "group": self.group,
            "dtype": self.dtype,
            "in_numel": self.in_numel,
            "out_numel": self.out_numel,
            "count": self.count,
            "component": self.component,
            "phase": self.phase,
            "rule": self.rule,
        }


def ring_wire_bytes(op: str, group_size: int, payload_bytes: float) -> float:
    """Bytes one rank sends for a payload (the larger of input and output) with a ring over `group_size` ranks."""
    n = group_size
    share = {
        "all_gather": (n - 1) / n,
        "reduce_scatter": (n - 1) / n,
        "all_to_all": (n - 1) / n,
        "all_reduce": 2 * (n - 1) / n,
        "send": 1.0,
        "recv": 0.0,
        "barrier": 0.0,
    }
    return payload_bytes * share.get(op, (n - 1) / n)


@dataclass(frozen=True)
class RankLedger:
    """One rank's side of the prediction."""

    rank: int
    coords: Mapping[str, int]
    containers: tuple[Container, ...]
    collectives: tuple[Collective, ...]

    @property
    def resident_bytes(self) -> int:
        """Everything that is predicted to be allocated at a step boundary, on any device."""
        return sum(c.bytes for c in self.containers)

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients, fp32 master and both moments only."""
        return sum(c.bytes for c in self.containers if c.name in STATE_CONTAINERS)

    def to_dict(self) -> dict[str, Any]:
        """As in the predict file."""
        return {
            "rank": self.rank,
            "coords": dict(self.coords),
            "resident_bytes": self.resident_bytes,
            "state_bytes": self.state_bytes,
            "containers": [c.to_dict() for c in self.containers],
            "collectives": [c.to_dict() for c in self.collectives],
        }


@dataclass(frozen=True)
class Prediction:
    """What a run is predicted to keep and send. `step` is the kind of step: `steady` (default), `first` or `log`."""

    run: str
    framework: str
    world_size: int
    groups: tuple[Group, ...]
    ranks: tuple[RankLedger, ...]
    step: str = "steady"
    config_sha256: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The predict file, schema `train-ledger/predict/1`."""
        return {
            "schema": SCHEMA,
            "run": self.run,
            "framework": self.framework,
            "world_size": self.world_size,
            "step": self.step,
            "config_sha256": self.config_sha256,
            "groups": [{"name": g.name, "ranks": list(g.ranks)} for g in self.groups],
            "ranks": [r.to_dict() for r in self.ranks],
            **self.extra,
        }


def merge_collectives(rows: Iterable[Collective]) -> tuple[Collective, ...]:
    """Add up rows that differ in nothing but their count, in first-seen order."""
    total: dict[Collective, int] = {}
    for row in rows:
        key = replace(row, count=0)
        total[key] = total.get(key, 0) + row.count
    return tuple(replace(key, count=count) for key, count in total.items() if count)
