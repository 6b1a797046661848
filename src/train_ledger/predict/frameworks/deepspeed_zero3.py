"""ZeRO-3: what it depends on, and what stays resident between steps. Its calls are in `deepspeed_zero3_replay`."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from train_ledger.spec.ledger import Container

from .deepspeed_model import ModelTrace

PARTITION = "deepspeed/runtime/zero/partition_parameters.py"
STAGE3 = "deepspeed/runtime/zero/stage3.py"


@dataclass(frozen=True, eq=False)
class Zero3:
    """What ZeRO-3 depends on. Sizes and thresholds count elements.

    Equal only to itself, so that caches find it at once.
    """

    trace: ModelTrace
    world_size: int
    micro_batches: int
    param_groups: tuple[tuple[int, ...], ...]
    reduce_bucket_size: int
    prefetch_bucket_size: int
    param_persistence_threshold: int
    max_live_parameters: int
    max_reuse_distance: int
    sub_group_size: int
    contiguous_gradients: bool
    reduce_scatter: bool
    comm_dtype: str
    grad_dtype: str

    def shard(self, param: int) -> int:
        """Elements of a parameter on each rank, padding included (partition_parameters.py:_aligned_size)."""
        return -(-self.trace.numels[param] // self.world_size)

    def persists(self, param: int) -> bool:
        """Small enough to stay whole between uses (parameter_offload.py:mark_persistent_parameters)."""
        return self.trace.numels[param] <= self.param_persistence_threshold

    @functools.cached_property
    def sizes(self) -> list[tuple[int, int, int]]:
        """(elements, elements of a shard, how many) of the parameters that differ in size."""
        return [(n, -(-n // self.world_size), times) for n, times in Counter(self.trace.numels).items()]

    @functools.cached_property
    def sub_groups(self) -> list[list[int]]:
        """Parameters that the optimizer steps together (stage3.py:_create_fp16_sub_groups)."""
        out: list[list[int]] = []
        for group in self.param_groups:
            if self.sub_group_size >= sum(map(self.shard, group)):
                out.append(list(group))
                continue
            current: list[int] = []
            filled = 0
            for param in group:
                current.append(param)
                filled += self.shard(param)
                if filled >= self.sub_group_size or param == group[-1]:
                    out.append(current)
                    current, filled = [], 0
        return out


def own_numel(z: Zero3, rank: int) -> int:
    """Elements of all parameters that fall to `rank`; the rest of its shards is padding."""
    return sum(times * min(max(numel - rank * shard, 0), shard) for numel, shard, times in z.sizes)


@functools.lru_cache(maxsize=1024)
def containers(z: Zero3, own: int) -> tuple[Container, ...]:
    """What a rank with `own` elements of the parameters keeps between steps.

    Measured to the byte: (2 + 4 + 8 + g) M + c B + persisted + scalars, with M the padded shards, B the bucket.
    """
    groups = [sum(map(z.shard, group)) for group in z.sub_groups]
    padded = sum(groups)
    fp32_blocks = blocks(4 * n for n in groups)

    def sharded(name: str, owner: str, dtype: str, rule: str, size: tuple[tuple[int, int], ...]) -> Container:
        return Container(name, owner, dtype, own, padded - own, "cuda", rule, size)

    out = [
        sharded(
            "param",
            "framework",
            "bfloat16",
            f"{STAGE3}:DeepSpeedZeroOptimizer_Stage3._create_fp16_partitions_with_defragmentation",
            ((2 * padded, 1),),
        ),
        sharded("main_param", "framework", "float32", f"{STAGE3}:_create_fp32_partitions", fp32_blocks),
        sharded("exp_avg", "optimizer", "float32", "torch/optim/adam.py:Adam._init_group", fp32_blocks),
        sharded("exp_avg_sq", "optimizer", "float32", "torch/optim/adam.py:Adam._init_group", fp32_blocks),
        # torch keeps it on the CPU whatever the parameters are on.
        Container(
            "step",
            "optimizer",
            "float32",
            len(groups),
            0,
            "cpu",
            "torch/optim/adam.py:Adam._init_group",
            ((4, len(groups)),),
        ),
        sharded(
            "grad",
            "framework",
            z.grad_dtype,
            f"{STAGE3}:_setup_for_real_optimizer",
            ((bytes_of(z.grad_dtype) * padded, 1),),
        ),
    ]
    if z.contiguous_gradients:
        size = z.reduce_bucket_size
        block = ((bytes_of(z.comm_dtype) * size, 1),)
        out.append(
            Container(
                "reduce_bucket",
                "framework",
                z.comm_dtype,
                size,
                0,
                "cuda",
                f"{STAGE3}:_setup_for_real_optimizer",
                block,
            )
        )
    out += persisted(z)
    out += [
        Container("inf_or_nan_tracker", "framework", "bool", 1, 0, "cuda", f"{STAGE3}:__init__", ((1, 1),)),
        Container("global_grad_norm", "framework", "float64", 1, 0, "cuda", f"{STAGE3}:step", ((8, 1),)),
    ]
    return tuple(out)


def persisted(z: Zero3) -> list[Container]:
    """Parameters that are gathered after each step and stay whole."""
    whole = [p for p in range(len(z.trace.numels)) if z.persists(p)]
    # On one rank nothing is gathered, the shard itself is used (partition_parameters.py:NoGatherCoalescedHandle); but
    # a single parameter takes another way (_allgather_params_sequential), which always copies.
    if not whole or (z.world_size == 1 and len(whole) > 1):
        return []
    numel = sum(z.trace.numels[p] for p in whole)
    sizes = [2 * z.world_size * z.shard(p) for p in whole]
    rule = f"{PARTITION}:{persist_function(whole)}"
    return [
        Container(
            "persisted_param", "framework", "bfloat16", numel, sum(sizes) // 2 - numel, "cuda", rule, blocks(sizes)
        )
    ]


def persist_function(whole: Sequence[int]) -> str:
    """The function of partition_parameters.py that gathers what persists."""
    return "_allgather_params_sequential" if len(whole) == 1 else "_allgather_params_coalesced"


def bytes_of(dtype: str) -> int:
    """Bytes of an element of a gradient type."""
    return {"bfloat16": 2, "float16": 2, "float32": 4}[dtype]


def blocks(sizes: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """(bytes, how many) of single allocations."""
    return tuple(sorted(Counter(sizes).items(), reverse=True))
