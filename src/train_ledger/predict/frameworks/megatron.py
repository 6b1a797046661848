"""Megatron Core 0.18.0: what each rank keeps and sends. Verified by running it; see
tests/integration/test_megatron*.py.

A bf16 parameter lives whole in a flat buffer on every data-parallel rank, its gradient in a second one; the fp32
master and both moments of each rank's share of a bucket belong to the optimizer (ZeRO-1). Rules name files below
megatron/core.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable

from train_ledger.spec.groups import Group, coordinates, groups_along
from train_ledger.spec.ledger import RankLedger
from train_ledger.spec.run import Run

from .megatron_check import check
from .megatron_comm import collectives
from .megatron_layout import owned
from .megatron_plan import Plan, chunks, plan, sizes
from .megatron_state import containers

__all__ = ["check", "coords", "groups", "rank_class", "rank_ledger"]

#: Process groups in the order in which parallel_state.py:initialize_model_parallel makes them, by the short names of
#: process_groups_config.py:ProcessGroupCollection, and the dimensions that each varies along. The embedding groups are
#: made stage by stage and stand below. A dense model's expert groups repeat the others.
GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("dp_cp", ("dp", "cp")),
    ("dp", ("dp",)),
    ("cp", ("cp",)),
    ("mp", ("tp", "pp")),
    ("tp", ("tp",)),
    ("pp", ("pp",)),
    ("tp_dp_cp", ("tp", "dp", "cp")),
    ("tp_dp", ("tp", "dp")),
    ("tp_cp", ("tp", "cp")),
    ("ep", ("ep",)),
    ("expt_tp", ("tp",)),
    ("tp_ep", ("tp", "ep")),
    ("tp_ep_pp", ("tp", "ep", "pp")),
    ("expt_dp", ("dp", "cp")),
)


def groups(run: Run) -> list[Group]:
    """Every process group that Megatron makes for this run, ranks ascending."""
    grid = sizes(run)
    out = [Group("world", tuple(range(run.world_size)))]
    for name, dims in GROUPS:
        lists = groups_along(grid, dims)
        out.extend(Group(name, ranks) for ranks in lists)
        if name == "pp":
            # First and last stage hold the tied embedding, the first the positions
            # (parallel_state.py:default_embedding_ranks).
            out.extend(Group("embd", ranks if len(ranks) == 1 else (ranks[0], ranks[-1])) for ranks in lists)
            out.extend(Group("pos_embd", ranks[:1]) for ranks in lists)
    out.append(Group("intra_dist_opt", tuple(range(run.world_size))))
    return out


def coords(run: Run, rank: int) -> dict[str, int]:
    """Place of a rank: tensor, context, data and pipeline parallel."""
    at = coordinates(rank, sizes(run))
    return {name: at[name] for name in ("tp", "cp", "dp", "pp")}


def rank_ledger(run: Run, rank: int, step: str = "steady") -> RankLedger:
    """What a rank keeps between steps and calls in one.

    Args:
        run: resolved and checked.
        rank: global rank.
        step: in the `first` step gradients are reduced after backward instead of within it; sizes and counts are equal.
    """
    at, rule = coords(run, rank), plan(run)
    return RankLedger(
        rank=rank,
        coords=at,
        containers=containers(rule, at["pp"], _shard(run, at)),
        collectives=collectives(rule, at["pp"], step == "first"),
    )


def rank_class(run: Run, rank: int) -> Hashable:
    """Equal for ranks that keep and send the same. Tensor-parallel ranks never differ; stages of one shape need not."""
    at = coords(run, rank)
    return _class(plan(run), at["pp"], _shard(run, at))


@functools.lru_cache(maxsize=65536)
def _class(rule: Plan, stage: int, shard: int) -> Hashable:
    held = chunks(rule, stage)
    mine: Hashable = ()
    if rule.distributed_optimizer:
        mine = tuple(tuple(sorted(owned(rule, chunk, shard).items())) for chunk in held)
    ends = (stage == 0, stage == rule.pp - 1) if rule.pp > 1 else ()
    return (held, ends, mine)


def _shard(run: Run, at: dict[str, int]) -> int:
    """Number of a rank within its group `dp_cp`, in which context parallel varies fastest."""
    return at["dp"] * run.parallel.context_parallel + at["cp"]
