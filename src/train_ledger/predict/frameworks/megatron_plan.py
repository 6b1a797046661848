"""What Megatron Core makes of a run: sizes per rank, and which layers each pipeline stage and model chunk holds."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from train_ledger.spec.run import Run

#: The order of parallel dimensions, fastest first (core/parallel_state.py:initialize_model_parallel, `order`). Dense
#: models have no expert parallelism, so `ep` is 1.
ORDER = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True)
class Plan:
    """A run in the numbers that Megatron's rules take. Sizes are elements, or tokens for `seq`; hashable, so rules
    can be cached.
    """

    layers: int
    hidden: int
    heads: int
    query_groups: int
    head_dim: int
    ffn: int
    vocab: int  # padded
    learned_positions: int  # rows of the position embedding; 0 without one
    rope: bool
    norm_bias: bool
    gated: bool
    qkv_bias: bool
    linear_bias: bool
    qk_norm: bool
    tied: bool
    tp: int
    sp: bool
    pp: int
    vp: int
    cp: int
    dp: int
    seq: int  # tokens of one sequence on one context-parallel rank
    micro_batch: int
    micro_batches: int
    distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    grad_dtype: str
    bucket_size: int | None
    high_busbw: bool
    recompute: str  # "", "selective" or "full"
    recompute_modules: tuple[str, ...]
    recompute_method: str
    recompute_layers: int
    local_attention: bool
    first_stage_layers: int | None
    last_stage_layers: int | None

    @property
    def shards(self) -> int:
        """Ranks over which optimizer state is sharded and gradients are reduced: data times context parallel."""
        return self.dp * self.cp

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused QKV projection on all tensor-parallel ranks together
        (transformer/attention.py:SelfAttention).
        """
        return (self.heads + 2 * self.query_groups) * self.head_dim

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding on one tensor-parallel rank."""
        return self.vocab // self.tp

    @property
    def activation(self) -> int:
        """Elements of the residual stream of one micro-batch, whole over tensor parallel."""
        return self.seq * self.micro_batch * self.hidden

    @property
    def boundary(self) -> int:
        """Elements of the tensor between two pipeline stages (pipeline_parallel/schedules.py:get_tensor_shapes)."""
        return self.activation // self.tp if self.sp else self.activation


class Chunk(NamedTuple):
    """One model chunk of a pipeline rank: a whole stage, or one of its virtual stages."""

    layers: int
    pre: bool  # holds the embedding
    post: bool  # holds the final norm and the output head
    bucketed: bool  # gradients are cut into buckets of `bucket_size`


_latest: tuple[Run, Plan] | None = None


def plan(run: Run) -> Plan:
    """The run in Megatron's numbers, kept for the run asked for last: callers go through thousands of its ranks."""
    global _latest
    if _latest is None or _latest[0] is not run:
        _latest = (run, _plan(run))
    return _latest[1]


def _plan(run: Run) -> Plan:
    """Megatron's numbers from a run's keys.

    Sources: vocabulary padding megatron/training/tokenizer (a multiple of make_vocab_size_divisible_by x tensor
    parallel); bucket size core/distributed/distributed_data_parallel.py:__init__.
    """
    m, p, s = run.model, run.parallel, run.settings
    multiple = s["make_vocab_size_divisible_by"] * p.tensor_parallel
    shards = p.data_parallel * p.context_parallel
    return Plan(
        layers=m.num_layers,
        hidden=m.hidden_size,
        heads=m.num_attention_heads,
        query_groups=m.num_query_groups,
        head_dim=m.head_dim,
        ffn=m.ffn_hidden_size,
        vocab=-(-m.vocab_size // multiple) * multiple,
        learned_positions=m.max_position_embeddings if m.position_embedding == "learned" else 0,
        rope=m.position_embedding == "rope",
        norm_bias=m.normalization == "layernorm",
        gated=m.gated_mlp,
        qkv_bias=m.qkv_bias,
        linear_bias=m.mlp_bias,
        qk_norm=m.qk_norm,
        tied=m.tie_embeddings,
        tp=p.tensor_parallel,
        sp=p.sequence_parallel,
        pp=p.pipeline_parallel,
        vp=p.virtual_pipeline_parallel,
        cp=p.context_parallel,
        dp=p.data_parallel,
        seq=run.seq_length // p.context_parallel,
        micro_batch=run.micro_batch,
        micro_batches=run.num_micro_batches,
        distributed_optimizer=s["use_distributed_optimizer"],
        overlap_grad_reduce=s["overlap_grad_reduce"],
        overlap_param_gather=s["overlap_param_gather"],
        grad_dtype="float32" if s["grad_reduce_in_fp32"] else "bfloat16",
        bucket_size=(s["bucket_size"] or max(40_000_000, 1_000_000 * shards)) if s["overlap_grad_reduce"] else None,
        high_busbw=s["pad_buckets_for_high_nccl_busbw"],
        recompute=s["recompute_granularity"] or "",
        recompute_modules=tuple(s["recompute_modules"]),
        recompute_method=s["recompute_method"] or "",
        recompute_layers=s["recompute_num_layers"] or 0,
        local_attention=s["core_attention"] == "local",
        first_stage_layers=s["num_layers_in_first_pipeline_stage"],
        last_stage_layers=s["num_layers_in_last_pipeline_stage"],
    )


def sizes(run: Run) -> dict[str, int]:
    """The grid of ranks, fastest dimension first."""
    p = run.parallel
    degree = {"tp": p.tensor_parallel, "cp": p.context_parallel, "dp": p.data_parallel, "pp": p.pipeline_parallel}
    return {name: degree.get(name, 1) for name in ORDER}


def stage_layers(plan: Plan, stage: int) -> int:
    """Transformer layers of a stage, all its chunks together (transformer_block.py:get_num_layers_to_build)."""
    if stage == plan.pp - 1 and plan.last_stage_layers is not None:
        return plan.last_stage_layers
    if stage == 0 and plan.first_stage_layers is not None:
        return plan.first_stage_layers
    fixed = [n for n in (plan.first_stage_layers, plan.last_stage_layers) if n is not None]
    return (plan.layers - sum(fixed)) // (plan.pp - len(fixed))


@functools.lru_cache(maxsize=4096)
def chunks(plan: Plan, stage: int) -> tuple[Chunk, ...]:
    """Model chunks of a pipeline rank, in order.

    Gradients are bucketed only in the first chunk of the first stage: elsewhere their reduction is off the critical
    path (distributed_data_parallel.py:__init__, `disable_bucketing or pp_rank > 0`).
    """
    each = stage_layers(plan, stage) // plan.vp
    first, last = stage == 0, stage == plan.pp - 1
    return tuple(
        Chunk(
            layers=each,
            pre=first and v == 0,
            post=last and v == plan.vp - 1,
            bucketed=first and v == 0,
        )
        for v in range(plan.vp)
    )
