"""Prediction for torchtitan 0.3.0 on torch 2.14.1: FSDP2, HSDP, tensor, context, pipeline parallelism of a Llama 3."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping

from train_ledger.spec.dtypes import element_bytes
from train_ledger.spec.groups import Group
from train_ledger.spec.ledger import Container, RankLedger, merge_collectives
from train_ledger.spec.run import Run

from . import torchtitan_layout as layouts
from . import torchtitan_pipeline
from .torchtitan_calls import collectives, reduced_parts
from .torchtitan_check import check
from .torchtitan_layout import Layout

__all__ = ["check", "coords", "groups", "rank_class", "rank_ledger"]

_PARAM = "torch/distributed/fsdp/_fully_shard/_fsdp_param.py:FSDPParam._init_sharded_param"
_REDUCE = "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:foreach_reduce"
_ADAM = "torch/optim/adam.py:Adam._init_group"


def groups(run: Run) -> list[Group]:
    """The world and torchtitan's meshes of one dimension."""
    return layouts.groups(run)


def coords(run: Run, rank: int) -> dict[str, int]:
    """Place on torchtitan's mesh."""
    return layouts.coordinates(run, rank)


def rank_class(run: Run, rank: int) -> Hashable:
    """Ranks of one class hold parts of the same sizes."""
    return layouts.layout_class(run, rank)


def rank_ledger(run: Run, rank: int, step: str = "steady") -> RankLedger:
    """What `rank` keeps at a step boundary and sends in a step.

    Args:
        run: resolved and checked.
        rank: global rank.
        step: `steady`, `first` (step 1) or `log` (a step that logs).
    """
    layout = layouts.layout(run, rank)
    return RankLedger(
        rank=rank,
        coords=coords(run, rank),
        containers=tuple(_containers(run, layout, rank)),
        collectives=merge_collectives(collectives(run, layout, rank, step)),
    )


def _containers(run: Run, layout: Layout, rank: int) -> Iterator[Container]:
    def container(
        name: str,
        owner: str,
        dtype: str,
        numel: int,
        pad_numel: int,
        rule: str,
        storages: Mapping[int, int],
        on_host: bool = False,
    ) -> Container:
        size = element_bytes(dtype)
        blocks = tuple((n * size, count) for n, count in sorted(storages.items(), reverse=True))
        return Container(name, owner, dtype, numel, pad_numel, "cpu" if on_host else "cuda", rule, blocks)

    owned = padded = 0
    storages: Counter[int] = Counter()
    moments: Counter[int] = Counter()
    buffers: Counter[int] = Counter()
    for unit in layout.units:
        for shard in unit.shards:
            owned += shard.owned_numel * unit.count
            padded += shard.padded_numel * unit.count
            storages[shard.padded_numel] += unit.count
            moments[shard.owned_numel] += unit.count
        for part in reduced_parts(run, unit):
            buffers[sum(part)] += unit.count
    if run.parallel.pipeline_parallel > 1:
        buffers = torchtitan_pipeline.grad_buffers(run, layout, rank)
    del moments[0]
    reduced = sum(numel * count for numel, count in buffers.items())

    # One fp32 storage a parameter, padded so that every rank gathers the same number of rows.
    yield container("param", "framework", "float32", owned, padded - owned, _PARAM, storages)
    # Gradients are views of what they were reduced into, and stay until the next step's zero_grad
    # (trainer.py:train_step).
    yield container("grad", "framework", "float32", owned, reduced - owned, _REDUCE, buffers)
    yield container("exp_avg", "optimizer", "float32", owned, 0, _ADAM, moments)
    yield container("exp_avg_sq", "optimizer", "float32", owned, 0, _ADAM, moments)
    yield container("step", "optimizer", "float32", layout.num_parameters, 0, _ADAM, {1: layout.num_parameters})

    # A tie that fully_shard did not see (torchtitan_layout.py): where a shard needs padding, each twin pads for itself
    # (_fsdp_param.py:FSDPParam.reset_sharded_param). The first one's storage stays behind, and the embedding reads it.
    copies = [t.padded_numel for u in layout.units for t in u.twins if t.owned_numel < t.padded_numel]
    if copies:
        rule = "torch/distributed/fsdp/_fully_shard/_fsdp_param.py:FSDPParam.reset_sharded_param"
        yield container("tied_param_copy", "framework", "float32", sum(copies), 0, rule, Counter(copies))

    # Llama 3 keeps a complex number for a pair of channels, Qwen 3 cosine and sine for every channel.
    width, dtype, kind = (
        (2 * run.model.head_dim, "float32", "CosSinRoPE")
        if run.model.qk_norm
        else (run.model.head_dim // 2, "complex64", "ComplexRoPE")
    )
    cache, layers = run.seq_length * width, layout.num_layers
    rule = f"torchtitan/models/common/rope.py:{kind}._precompute_cache"
    if layers:
        yield container("rope_cache", "model", dtype, layers * cache, 0, rule, {cache: layers})
    if run.parallel.pipeline_parallel > 1:
        yield from torchtitan_pipeline.received(run, rank)

    # trainer.py:batch_generator holds the last micro-batch until it is asked for the next: inputs and positions where
    # they were moved to, labels where they were loaded.
    tokens = run.micro_batch * run.seq_length
    rule = "torchtitan/trainer.py:Trainer.batch_generator"
    yield container("batch", "script", "int64", 2 * tokens, 0, rule, {tokens: 2})
    yield container("batch", "script", "int64", tokens, 0, rule, {tokens: 1}, on_host=True)
    rule = "torch/distributed/device_mesh.py:DeviceMesh.__init__"
    yield container("device_mesh", "framework", "int32", run.world_size, 0, rule, {run.world_size: 1}, on_host=True)
