"""ZeRO stages 0, 1 and 2: parameters are whole on every rank, optimizer state is sharded (but in stage 0).

Three optimizer classes (runtime/engine.py:_do_optimizer_sanity_check): stage 0 `FP16_UnfusedOptimizer` (with bf16),
stage 1 with fp32 gradients `BF16_Optimizer`, else `DeepSpeedZeroOptimizer`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from train_ledger.spec.ledger import Collective, Container, merge_collectives

from .deepspeed_model import GRAD, ModelTrace

STAGE12 = "deepspeed/runtime/zero/stage_1_and_2.py"
BF16 = "deepspeed/runtime/bf16_optimizer.py"
UNFUSED = "deepspeed/runtime/fp16/unfused_optimizer.py"
ENGINE = "deepspeed/runtime/engine.py"
UTILS = "deepspeed/runtime/utils.py"
ADAM = "torch/optim/adam.py:Adam._init_group"
DATA_PARALLEL = "data_parallel"
#: Elements after which the engine's own all-reduce begins a new call (runtime/constants: MEMORY_OPT_ALLREDUCE_SIZE).
ENGINE_BUCKET = 500_000_000
#: Parameter groups are padded to a multiple of this times the ranks (stage_1_and_2.py:nccl_start_alignment_factor).
ALIGNMENT = 2


@dataclass(frozen=True, eq=False)
class Zero12:
    """What stages 0 to 2 depend on. Sizes count elements. Equal only to itself, so that caches find it at once."""

    trace: ModelTrace
    world_size: int
    micro_batches: int
    param_groups: tuple[tuple[int, ...], ...]
    reduce_bucket_size: int
    contiguous_gradients: bool
    reduce_scatter: bool
    comm_dtype: str
    grad_dtype: str
    stage: int
    overlap_comm: bool

    @property
    def bf16_optimizer(self) -> bool:
        """Stage 1 with fp32 gradients is another optimizer altogether."""
        return self.stage == 1 and self.grad_dtype == "float32"

    @functools.cached_property
    def group_numels(self) -> tuple[int, ...]:
        """Elements of each parameter group, without padding."""
        return tuple(sum(self.trace.numels[p] for p in group) for group in self.param_groups)

    @functools.cached_property
    def partition_numels(self) -> tuple[int, ...]:
        """Elements of one rank's part of each group, padding included
        (stage_1_and_2.py:flatten_dense_tensors_aligned).
        """
        step = ALIGNMENT * self.world_size
        return tuple(-(-numel // step) * ALIGNMENT for numel in self.group_numels)


# --- memory ---------------------------------------------------------------------------------------------------------


def own_numels(z: Zero12, rank: int) -> tuple[int, ...]:
    """Elements of each group that are in `rank`'s part; the rest of the part is padding."""
    if z.stage == 0:
        return z.group_numels
    return tuple(
        min(max(numel - rank * part, 0), part) for numel, part in zip(z.group_numels, z.partition_numels, strict=True)
    )


def shares(z: Zero12, parameter: int) -> tuple[tuple[int, int, int], ...]:
    """(rank, elements, first element) of the ranks that keep some of a parameter's fp32 master.

    Parameters of a group lie one after the other in its flat buffer, which is cut in equal parts, whatever they cut
    through (stage_1_and_2.py:get_data_parallel_partitions, bf16_optimizer.py:_setup_for_real_optimizer). Without ZeRO
    each rank keeps the whole of it.
    """
    numel = z.trace.numels[parameter]
    if z.stage == 0:
        return tuple((rank, numel, 0) for rank in range(z.world_size))
    number = next(i for i, group in enumerate(z.param_groups) if parameter in group)
    group, part = z.param_groups[number], z.partition_numels[number]
    start = sum(z.trace.numels[p] for p in group[: group.index(parameter)])
    found = []
    for rank in range(start // part, z.world_size):
        begin, end = max(start, rank * part), min(start + numel, (rank + 1) * part)
        if begin < end:
            found.append((rank, end - begin, begin - start))
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def containers(z: Zero12, own: tuple[int, ...]) -> tuple[Container, ...]:
    """What a rank with `own` elements of each group keeps between steps."""
    if z.stage == 0:
        return _unsharded(z)
    parts = z.partition_numels
    whole = [part * z.world_size for part in parts]
    total = sum(z.group_numels)
    mine, padding = sum(own), sum(parts) - sum(own)
    source = BF16 if z.bf16_optimizer else STAGE12

    def part(name: str, owner: str, rule: str) -> Container:
        return Container(name, owner, "float32", mine, padding, "cuda", rule, _blocks(4 * n for n in parts))

    out = [
        Container(
            "param",
            "framework",
            "bfloat16",
            total,
            sum(whole) - total,
            "cuda",
            f"{source}:{'_' if z.bf16_optimizer else ''}flatten_dense_tensors_aligned",
            _blocks(2 * n for n in whole),
        ),
        part("main_param", "framework", f"{source}:__init__"),
        part("exp_avg", "optimizer", ADAM),
        part("exp_avg_sq", "optimizer", ADAM),
        Container("step", "optimizer", "float32", len(parts), 0, "cpu", ADAM, ((4, len(parts)),)),
    ]
    if z.bf16_optimizer:
        # Gradients of the whole model stay, on every rank.
        out.append(
            Container(
                "grad",
                "framework",
                "float32",
                total,
                sum(whole) - total,
                "cuda",
                f"{BF16}:_setup_for_real_optimizer",
                _blocks(4 * n for n in whole),
            )
        )
        n = len(z.trace.numels)
        out.append(
            Container(
                "norm_buffer", "framework", "float32", n, 0, "cuda", f"{UTILS}:get_global_norm_of_tensors", ((4, n),)
            )
        )
    out.append(Container("global_grad_norm", "framework", "float32", 1, 0, "cuda", f"{source}:step", ((4, 1),)))
    return tuple(out)


def _unsharded(z: Zero12) -> tuple[Container, ...]:
    """Stage 0: one tensor a parameter of each kind, nothing padded (unfused_optimizer.py:__init__)."""
    total, count = sum(z.group_numels), len(z.trace.numels)

    def every(name: str, owner: str, dtype: str, size: int, rule: str) -> Container:
        return Container(name, owner, dtype, total, 0, "cuda", rule, _blocks(size * n for n in z.trace.numels))

    return (
        every("param", "framework", "bfloat16", 2, f"{ENGINE}:_configure_distributed_model"),
        every("main_param", "framework", "float32", 4, f"{UNFUSED}:__init__"),
        every("exp_avg", "optimizer", "float32", 4, ADAM),
        every("exp_avg_sq", "optimizer", "float32", 4, ADAM),
        Container("step", "optimizer", "float32", count, 0, "cpu", ADAM, ((4, count),)),
    )


def _blocks(sizes: Iterable[int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(Counter(sizes).items(), reverse=True))


# --- communication --------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def collectives(z: Zero12) -> tuple[Collective, ...]:
    """Calls of one step of any rank; all steps are alike."""
    if z.stage == 0:
        return merge_collectives(_engine_all_reduce(z.trace.numels, z.comm_dtype))
    if z.bf16_optimizer:
        whole = [part * z.world_size for part in z.partition_numels]
        return merge_collectives([*_engine_all_reduce(whole, z.comm_dtype), *_gather_parameters(z)])
    return merge_collectives([*_reduce_gradients(z), *_norms(z), *_gather_parameters(z)])


def _engine_all_reduce(numels: Iterable[int], dtype: str) -> list[Collective]:
    """Gradients of the last micro-batch's end, in order, a call as soon as there are more than `ENGINE_BUCKET`
    elements.
    """
    sizes, filled = [], 0
    for numel in numels:
        filled += numel
        if filled > ENGINE_BUCKET:
            sizes.append(filled)
            filled = 0
    if filled:
        sizes.append(filled)
    return [_all_reduce(n, dtype, "grad_reduce", "backward", f"{ENGINE}:allreduce_bucket") for n in sizes]


def _all_reduce(numel: int, dtype: str, component: str, phase: str, rule: str) -> Collective:
    return Collective("all_reduce", DATA_PARALLEL, dtype, numel, numel, 1, component, phase, rule)


def _norms(z: Zero12) -> list[Collective]:
    return [
        _all_reduce(1, "float32", "grad_norm", "optimizer", f"{STAGE12}:get_grad_norm_direct") for _ in z.param_groups
    ]


def _gather_parameters(z: Zero12) -> list[Collective]:
    """Every rank's updated part goes to all; `allgather_bucket_size` plays no part (utils.py:all_gather_dp_groups)."""
    if z.world_size == 1:
        return []
    rule = f"{UTILS}:all_gather_into_tensor_dp_groups"
    return [
        Collective(
            "all_gather", DATA_PARALLEL, "bfloat16", part, part * z.world_size, 1, "param_gather", "optimizer", rule
        )
        for part in z.partition_numels
    ]


def _reduce_gradients(z: Zero12) -> list[Collective]:
    """Stage 2 reduces every micro-batch, stage 1 the accumulated gradients of the last."""
    if z.stage == 1 and not z.overlap_comm:
        order = [p for group in z.param_groups for p in group]  # stage_1_and_2.py:reduce_gradients
    else:
        order = [number for kind, number in z.trace.backward if kind == GRAD]  # process_gradients, by hooks
    buckets: list[list[int]] = []
    filled = 0
    for param in order:
        numel = z.trace.numels[param]
        if not buckets or filled + numel > z.reduce_bucket_size:
            buckets.append([])
            filled = 0
        buckets[-1].append(param)
        filled += numel
    calls = [call for bucket in buckets for call in _reduce_bucket(z, bucket)]
    return calls * (z.micro_batches if z.stage == 2 else 1)


def _reduce_bucket(z: Zero12, bucket: list[int]) -> list[Collective]:
    """All-reduces of one bucket. "Reduce-scatter" means: each slice is kept only by the rank it belongs to."""
    total = sum(z.trace.numels[p] for p in bucket)
    if not z.contiguous_gradients:
        return [_all_reduce(total, z.comm_dtype, "grad_reduce", "backward", f"{STAGE12}:buffered_reduce_fallback")]
    if not z.reduce_scatter:
        return [
            _all_reduce(total, z.comm_dtype, "grad_reduce", "backward", f"{STAGE12}:gradient_reduction_w_predivide")
        ]
    sizes, filled = [], 0
    for numel in _slices(z, bucket):
        filled += numel
        if filled > z.reduce_bucket_size:
            sizes.append(filled)
            filled = 0
    if filled:
        sizes.append(filled)
    return [_all_reduce(n, z.comm_dtype, "grad_reduce", "backward", f"{STAGE12}:allreduce_and_scatter") for n in sizes]


def _slices(z: Zero12, bucket: list[int]) -> list[int]:
    """Elements of a bucket's slices, each within one rank's part; neighbours of one rank are one (average_tensor)."""
    place = _places(z)
    out: list[int] = []
    last_rank = -1
    for param in bucket:
        start, part = place[param]
        numel = z.trace.numels[param]
        at = start
        while at < start + numel:
            rank = at // part
            stop = min((rank + 1) * part, start + numel)
            if rank == last_rank:
                out[-1] += stop - at
            else:
                out.append(stop - at)
            last_rank, at = rank, stop
    return out


@functools.lru_cache(maxsize=64)
def _places(z: Zero12) -> dict[int, tuple[int, int]]:
    """Where each parameter begins in its group, and how large a rank's part of that group is."""
    out = {}
    for group, part in zip(z.param_groups, z.partition_numels, strict=True):
        for param, start in zip(group, accumulate((z.trace.numels[p] for p in group), initial=0), strict=False):
            out[param] = (start, part)
    return out
