"""Makes deepspeed_sweep.yaml: configurations over the range of what is modelled, drawn with a fixed seed.

python tests/data/deepspeed_generate.py > tests/data/deepspeed_sweep.yaml
"""

from __future__ import annotations

import random
import sys
from typing import Any

import yaml

SEED, COUNT = 20261129, 56
LARGE = (64, 257, 1000)
#: Types that gradients can be kept in, by stage; what is missing is refused (predict/frameworks/deepspeed.py:check).
GRADIENTS = {0: ["bf16"], 1: ["bf16", "fp32"], 2: ["bf16", "fp16", "fp32"], 3: ["bf16", "fp16", "fp32"]}


def model(draw: random.Random) -> dict[str, Any]:
    """A small shape of any family; its sizes divide by next to nothing."""
    heads, groups = draw.choice([(6, 2), (6, 6), (4, 1), (3, 3)])
    gated = draw.random() < 0.6
    return {
        "num_layers": draw.choice([1, 2, 3]),
        "hidden_size": heads * draw.choice([6, 10]),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "head_dim": draw.choice([None, 8]),
        "ffn_hidden_size": draw.choice([50, 77, 150]),
        "vocab_size": draw.choice([97, 131, 522]),
        "seq_length": 8,
        "position_embedding": draw.choice(["rope", "rope", "learned", "none"]),
        "normalization": draw.choice(["rmsnorm", "layernorm"]),
        "gated_mlp": gated,
        "activation": "silu" if gated else "gelu",
        "tie_embeddings": draw.random() < 0.4,
        "qkv_bias": draw.random() < 0.4,
        "attention_output_bias": draw.random() < 0.3,
        "mlp_bias": draw.random() < 0.3,
        "qk_norm": draw.random() < 0.3,
    }


def settings(draw: random.Random) -> dict[str, Any]:
    """DeepSpeed's part: every stage, every threshold over its range."""
    stage = draw.choice([0, 1, 1, 2, 2, 3, 3, 3, 3, 3])
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": draw.random() < 0.6,
        "contiguous_gradients": draw.random() < 0.75,
        "reduce_scatter": draw.random() < 0.75,
        "reduce_bucket_size": draw.choice([1, 300, 5000, 20000, 1000000]),
        "allgather_bucket_size": draw.choice([2, 1000, 500000000]),
    }
    out: dict[str, Any] = {
        "activation_checkpointing": draw.random() < 0.3,
        "communication_data_type": draw.choice([None, None, "fp32", "bf16", "fp16"]),
        "data_types": {"grad_accum_dtype": draw.choice([None, *GRADIENTS[stage]])},
        "zero_optimization": zero,
    }
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": draw.choice([0, 500, 5000, 20000, 1000000000]),
            "stage3_param_persistence_threshold": draw.choice([0, 8, 61, 1000, 100000]),
            "stage3_max_live_parameters": draw.choice([0, 3000, 30000, 1000000000]),
            "stage3_max_reuse_distance": draw.choice([0, 1000, 20000, 1000000000]),
            "sub_group_size": draw.choice([1, 700, 3000, 1000000000]),
        }
        out["zero_init"] = draw.random() < 0.7
    return out


def configurations(seed: int = SEED, count: int = COUNT) -> list[dict[str, Any]]:
    """The table of `tests/integration/test_sweep_deepspeed.py`: worlds of up to eight ranks, then larger ones."""
    draw = random.Random(seed)
    return [
        entry(draw, number, draw.randint(1, 8) if number < count else LARGE[number - count])
        for number in range(count + len(LARGE))
    ]


def entry(draw: random.Random, number: int, world_size: int) -> dict[str, Any]:
    """One configuration."""
    micro, accumulation = draw.choice([1, 1, 2]), draw.randint(1, 4)
    return {
        "name": f"deepspeed-{number:02d}",
        "model": model(draw),
        "run": {
            "framework": "deepspeed",
            "world_size": world_size,
            "micro_batch": micro,
            "global_batch": micro * world_size * accumulation,
            "parallel": {"data_parallel": world_size},
            "optimizer": {"clip_grad": draw.choice([1.0, 1.0, 0.0]), "decay_norms": draw.random() < 0.7},
            "deepspeed": settings(draw),
        },
    }


if __name__ == "__main__":
    print("# Made by deepspeed_generate.py; do not edit.")
    yaml.safe_dump(configurations(), sys.stdout, sort_keys=False, default_flow_style=None, width=200)
