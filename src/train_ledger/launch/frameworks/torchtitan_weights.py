"""Canonical weights into torchtitan's shards and back, through its own state-dict adapter where that serves."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torchtitan.models.common.attention import FusedQKVLinear
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from train_ledger.spec.model import ModelShape, canonical_tensors

Tensors = dict[str, torch.Tensor]

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_SIMPLE = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_IN_LAYER = {
    "input_layernorm.weight": "attention_norm.weight",
    "self_attn.q_proj.weight": "attention.qkv_linear.wqkv.weight",
    "self_attn.k_proj.weight": "attention.qkv_linear.wqkv.weight",
    "self_attn.v_proj.weight": "attention.qkv_linear.wqkv.weight",
    "self_attn.q_norm.weight": "attention.q_norm.weight",
    "self_attn.k_norm.weight": "attention.k_norm.weight",
    "self_attn.o_proj.weight": "attention.wo.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
}


def torchtitan_name(canonical: str) -> str:
    """The parameter that holds a weight of that Hugging Face Llama name; an unknown name comes back as it is."""
    found = _LAYER.fullmatch(canonical)
    if found:
        return f"layers.{found[1]}.{_IN_LAYER.get(found[2], found[2])}"
    return _SIMPLE.get(canonical, canonical)


def tensor_parallel_dim(parameter: DTensor) -> int | None:
    """The dimension that tensor parallelism splits, or None where every rank holds the whole."""
    names = parameter.device_mesh.mesh_dim_names or ()
    if "tp" not in names:
        return None
    placement = parameter.placements[names.index("tp")]
    return placement.dim if isinstance(placement, Shard) else None


def load(
    trainer: Any,
    model: ModelShape,
    parameters: Mapping[str, torch.nn.Parameter],
    coords: Mapping[str, int],
    read: Callable[[str], torch.Tensor],
) -> None:
    """Every canonical weight into this rank's shard of the parameter that holds it. Nothing is sent.

    Raises:
        DataError: raised by `read`.
    """
    adapter = trainer.config.model_spec.state_dict_adapter(trainer.model_config, None)
    degrees = trainer.parallel_dims
    for names in _groups(model):
        if not any(torchtitan_name(name) in parameters for name in names):
            continue  # another pipeline stage's
        whole = _to_torchtitan(adapter, trainer, {name: read(name) for name in names})
        for fqn, value in whole.items():
            if fqn not in parameters:
                continue  # a tied head is the embedding's parameter; norm and head may be another stage's
            parameter = parameters[fqn]
            assert isinstance(parameter, DTensor)
            dim = tensor_parallel_dim(parameter)
            if dim is not None:
                value = _chunk(value, degrees.tp, coords["tp"], dim)
            with torch.no_grad():
                parameter.to_local().copy_(_chunk(value, _shards(degrees), _shard(degrees, coords), 0))


def export(
    trainer: Any, model: ModelShape, parameters: Mapping[str, torch.nn.Parameter], coords: Mapping[str, int]
) -> Tensors:
    """The fp32 weights under canonical names, whole, on CPU: all of a pipeline stage's on its first rank (rank 0 has
    all without stages), nothing on the others.
    """
    adapter = trainer.config.model_spec.state_dict_adapter(trainer.model_config, None)
    out: Tensors = {}
    group = _stage_group(trainer.parallel_dims.pp)
    for names in _groups(model):
        fqns = dict.fromkeys(torchtitan_name(name) for name in names)
        whole = {fqn: _gather(parameters[fqn], trainer.parallel_dims, group) for fqn in fqns if fqn in parameters}
        if whole and dist.get_rank(group) == 0:
            out.update(_to_canonical(adapter, trainer, {k: v for k, v in whole.items() if v is not None}))
    return {t.name: out[t.name] for t in canonical_tensors(model) if t.name in out}


def _stage_group(stages: int) -> dist.ProcessGroup | None:
    """The ranks that hold the same pipeline stages, which lie side by side; torchtitan has no group of them. None, the
    world, where there are no stages.
    """
    if stages == 1:
        return None
    each = dist.get_world_size() // stages
    made = [dist.new_group(list(range(first, first + each))) for first in range(0, stages * each, each)]
    return made[dist.get_rank() // each]


def _groups(model: ModelShape) -> list[list[str]]:
    """Canonical names in parts that the adapter can convert by themselves: outside of layers together, then layer by
    layer.
    """
    root: list[str] = []
    layers: dict[str, list[str]] = {}
    for tensor in canonical_tensors(model):
        found = _LAYER.fullmatch(tensor.name)
        (layers.setdefault(found[1], []) if found else root).append(tensor.name)
    return [root, *layers.values()]


def _to_torchtitan(adapter: BaseStateDictAdapter, trainer: Any, tensors: Tensors) -> Tensors:
    """Hugging Face's tensors as torchtitan's: rows of q and k in Llama 3's interleaved RoPE order, q, k and v fused.

    Sources: `models/llama3/state_dict_adapter.py:from_hf`,
    `models/common/attention.py:FusedQKVLinear._merge_qkv_on_load`.
    """
    if trainer.model_config.enable_weight_tying:
        # from_hf wants the embedding in every call then; a layer has no use for it.
        tensors.setdefault("model.embed_tokens.weight", torch.empty(0))
    out: Tensors = adapter.from_hf(tensors)
    for prefix in _fused(out):
        FusedQKVLinear._merge_qkv_on_load(_qkv_module(trainer), out, prefix)
    return {name: value for name, value in out.items() if value.numel()}


def _to_canonical(adapter: BaseStateDictAdapter, trainer: Any, tensors: Tensors) -> Tensors:
    """The inverse of `_to_torchtitan`."""
    for name in [n for n in tensors if n.endswith("wqkv.weight")]:
        FusedQKVLinear._split_qkv_on_save(_qkv_module(trainer), tensors, name.removesuffix("wqkv.weight"), None)
    return {name: value.contiguous() for name, value in adapter.to_hf(tensors).items()}


def _fused(tensors: Tensors) -> list[str]:
    return [name.removesuffix("wq.weight") for name in tensors if name.endswith("qkv_linear.wq.weight")]


def _qkv_module(trainer: Any) -> torch.nn.Module:
    """One module of fused projections: its sizes are what splitting and merging need."""
    return next(m for part in trainer.model_parts for m in part.modules() if isinstance(m, FusedQKVLinear))


def _shards(degrees: Any) -> int:
    """Ranks that FSDP shards over: those that split the sequence are among them."""
    return int(degrees.dp_shard * degrees.cp)


def _shard(degrees: Any, coords: Mapping[str, int]) -> int:
    """Which of the shards is this rank's; `cp` is among the coordinates only where the sequence is split."""
    return int(coords["dp_shard"] * degrees.cp + coords.get("cp", 0))


def _chunk(whole: torch.Tensor, parts: int, part: int, dim: int) -> torch.Tensor:
    """Part `part` as `torch.chunk` cuts it; the last parts may be smaller or empty
    (`_fsdp_common.py:_chunk_with_empty`).
    """
    size = -(-whole.size(dim) // parts)
    start = min(part * size, whole.size(dim))
    return whole.narrow(dim, start, min(size, whole.size(dim) - start))


def _gather(parameter: torch.nn.Parameter, degrees: Any, group: dist.ProcessGroup | None) -> torch.Tensor | None:
    """The whole parameter on the CPU of the group's first rank, from the shards of replica 0. All its ranks call it."""
    assert isinstance(parameter, DTensor)
    dim = tensor_parallel_dim(parameter)
    shape = list(parameter.shape)
    split = degrees.tp if dim is not None else 1
    largest = list(shape)
    if dim is not None:
        largest[dim] = -(-shape[dim] // split)
    largest[0] = -(-largest[0] // _shards(degrees))
    local = parameter.to_local().detach()
    sent = local.new_zeros(torch.Size(largest).numel())
    sent[: local.numel()] = local.reshape(-1)
    ranks = dist.get_world_size(group)
    received = sent.new_empty(ranks * sent.numel())
    dist.all_gather_into_tensor(received, sent, group=group)
    if dist.get_rank(group) != 0:
        return None
    every = received.cpu().view(ranks, -1)
    columns = []
    for tp in range(split):
        piece = list(shape)
        if dim is not None:
            piece[dim] = _chunk(torch.empty(shape[dim], device="meta"), split, tp, 0).numel()
        rows = []
        for shard in range(_shards(degrees)):
            count = _chunk(torch.empty(piece[0], device="meta"), _shards(degrees), shard, 0).numel()
            part = torch.Size([count, *piece[1:]])
            rows.append(every[shard * degrees.tp + tp, : part.numel()].view(part))
        columns.append(torch.cat(rows))
    return torch.cat(columns, dim) if dim is not None else columns[0]
