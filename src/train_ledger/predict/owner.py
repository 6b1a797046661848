"""Which ranks hold which part of one weight and of its fp32 master, by each framework's rule for cutting it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from train_ledger.predict.frameworks import (
    deepspeed,
    megatron_layout,
    megatron_plan,
    torchtitan_layout,
    torchtitan_stages,
)
from train_ledger.spec.groups import coordinates
from train_ledger.spec.model import CanonicalTensor, canonical_tensors
from train_ledger.spec.placement import Kept, Slice
from train_ledger.spec.run import Run

#: Hugging Face Llama names inside a layer, and the Megatron parameter that holds them (some hold several).
MEGATRON_NAMES = {
    "input_layernorm": "input_layernorm",
    "self_attn.o_proj": "self_attention.linear_proj",
    "self_attn.q_proj": "self_attention.linear_qkv",
    "self_attn.k_proj": "self_attention.linear_qkv",
    "self_attn.v_proj": "self_attention.linear_qkv",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.gate_proj": "mlp.linear_fc1",
    "mlp.up_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
}


def weight(run: Run) -> CanonicalTensor:
    """The weight whose life is followed, or the first one where the model has no such weight."""
    tensors = canonical_tensors(run.model)
    return next((t for t in tensors if t.name == run.probe.lifeline_weight), tensors[0])


def fused(run: Run) -> str:
    """Megatron's parameter that holds that weight together with others, else empty text."""
    match = re.fullmatch(r"model\.layers\.\d+\.(.+)\.(?:weight|bias)", weight(run).name)
    own = MEGATRON_NAMES.get(match[1], "") if match and run.framework == "megatron" else ""
    return own if list(MEGATRON_NAMES.values()).count(own) > 1 else ""


def slices(run: Run) -> list[Slice]:
    """The parts of that weight by tensor-parallel rank, who holds each, and who keeps which elements of its master.

    torchtitan's master is its fp32 parameter. Where Megatron's parameter is a fusion of several weights, elements of
    the whole parameter are counted. Empty for a weight that no rule here places.
    """
    rule = {"megatron": _megatron, "deepspeed": _deepspeed, "torchtitan": _torchtitan}[run.framework]
    return rule(run, weight(run))


def _deepspeed(run: Run, tensor: CanonicalTensor) -> list[Slice]:
    """Data parallelism alone: one slice. Where every rank keeps a whole master (stage 0), each is a copy of its own."""
    found = deepspeed.master_shares(run, tensor.name)
    whole = len(found) > 1 and all(numel == tensor.numel for _, numel, _ in found)
    kept = tuple(Kept(rank, numel, first, (rank,) if whole else ()) for rank, numel, first in found)
    return [Slice(0, 1, tensor.numel, tuple(range(run.world_size)), kept)]


def _torchtitan(run: Run, tensor: CanonicalTensor) -> list[Slice]:
    """Rows of dimension 0 over FSDP ranks (`Shard(0)`, torch.chunk), after tensor parallelism has cut its dimension."""
    tp, shards = run.parallel.tensor_parallel, torchtitan_layout.shards(run)
    rows, *rest = tensor.shape
    cols = rest[0] if rest else 1
    split = tp > 1 and bool(rest)
    if split:
        if tensor.name.endswith(("o_proj.weight", "down_proj.weight")):
            cols //= tp
        else:
            rows = -(-rows // tp)
    part = -(-rows // shards)
    grid = torchtitan_layout.mesh_sizes(run)
    stage = torchtitan_stages.stage_of(run, tensor.name) % run.parallel.pipeline_parallel

    def kept(rank: int) -> Kept:
        at = coordinates(rank, grid)
        begin = min(rows, part * (at["dp_shard"] * run.parallel.context_parallel + at["cp"]))
        own = min(rows, begin + part) - begin
        return Kept(rank, own * cols, begin * cols, (at["tp"], at["dp_replicate"]))

    return _by_slice(run.world_size, grid, tp if split else 1, rows * cols, kept, stage)


def _by_slice(
    world_size: int, grid: Mapping[str, int], count: int, numel: int, kept: Callable[[int], Kept], stage: int
) -> list[Slice]:
    """The slices of a weight on one pipeline stage: `count` of `numel` elements, by tensor-parallel coordinate."""
    ranks = [r for r in range(world_size) if coordinates(r, grid).get("pp", 0) == stage]
    out = []
    for index in range(count):
        mine = tuple(r for r in ranks if count == 1 or coordinates(r, grid)["tp"] == index)
        out.append(Slice(index, count, numel, mine, tuple(k for k in map(kept, mine) if k.numel)))
    return out


def _megatron(run: Run, tensor: CanonicalTensor) -> list[Slice]:
    """A rank's equal share of each bucket that the parameter lies in (optimizer/distrib_optimizer.py)."""
    plan = megatron_plan.plan(run)
    found = _megatron_parameter(plan, tensor.name)
    if found is None:
        return []
    stage, chunk, name = found
    params = {p.name: p.numel for p in reversed(megatron_layout.chunk_params(plan, chunk))}
    layout = megatron_layout.buffer(plan, chunk)
    at = list(params).index(name)
    start, end = layout.starts[at], layout.ends[at]
    shards = plan.shards if plan.distributed_optimizer else 1
    grid = megatron_plan.sizes(run)

    def kept(rank: int) -> Kept:
        c = coordinates(rank, grid)
        shard, own, first = (c["cp"] + plan.cp * c["dp"]) % shards, 0, None
        for low, high in layout.buckets:
            share = (high - low) // shards
            begin, stop = max(start, low + share * shard), min(end, low + share * (shard + 1))
            if begin < stop:
                own, first = own + stop - begin, begin - start if first is None else first
        return Kept(rank, own, first, (c["tp"], (c["cp"] + plan.cp * c["dp"]) // shards))

    # Norms and positions are whole on every rank; other matrices, and biases of a split output dimension, are cut.
    whole = "norm." in name or name.endswith(("position_embeddings.weight", "linear_proj.bias", "linear_fc2.bias"))
    return _by_slice(run.world_size, grid, 1 if whole else plan.tp, params[name], kept, stage)


def _megatron_parameter(plan: megatron_plan.Plan, name: str) -> tuple[int, megatron_plan.Chunk, str] | None:
    """Pipeline stage, model chunk (with virtual stages a stage has several) and Megatron's name of a weight."""
    ends = {
        "model.embed_tokens.weight": (0, 0, "embedding.word_embeddings.weight"),
        "model.embed_positions.weight": (0, 0, "embedding.position_embeddings.weight"),
        "model.norm.weight": (plan.pp - 1, -1, "decoder.final_layernorm.weight"),
        "lm_head.weight": (plan.pp - 1, -1, "output_layer.weight"),
    }
    if name in ends:
        stage, index, own = ends[name]
        return stage, megatron_plan.chunks(plan, stage)[index], own
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if not match or match[2] not in MEGATRON_NAMES:
        return None
    layer = int(match[1])
    # Chunk 0 of every stage, then chunk 1 of every stage (transformer_layer.py:get_transformer_layer_offset).
    for index in range(plan.vp):
        for stage in range(plan.pp):
            chunk = megatron_plan.chunks(plan, stage)[index]
            if layer < chunk.layers:
                return stage, chunk, f"decoder.layers.{layer}.{MEGATRON_NAMES[match[2]]}.{match[3]}"
            layer -= chunk.layers
    return None
