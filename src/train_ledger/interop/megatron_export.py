"""A run as flags for Megatron-LM's `pretrain_gpt.py` (core 0.18.0), and as a script that starts it."""

from __future__ import annotations

import shlex
from typing import Any

from train_ledger.spec.errors import ConfigError
from train_ledger.spec.run import Run

from .megatron import WORDS


def flags_of(run: Run) -> list[list[str]]:
    """The flags of a run for `pretrain_gpt.py`, one list a line of the script."""
    m, p, o, s = run.model, run.parallel, run.optimizer, run.settings
    engine = "transformer_engine" if s.get("core_attention", "sdpa") == "sdpa" else "local"
    lines: list[list[Any]] = [
        ["use-mcore-models", ("transformer-impl", engine)],
        [("num-layers", m.num_layers), ("hidden-size", m.hidden_size)],
        [("ffn-hidden-size", m.ffn_hidden_size), ("num-attention-heads", m.num_attention_heads)],
        ["group-query-attention", ("num-query-groups", m.num_query_groups), ("kv-channels", m.head_dim)],
        [("seq-length", run.seq_length), ("max-position-embeddings", m.max_position_embeddings)],
        [("position-embedding-type", _theirs("position-embedding-type", m.position_embedding))],
        [("rotary-base", _whole(run, "model.rope_theta", m.rope_theta))],
        [("normalization", _theirs("normalization", m.normalization)), ("norm-epsilon", m.norm_eps)],
        *_model_switches(run),
        [("attention-dropout", 0.0), ("hidden-dropout", 0.0)],
        [("tensor-model-parallel-size", p.tensor_parallel), ("pipeline-model-parallel-size", p.pipeline_parallel)],
        *_layout_switches(run),
        [("micro-batch-size", run.micro_batch), ("global-batch-size", run.global_batch)],
        ["bf16", ("lr", o.lr), ("min-lr", o.min_lr), ("lr-decay-style", "cosine")],
        [("lr-warmup-iters", o.lr_warmup_steps), ("train-iters", run.steps), ("seed", run.seed)],
        [("clip-grad", o.clip_grad), ("weight-decay", o.weight_decay)],
        [("adam-beta1", o.beta1), ("adam-beta2", o.beta2), ("adam-eps", o.eps)],
        ["mock-data", ("tokenizer-type", "NullTokenizer"), ("vocab-size", m.vocab_size)],
        [("make-vocab-size-divisible-by", s["make_vocab_size_divisible_by"]), ("split", "99,1,0")],
        [("log-interval", 1), ("eval-iters", 0)],
    ]
    return [[word for part in line for word in _words(part)] for line in lines if line]


def _words(part: str | tuple[Any, ...]) -> list[str]:
    """A switch, or a flag with its values; a value that is None leaves the flag out."""
    if isinstance(part, str):
        return [f"--{part}"]
    flag, *values = part
    if values[0] is None:
        return []
    return [f"--{flag}", *(repr(v) if isinstance(v, float) else str(v) for v in values)]


def _whole(run: Run, key: str, value: float) -> int:
    """A number that Megatron's parser takes as an integer only."""
    if value != int(value):
        raise ConfigError(f"{value} is no integer, as Megatron-LM's flag wants it", file=run.source or None, key=key)
    return int(value)


def _theirs(flag: str, word: str) -> str:
    """Megatron's word for ours."""
    return next(theirs for theirs, ours in WORDS[flag][1].items() if ours == word)


def _model_switches(run: Run) -> list[list[Any]]:
    m = run.model
    switches = {
        "swiglu": m.gated_mlp,
        "disable-bias-linear": not m.mlp_bias,
        "add-qkv-bias": m.qkv_bias and not m.mlp_bias,
        "untie-embeddings-and-output-weights": not m.tie_embeddings,
        "qk-layernorm": m.qk_norm,
    }
    return [[flag for flag, on in switches.items() if on], _rope_scaling(run)]


def _rope_scaling(run: Run) -> list[Any]:
    scaling = run.model.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "llama3":
        return ["use-rope-scaling", ("rope-scaling-factor", scaling["factor"])]
    if kind == "linear":
        return [("rotary-seq-len-interpolation-factor", _whole(run, "model.rope_scaling", scaling["factor"]))]
    if kind == "default":
        return []
    raise ConfigError(f"{kind!r} has no flag in Megatron-LM", file=run.source or None, key="model.rope_scaling")


def _layout_switches(run: Run) -> list[list[Any]]:
    p, s = run.parallel, run.settings
    switches = {
        "sequence-parallel": p.sequence_parallel,
        "use-distributed-optimizer": s["use_distributed_optimizer"],
        "overlap-grad-reduce": s["overlap_grad_reduce"],
        "overlap-param-gather": s["overlap_param_gather"],
        "grad-reduce-in-bf16": not s["grad_reduce_in_fp32"],
        "ddp-pad-buckets-for-high-nccl-busbw": s["pad_buckets_for_high_nccl_busbw"],
    }
    virtual = p.virtual_pipeline_parallel if p.virtual_pipeline_parallel > 1 else None
    modules = s.get("recompute_modules") if s["recompute_granularity"] == "selective" else None
    return [
        [flag for flag, on in switches.items() if on],
        [("num-virtual-stages-per-pipeline-rank", virtual), ("ddp-bucket-size", s["bucket_size"])],
        [("context-parallel-size", p.context_parallel), ("cp-comm-type", "all_gather")]
        if p.context_parallel > 1
        else [],
        [(f"decoder-{end}-pipeline-num-layers", s[f"num_layers_in_{end}_pipeline_stage"]) for end in ("first", "last")],
        [
            (f"recompute-{key}", s[f"recompute_{key.replace('-', '_')}"])
            for key in ("granularity", "method", "num-layers")
        ],
        [("recompute-modules", *modules)] if modules else [],
    ]


def script(run: Run) -> str:
    """run.sh: the flags of a run under torchrun, for people who hold a checkout of Megatron-LM at tag core_v0.18.0."""
    per_node = min(run.world_size, 8)
    lines = [" ".join(shlex.quote(word) for word in line) for line in flags_of(run) if line]
    body = " \\\n  ".join(lines)
    decay = "# Norms and biases do not decay: Megatron-LM has no flag for it.\n" if run.optimizer.decay_norms else ""
    return f"""#!/usr/bin/env bash
# {run.name}: {run.model.name}, {run.world_size} ranks. For pretrain_gpt.py of Megatron-LM, tag core_v0.18.0.
# MEGATRON_LM: folder of the checkout. NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT: as torchrun takes them.
{decay}set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nproc_per_node {per_node} --nnodes "${{NNODES:-{-(-run.world_size // per_node)}}}" \\
  --node_rank "${{NODE_RANK:-0}}" --master_addr "${{MASTER_ADDR:-127.0.0.1}}" --master_port "${{MASTER_PORT:-29500}}" \\
  "${{MEGATRON_LM:-.}}/pretrain_gpt.py" \\
  {body}
"""
