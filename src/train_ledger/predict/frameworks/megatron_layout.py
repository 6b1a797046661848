"""How Megatron Core lays parameters out in flat buffers, cuts the buffers into buckets, and shards them over data
parallel.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .megatron_plan import Chunk, Plan


class Param(NamedTuple):
    """One parameter on one tensor-parallel rank.

    `own_bucket`: tied to a copy on another pipeline stage, so it gets a bucket to itself (`shared_embedding`).
    `tp_reduced`: its gradient is all-reduced over tensor parallel after backward.
    """

    name: str
    numel: int
    own_bucket: bool = False
    tp_reduced: bool = False


@functools.lru_cache(maxsize=4096)
def chunk_params(plan: Plan, chunk: Chunk) -> tuple[Param, ...]:
    """Parameters of a chunk in the order of registration, which is the order of `named_parameters()`.

    Sources: models/gpt/gpt_model.py:GPTModel, transformer/transformer_layer.py:TransformerLayer,
    transformer/attention.py (the output projection is registered before QKV), transformer/mlp.py:MLP. Marks:
    `sequence_parallel` on norms and on biases of row-parallel layers (tensor_parallel/layers.py), `shared_embedding`
    (models/common/language_module/language_module.py:setup_embeddings_and_output_layer).
    """
    h, d = plan.hidden, plan.head_dim
    apart = plan.tied and plan.pp > 1
    out: list[Param] = []

    def norm(name: str, width: int, reduced: bool) -> None:
        out.append(Param(f"{name}.weight", width, tp_reduced=reduced))
        if plan.norm_bias:
            out.append(Param(f"{name}.bias", width, tp_reduced=reduced))

    if chunk.pre:
        out.append(Param("embedding.word_embeddings.weight", plan.vocab_rows * h, own_bucket=apart))
        if plan.learned_positions:
            out.append(Param("embedding.position_embeddings.weight", plan.learned_positions * h))
    for i in range(chunk.layers):
        at = f"decoder.layers.{i}"
        norm(f"{at}.input_layernorm", h, plan.sp)
        out.append(Param(f"{at}.self_attention.linear_proj.weight", h * (plan.heads * d // plan.tp)))
        if plan.linear_bias:
            out.append(Param(f"{at}.self_attention.linear_proj.bias", h, tp_reduced=plan.sp))
        out.append(Param(f"{at}.self_attention.linear_qkv.weight", plan.qkv_rows // plan.tp * h))
        if plan.linear_bias or plan.qkv_bias:
            out.append(Param(f"{at}.self_attention.linear_qkv.bias", plan.qkv_rows // plan.tp))
        if plan.qk_norm:
            # Reduced with and without sequence parallel: each rank sees only its own heads
            # (distributed/finalize_model_grads.py:_allreduce_non_tensor_model_parallel_grads).
            norm(f"{at}.self_attention.q_layernorm", d, True)
            norm(f"{at}.self_attention.k_layernorm", d, True)
        norm(f"{at}.pre_mlp_layernorm", h, plan.sp)
        fc1 = plan.ffn // plan.tp * (2 if plan.gated else 1)
        out.append(Param(f"{at}.mlp.linear_fc1.weight", fc1 * h))
        if plan.linear_bias:
            out.append(Param(f"{at}.mlp.linear_fc1.bias", fc1))
        out.append(Param(f"{at}.mlp.linear_fc2.weight", h * (plan.ffn // plan.tp)))
        if plan.linear_bias:
            out.append(Param(f"{at}.mlp.linear_fc2.bias", h, tp_reduced=plan.sp))
    if chunk.post:
        norm("decoder.final_layernorm", h, plan.sp)
        if not (plan.tied and chunk.pre):
            out.append(Param("output_layer.weight", plan.vocab_rows * h, own_bucket=apart))
    return tuple(out)


@dataclass(frozen=True)
class Buffer:
    """The flat parameter and gradient buffer of one chunk. Offsets are elements.

    `starts` and `ends` give each parameter's place, in buffer order (last registered first); `buckets` cut the buffer.
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    buckets: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        """Elements with padding."""
        return self.buckets[-1][1]

    @property
    def real_numel(self) -> int:
        """Elements that are parameters."""
        return sum(self.ends) - sum(self.starts)


@functools.lru_cache(maxsize=4096)
def buffer(plan: Plan, chunk: Chunk) -> Buffer:
    """Places and buckets of a chunk's parameters.

    With the distributed optimizer each parameter begins at a multiple of 64 elements and each bucket ends at a
    multiple of lcm(shards, 128), with `pad_buckets_for_high_nccl_busbw` of lcm(shards, 128, 2^16); without it nothing
    is padded. Sources: optimizer/param_layout.py, optimizer/distrib_optimizer.py:_compute_per_buffer_param_layout,
    distributed/param_and_grad_buffer.py:_compute_default_per_buffer_param_layout.
    """
    padded = plan.distributed_optimizer
    divisor = math.lcm(plan.shards, 128, 2**16 if plan.high_busbw else 1) if padded else 1
    limit = plan.bucket_size if chunk.bucketed else None
    starts, ends, buckets = [], [], []
    at = bucket_start = 0
    filled = False

    def close(end: int) -> int:
        end = -(-end // divisor) * divisor
        buckets.append((bucket_start, end))
        return end

    for param in reversed(chunk_params(plan, chunk)):
        alone = param.own_bucket and padded
        if padded:
            at = -(-at // 64) * 64
        if alone and filled:
            at = bucket_start = close(at)
            filled = False
        starts.append(at)
        at += param.numel
        ends.append(at)
        filled = True
        if alone or (limit is not None and at - bucket_start >= limit):
            at = bucket_start = close(at)
            filled = False
    if filled:
        close(at)
    return Buffer(tuple(starts), tuple(ends), tuple(buckets))


@functools.lru_cache(maxsize=65536)
def owned(plan: Plan, chunk: Chunk, shard: int) -> Mapping[int, int]:
    """Pieces of parameters that shard `shard` keeps in fp32: {elements of a piece: how many}.

    With the distributed optimizer that is the rank's equal share of each bucket, cut at parameter borders
    (optimizer/distrib_optimizer.py:_build_model_gbuf_range); without it, every parameter.
    """
    layout = buffer(plan, chunk)
    pieces: Counter[int] = Counter()
    if not plan.distributed_optimizer:
        pieces.update(end - start for start, end in zip(layout.starts, layout.ends, strict=True))
        return pieces
    for start, end in layout.buckets:
        share = (end - start) // plan.shards
        low, high = start + share * shard, start + share * (shard + 1)
        i = bisect.bisect_right(layout.ends, low)
        while i < len(layout.starts) and layout.starts[i] < high:
            numel = min(high, layout.ends[i]) - max(low, layout.starts[i])
            if numel > 0:
                pieces[numel] += 1
            i += 1
    return pieces
