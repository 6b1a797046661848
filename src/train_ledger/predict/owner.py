"""On which ranks the fp32 master of one weight lies, by each framework's rule for cutting it."""

from __future__ import annotations

import re

from train_ledger.predict.frameworks import megatron_layout, megatron_plan, torchtitan_layout, torchtitan_stages
from train_ledger.spec.groups import coordinates
from train_ledger.spec.model import CanonicalTensor, canonical_tensors
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


def owners(run: Run) -> dict[int, int]:
    """Elements of that weight's fp32 master by rank, for the ranks that hold any. (torchtitan: of its fp32 parameter.)

    Where Megatron's parameter is a fusion of several weights, elements of the whole parameter are counted. Empty where
    virtual pipeline stages cut the layers.
    """
    rule = {"megatron": _megatron, "deepspeed": _deepspeed, "torchtitan": _torchtitan}[run.framework]
    return rule(run, weight(run))


def _deepspeed(run: Run, tensor: CanonicalTensor) -> dict[int, int]:
    """Stage 3: equal parts of each parameter (`partition_parameters.py:_partition_param`); else flat groups' shares."""
    n = run.world_size
    if run.settings["zero_optimization"]["stage"] < 3:
        return {}
    part = -(-tensor.numel // n)
    return {r: min(part, tensor.numel - part * r) for r in range(n) if part * r < tensor.numel}


def _torchtitan(run: Run, tensor: CanonicalTensor) -> dict[int, int]:
    """Rows of dimension 0 over FSDP ranks (`Shard(0)`, torch.chunk), after tensor parallelism has cut its dimension."""
    tp, shards = run.parallel.tensor_parallel, run.parallel.data_parallel_shard
    rows, *rest = tensor.shape
    cols = rest[0] if rest else 1
    if tp > 1 and rest:
        if tensor.name.endswith(("o_proj.weight", "down_proj.weight")):
            cols //= tp
        else:
            rows = -(-rows // tp)
    part = -(-rows // shards)
    grid = torchtitan_layout.mesh_sizes(run)
    stage = torchtitan_stages.stage_of(run, tensor.name)
    out = {}
    for rank in range(run.world_size):
        at = coordinates(rank, grid)
        own = min(part, rows - part * at["dp_shard"])
        if own > 0 and at["pp"] == stage % run.parallel.pipeline_parallel:
            out[rank] = own * cols
    return out


def _megatron(run: Run, tensor: CanonicalTensor) -> dict[int, int]:
    """A rank's equal share of each bucket that the parameter lies in (optimizer/distrib_optimizer.py)."""
    plan = megatron_plan.plan(run)
    if plan.vp > 1:
        return {}
    found = _megatron_parameter(plan, tensor.name)
    if found is None:
        return {}
    stage, name = found
    chunk = megatron_plan.chunks(plan, stage)[0]
    names = [p.name for p in reversed(megatron_layout.chunk_params(plan, chunk))]
    layout = megatron_layout.buffer(plan, chunk)
    at = names.index(name)
    start, end = layout.starts[at], layout.ends[at]
    shards = plan.shards if plan.distributed_optimizer else 1
    held = []
    for shard in range(shards):
        own = 0
        for low, high in layout.buckets:
            share = (high - low) // shards
            own += max(0, min(end, low + share * (shard + 1)) - max(start, low + share * shard))
        held.append(own)
    grid = megatron_plan.sizes(run)
    out = {}
    for rank in range(run.world_size):
        c = coordinates(rank, grid)
        own = held[(c["cp"] + plan.cp * c["dp"]) % shards]
        if c["pp"] == stage and own:
            out[rank] = own
    return out


def _megatron_parameter(plan: megatron_plan.Plan, name: str) -> tuple[int, str] | None:
    """Pipeline stage and Megatron's name of a weight."""
    ends = {
        "model.embed_tokens.weight": (0, "embedding.word_embeddings.weight"),
        "model.norm.weight": (plan.pp - 1, "decoder.final_layernorm.weight"),
        "lm_head.weight": (plan.pp - 1, "output_layer.weight"),
    }
    if name in ends:
        return ends[name]
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if not match or match[2] not in MEGATRON_NAMES:
        return None
    layer, stage = int(match[1]), 0
    while layer >= megatron_plan.stage_layers(plan, stage):
        layer -= megatron_plan.stage_layers(plan, stage)
        stage += 1
    return stage, f"decoder.layers.{layer}.{MEGATRON_NAMES[match[2]]}.{match[3]}"
