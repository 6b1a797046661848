"""Makes megatron_sweep.yaml: configurations over the range of what is modelled, drawn with a fixed seed.

python tests/data/megatron_generate.py > tests/data/megatron_sweep.yaml
"""

from __future__ import annotations

import random
import sys
from typing import Any

import yaml

SEED, COUNT = 20261129, 70

#: (tensor, sequence parallel, context, pipeline, virtual, data): every kind of layout in turn; some no machine here
#: could hold.
LAYOUTS = [
    (1, False, 1, 1, 1, 1), (1, False, 1, 1, 1, 3), (1, False, 1, 1, 1, 8), (2, True, 1, 1, 1, 1),
    (2, False, 1, 1, 1, 2), (3, True, 1, 1, 1, 4), (4, True, 1, 1, 1, 3), (4, False, 1, 1, 1, 2),
    (8, True, 1, 1, 1, 2), (8, False, 1, 1, 1, 5), (1, False, 1, 2, 1, 2), (1, False, 1, 3, 1, 2),
    (1, False, 1, 8, 1, 1), (2, True, 1, 2, 1, 2), (2, False, 1, 2, 1, 3), (2, True, 1, 3, 1, 1),
    (4, True, 1, 4, 1, 2), (3, False, 1, 4, 1, 2), (8, True, 1, 8, 1, 4), (2, True, 1, 8, 1, 2),
    (1, False, 1, 2, 2, 2), (1, False, 1, 2, 3, 1), (2, True, 1, 2, 2, 2), (2, False, 1, 3, 2, 2),
    (4, True, 1, 4, 2, 1), (1, False, 1, 4, 3, 3), (2, True, 1, 8, 2, 2), (1, False, 1, 5, 1, 2),
    (6, True, 1, 2, 1, 2), (5, True, 1, 6, 1, 1), (1, False, 2, 1, 1, 2), (2, True, 3, 1, 1, 2),
    (4, False, 2, 2, 1, 1), (2, True, 2, 2, 2, 2), (1, False, 4, 3, 1, 2),
]  # fmt: skip

#: Each recomputation that Megatron runs without Transformer Engine.
RECOMPUTE: list[dict[str, Any]] = [
    {},
    {},
    {"recompute_granularity": "selective"},
    {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
]

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

#: Beyond what is drawn, where a residual was found: a sequence of one token, which does not cut into two pieces.
FOUND: list[dict[str, Any]] = [
    {
        "name": "megatron-one-token",
        "model": {
            "num_layers": 2,
            "hidden_size": 13,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "head_dim": 6,
            "ffn_hidden_size": 14,
            "vocab_size": 17,
            "seq_length": 1,
            "max_position_embeddings": 2,
            "activation": "gelu",
            "tie_embeddings": True,
            "qk_norm": True,
        },
        "run": {
            "framework": "megatron",
            "world_size": 6,
            "micro_batch": 2,
            "global_batch": 18,
            "parallel": {"tensor_parallel": 2, "data_parallel": 3},
            "megatron": {
                "use_distributed_optimizer": True,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
                "grad_reduce_in_fp32": False,
                "bucket_size": 129,
                "pad_buckets_for_high_nccl_busbw": False,
                "core_attention": "local",
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
        },
    },
]


def model(draw: random.Random, tp: int, sp: bool, cp: int) -> dict[str, Any]:
    """A small GPT; its sizes divide by as little as Megatron allows."""
    groups = draw.choice([1, 2, 3, 4, 8])
    heads = groups * draw.choice([1, 2, 3])
    heads *= 1 if heads % tp == 0 else tp
    width = draw.choice([4, 6, 8, 10, 16])
    biases = draw.choice(["none", "none", "qkv", "all"])
    positions = draw.choice(["rope", "rope", "learned", "none"])
    sequence = tp * draw.choice([3, 4, 6]) if sp else draw.choice([9, 16, 21])
    sequence *= 2 * cp if cp > 1 else 1
    return {
        "hidden_size": draw.choice([20, 36, 44, 60, 72, 100]),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "head_dim": width,
        "ffn_hidden_size": tp * draw.choice([7, 10, 25, 37]),
        "vocab_size": draw.choice([96, 130, 257, 522]),
        "seq_length": sequence,
        "max_position_embeddings": sequence + draw.choice([0, 3]) if positions == "learned" else None,
        "position_embedding": positions,
        "rope_scaling": draw.choice([None, None, LLAMA3_SCALING, {"type": "linear", "factor": 2.0}]),
        "normalization": draw.choice(["rmsnorm", "layernorm"]),
        "gated_mlp": draw.random() < 0.6,
        "activation": draw.choice(["silu", "gelu"]),
        "tie_embeddings": draw.random() < 0.45,
        "qkv_bias": biases != "none",
        "attention_output_bias": biases == "all",
        "mlp_bias": biases == "all",
        "qk_norm": draw.random() < 0.35,
    }


def layers(draw: random.Random, pp: int, vp: int) -> tuple[int, dict[str, int]]:
    """Layers in all, and the settings of uneven stages."""
    uneven: dict[str, int] = {}
    for end in ("first", "last"):
        if pp > 1 and draw.random() < 0.3:
            uneven[f"num_layers_in_{end}_pipeline_stage"] = vp * draw.choice([1, 2, 3])
    return sum(uneven.values()) + (pp - len(uneven)) * vp * draw.choice([1, 1, 2]), uneven


def settings(draw: random.Random) -> dict[str, Any]:
    """Megatron's part: every value of every key."""
    distributed, overlapped = draw.random() < 0.7, draw.random() < 0.7
    return {
        "use_distributed_optimizer": distributed,
        "overlap_grad_reduce": overlapped,
        "overlap_param_gather": distributed and overlapped and draw.random() < 0.7,
        "grad_reduce_in_fp32": draw.random() < 0.7,
        "bucket_size": draw.choice([None, 1, 2000, 9000, 30000]),
        "pad_buckets_for_high_nccl_busbw": draw.random() < 0.15,
        "make_vocab_size_divisible_by": draw.choice([1, 8, 128]),
        "core_attention": draw.choice(["sdpa", "sdpa", "local"]),
        **draw.choice(RECOMPUTE),
    }


def refused(shape: dict[str, Any], own: dict[str, Any], tp: int, pp: int, vp: int, uneven: dict[str, int]) -> bool:
    """What Megatron refuses; `tests/unit/test_predict_megatron_check.py` has these cases."""
    groups = shape["num_query_groups"]
    rows = (shape["num_attention_heads"] + 2 * groups) * shape["head_dim"]
    endless = own.get("recompute_modules") == ["mlp"] and shape["mlp_bias"]
    no_middle = vp > 1 and len(uneven) == pp
    return bool((groups % tp and tp % groups) or rows % tp or endless or no_middle)


def configurations(seed: int = SEED, count: int = COUNT) -> list[dict[str, Any]]:
    """The table: what `tests/integration/test_sweep_megatron.py` runs. Every layout in turn, and `FOUND`."""
    draw = random.Random(seed)
    out: list[dict[str, Any]] = []
    while len(out) < count:
        tp, sp, cp, pp, vp, dp = LAYOUTS[len(out) % len(LAYOUTS)]
        shape, own = model(draw, tp, sp, cp), settings(draw)
        if cp > 1:
            own["core_attention"] = "sdpa"
        shape["num_layers"], uneven = layers(draw, pp, vp)
        micro = draw.choice([1, 1, 2, 3])
        micro_batches = pp * draw.choice([1, 2]) if vp > 1 else draw.choice([1, 2, 3, 5])
        optimizer = {"clip_grad": draw.choice([1.0, 0.0]), "decay_norms": draw.random() < 0.5}
        if refused(shape, own, tp, pp, vp, uneven):
            continue
        out.append(
            {
                "name": f"megatron-{len(out):02d}",
                "model": shape,
                "run": {
                    "framework": "megatron",
                    "world_size": tp * cp * pp * dp,
                    "micro_batch": micro,
                    "global_batch": micro * micro_batches * dp,
                    "parallel": {
                        "tensor_parallel": tp,
                        "sequence_parallel": sp,
                        "context_parallel": cp,
                        "pipeline_parallel": pp,
                        "virtual_pipeline_parallel": vp,
                        "data_parallel": dp,
                    },
                    "optimizer": optimizer,
                    "megatron": {**own, **uneven},
                },
            }
        )
    return out + FOUND


if __name__ == "__main__":
    print("# Made by megatron_generate.py; do not edit.")
    yaml.safe_dump(configurations(), sys.stdout, sort_keys=False, width=200, default_flow_style=None)
