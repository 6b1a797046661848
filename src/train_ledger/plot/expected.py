"""A hand estimate of the paper's three runs, in its own rounding, and the same figures of a prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from train_ledger.spec.dtypes import ELEMENT_BYTES
from train_ledger.spec.ledger import ring_wire_bytes


@dataclass(frozen=True)
class Figures:
    """Of one rank, bytes: resident state, what else is resident, and what it sends in a step by family of groups."""

    params_bytes: int
    grads_bytes: int
    optimizer_bytes: int
    other_bytes: int
    data_wire_bytes: int
    tensor_wire_bytes: int
    pipeline_wire_bytes: int

    @property
    def resident_bytes(self) -> int:
        """All that is resident."""
        return self.params_bytes + self.grads_bytes + self.optimizer_bytes + self.other_bytes


GB = 10**9
#: What one expects by hand. B a parameter, gradient and optimizer state: Megatron Core 2, 4 and 12 over data parallel,
#: one reduce-scatter and one all-gather; ZeRO-3 2, 2 and 12, FSDP2 4, 4 and 8, all over the shards, two all-gathers and
#: one reduce-scatter; two of each a layer and direction for tensor parallelism.
HAND_ESTIMATE: dict[str, Figures] = {
    "megatron-tp2-pp2-dp2": Figures(
        *(75 * GB // 100, 15 * GB // 10, 225 * GB // 100, 0),
        *(11 * GB // 10, 86 * GB // 10, 27 * GB // 100),
    ),
    "deepspeed-zero3-dp8": Figures(38 * GB // 100, 38 * GB // 100, 225 * GB // 100, 0, 79 * GB // 10, 0, 0),
    "torchtitan-fsdp4-tp2": Figures(
        *(75 * GB // 100, 75 * GB // 100, 15 * GB // 10, 0),
        *(45 * GB // 10, 43 * GB // 10, 0),
    ),
}

_PARTS = {
    "param": "params_bytes",
    "grad": "grads_bytes",
    "main_param": "optimizer_bytes",
    "exp_avg": "optimizer_bytes",
    "exp_avg_sq": "optimizer_bytes",
}
_FAMILIES = {"tp": "tensor_wire_bytes", "pp": "pipeline_wire_bytes"}


def payload_bytes(call: Mapping[str, Any]) -> int:
    """Bytes of a predicted row of calls, all of them: the larger of input and output."""
    return int(max(call["in_numel"], call["out_numel"]) * ELEMENT_BYTES.get(call["dtype"], 0) * call["count"])


def group_sizes(prediction: Mapping[str, Any], rank: int) -> dict[str, int]:
    """Ranks of each group that a rank is in, by the group's name."""
    return {g["name"]: len(g["ranks"]) for g in prediction["groups"] if rank in g["ranks"]}


def predicted_figures(prediction: Mapping[str, Any], index: int = 0) -> Figures:
    """The same figures from a predict file, for its `index`-th rank. Groups but tp and pp count as data parallel."""
    ledger = prediction["ranks"][index]
    out = dict.fromkeys(Figures.__dataclass_fields__, 0)
    for c in ledger["containers"]:
        out[_PARTS.get(c["name"], "other_bytes")] += c["bytes"]
    sizes = group_sizes(prediction, ledger["rank"])
    for c in ledger["collectives"]:
        family = _FAMILIES.get(c["group"], "data_wire_bytes")
        out[family] += round(ring_wire_bytes(c["op"], sizes.get(c["group"], 1), payload_bytes(c)))
    return Figures(**out)
