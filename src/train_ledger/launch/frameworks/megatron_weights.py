"""Canonical weights (Hugging Face Llama names, whole, fp32) to and from the parameters of one Megatron rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from train_ledger.spec.model import ModelShape

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)\.(weight|bias)")

#: Module of a Megatron layer -> (canonical modules that it is made of, how it is cut over tensor parallel).
LAYER_MODULES: dict[str, tuple[tuple[str, ...], str]] = {
    "input_layernorm": (("input_layernorm",), "whole"),
    "self_attention.linear_qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "qkv"),
    "self_attention.linear_proj": (("self_attn.o_proj",), "columns"),
    "self_attention.q_layernorm": (("self_attn.q_norm",), "whole"),
    "self_attention.k_layernorm": (("self_attn.k_norm",), "whole"),
    "pre_mlp_layernorm": (("post_attention_layernorm",), "whole"),
    "mlp.linear_fc1": (("mlp.gate_proj", "mlp.up_proj"), "gated"),
    "mlp.linear_fc2": (("mlp.down_proj",), "columns"),
}


@dataclass(frozen=True)
class Origin:
    """What a Megatron parameter is made of: canonical names, and how the parts are joined and cut.

    `whole`: the same on every tensor-parallel rank. `rows`, `columns`: cut along that dimension. `vocab`: rows,
    padded with zeros. `qkv`: rows, query, key and value of each query group side by side. `gated`: on each rank its
    rows of the gate, then its rows of the up projection.
    """

    names: tuple[str, ...]
    cut: str


def origin(name: str, layer_offset: int, model: ModelShape) -> Origin:
    """Where parameter `name` of a GPTModel comes from.

    Args:
        name: without wrappers' prefixes; layers count from 0 in each chunk.
        layer_offset: global number of the chunk's first layer.
    """
    outer = {
        "embedding.word_embeddings.weight": Origin(("model.embed_tokens.weight",), "vocab"),
        "embedding.position_embeddings.weight": Origin(("model.embed_positions.weight",), "whole"),
        "decoder.final_layernorm.weight": Origin(("model.norm.weight",), "whole"),
        "decoder.final_layernorm.bias": Origin(("model.norm.bias",), "whole"),
        "output_layer.weight": Origin(
            ("model.embed_tokens.weight" if model.tie_embeddings else "lm_head.weight",), "vocab"
        ),
    }
    if name in outer:
        return outer[name]
    found = LAYER.fullmatch(name)
    if not found:
        raise KeyError(f"no canonical weight is known for Megatron's {name}")
    index, module, kind = int(found[1]) + layer_offset, found[2], found[3]
    modules, cut = LAYER_MODULES[module]
    if module == "mlp.linear_fc1" and not model.gated_mlp:
        modules, cut = ("mlp.up_proj",), "rows"
    if cut == "columns" and kind == "bias":
        cut = "whole"  # a row-parallel layer adds its bias after the reduction
    return Origin(tuple(f"model.layers.{index}.{m}.{kind}" for m in modules), cut)


def local_tensor(
    read: Callable[[str], torch.Tensor], where: Origin, model: ModelShape, tp: int, tp_rank: int, padded_vocab: int
) -> torch.Tensor:
    """The part of a parameter that one tensor-parallel rank holds, fp32 on CPU."""
    parts = [read(n) for n in where.names]
    if where.cut == "whole":
        return parts[0]
    if where.cut == "columns":
        return parts[0].chunk(tp, dim=1)[tp_rank]
    if where.cut == "gated":
        return torch.cat([part.chunk(tp)[tp_rank] for part in parts])
    if where.cut == "vocab":
        whole = torch.zeros(padded_vocab, parts[0].shape[1])
        whole[: parts[0].shape[0]] = parts[0]
    else:
        whole = _join_qkv(parts, model) if where.cut == "qkv" else parts[0]
    return whole.chunk(tp)[tp_rank]


def canonical_tensors(
    shards: Sequence[torch.Tensor], where: Origin, model: ModelShape
) -> Iterator[tuple[str, torch.Tensor]]:
    """The inverse: canonical tensors from the parts of all tensor-parallel ranks, in rank order."""
    if where.cut == "whole":
        yield where.names[0], shards[0]
    elif where.cut == "columns":
        yield where.names[0], torch.cat(list(shards), dim=1)
    elif where.cut == "gated":
        for i, name in enumerate(where.names):
            yield name, torch.cat([shard.chunk(2)[i] for shard in shards])
    else:
        whole = torch.cat(list(shards))
        if where.cut == "qkv":
            yield from zip(where.names, _split_qkv(whole, model), strict=True)
        else:
            yield where.names[0], whole[: model.vocab_size] if where.cut == "vocab" else whole


def _join_qkv(parts: Sequence[torch.Tensor], model: ModelShape) -> torch.Tensor:
    """Rows q.. k v of the first query group, then of the second, ... (attention.py:get_query_key_value_tensors)."""
    groups = [part.unflatten(0, (model.num_query_groups, -1)) for part in parts]
    return torch.cat(groups, dim=1).flatten(0, 1)


def _split_qkv(whole: torch.Tensor, model: ModelShape) -> list[torch.Tensor]:
    per_group = model.num_attention_heads // model.num_query_groups * model.head_dim
    groups = whole.unflatten(0, (model.num_query_groups, -1))
    return [part.flatten(0, 1) for part in groups.split([per_group, model.head_dim, model.head_dim], dim=1)]
