"""Makes torchtitan_sweep.yaml: configurations over the range of what is modelled, drawn with a fixed seed.

python tests/data/torchtitan_generate.py > tests/data/torchtitan_sweep.yaml
"""

from __future__ import annotations

import random
import sys
from typing import Any

import yaml

SEED, COUNT = 146, 64

#: (replicate, shard, tensor): every kind of layout, up to eight ranks, and some that no machine here could hold.
LAYOUTS = [
    (1, 1, 1), (1, 2, 1), (1, 3, 1), (1, 5, 1), (1, 8, 1), (1, 64, 1), (2, 1, 1), (3, 1, 1), (2, 2, 1), (2, 4, 1),
    (4, 2, 1), (1, 1, 2), (1, 1, 4), (1, 2, 2), (1, 4, 2), (1, 2, 4), (2, 1, 2), (3, 1, 2), (2, 2, 2), (2, 2, 4),
    (1, 32, 2), (4, 16, 2),
]  # fmt: skip


def model(draw: random.Random, tensor_parallel: int) -> dict[str, Any]:
    """A small Llama or Qwen 3; its sizes divide by as little as torchtitan allows."""
    normed = draw.random() < 0.2
    heads, groups = draw.choice(
        [(8, 4), (4, 4), (12, 4)] if tensor_parallel == 4 else [(6, 2), (6, 6), (2, 2), (10, 2)]
    )
    return {
        "num_layers": draw.choice([1, 2, 3]),
        "hidden_size": heads * draw.choice([6, 10]),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "head_dim": draw.choice([None, None, 14]),
        "ffn_hidden_size": draw.choice([52, 76, 148, 4096]),
        "vocab_size": draw.choice([97, 130, 522, 524]),
        "seq_length": draw.choice([24, 32]),
        "tie_embeddings": draw.random() < 0.3,
        "rope_scaling": None if normed else draw.choice([None, None, LLAMA3_SCALING]),
        "qk_norm": normed,
    }


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def settings(draw: random.Random) -> dict[str, Any]:
    """torchtitan's part: every value of every key."""
    return {
        "mixed_precision_param": draw.choice(["bfloat16", "bfloat16", "float32"]),
        "fsdp_reshard_after_forward": draw.choice(["default", "always", "never"]),
        "activation_checkpoint": draw.choice(["none", "selective", "full"]),
        "chunked_loss": draw.random() < 0.6,
        "num_chunks": draw.choice([1, 4, 8]),
        "spmd_backend": draw.choice(["spmd_types"] * 3 + ["partial_dtensor", "full_dtensor"]),
        "log_freq": draw.choice([1, 3]),
    }


def configurations(seed: int = SEED, count: int = COUNT) -> list[dict[str, Any]]:
    """The table: what `tests/integration/test_sweep_torchtitan.py` runs. Every layout comes up in turn."""
    draw = random.Random(seed)
    out: list[dict[str, Any]] = []
    while len(out) < count:
        replicate, shard, tensor = LAYOUTS[len(out) % len(LAYOUTS)]
        micro, accumulation = draw.choice([1, 2, 3]), draw.randint(1, 4)
        shape, own = model(draw, tensor), settings(draw)
        sequence_parallel = tensor > 1 and draw.random() < 0.6
        if own["spmd_backend"] == "spmd_types" and shape["vocab_size"] % tensor:
            continue  # torchtitan refuses it
        if shard * tensor > (shape["num_attention_heads"] + 2 * shape["num_query_groups"]) * _head_dim(shape):
            continue  # and this
        out.append(
            {
                "name": f"torchtitan-{len(out):02d}",
                "model": shape,
                "run": {
                    "framework": "torchtitan",
                    "world_size": replicate * shard * tensor,
                    "micro_batch": micro,
                    "global_batch": micro * replicate * shard * accumulation,
                    "parallel": {
                        "tensor_parallel": tensor,
                        "sequence_parallel": sequence_parallel,
                        "data_parallel_replicate": replicate,
                        "data_parallel_shard": shard,
                    },
                    "optimizer": {"clip_grad": draw.choice([1.0, 1.0, 0.0]), "decay_norms": draw.random() < 0.7},
                    "torchtitan": own,
                },
            }
        )
    return out


SCHEDULE, PER_STAGE = "pipeline_parallel_schedule", "pipeline_parallel_layers_per_stage"
FIRST_LESS, LAST_LESS = (f"pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
PARTS = "module_fqns_per_model_part"
GPIPE, INTERLEAVED, LOOPED = {SCHEDULE: "GPipe"}, {SCHEDULE: "Interleaved1F1B"}, {SCHEDULE: "LoopedBFS"}


def parts(text: str) -> dict[str, list[list[str]]]:
    """Stages by the modules that they name."""
    return {PARTS: [stage.split() for stage in text.split("|")]}


#: Pipelines: (ranks, stages a rank, replicate, shard, tensor), layers, and how stages are cut and scheduled.
PIPELINES: list[tuple[tuple[int, int, int, int, int], int, dict[str, Any]]] = [
    ((2, 1, 1, 1, 1), 2, {}),
    ((2, 1, 1, 2, 1), 3, {}),
    ((2, 1, 1, 3, 1), 4, GPIPE),
    ((2, 1, 2, 1, 1), 2, {}),
    ((2, 1, 2, 2, 1), 3, GPIPE),
    ((2, 1, 1, 1, 2), 2, {}),
    ((2, 1, 1, 2, 2), 3, {}),
    ((2, 1, 1, 2, 2), 2, GPIPE),
    ((3, 1, 1, 1, 1), 4, {FIRST_LESS: 0, LAST_LESS: 2}),
    ((3, 1, 1, 2, 1), 5, {}),
    ((4, 1, 1, 1, 1), 6, {PER_STAGE: 2}),
    ((4, 1, 1, 2, 1), 4, parts("tok_embeddings | layers.0 layers.1 layers.2 | layers.3 | norm lm_head")),
    ((2, 2, 1, 1, 1), 4, INTERLEAVED),
    ((2, 2, 1, 2, 1), 6, INTERLEAVED),
    ((2, 2, 1, 2, 2), 4, INTERLEAVED),
    ((2, 3, 1, 2, 1), 4, {**INTERLEAVED, PER_STAGE: 1}),
    ((2, 4, 1, 2, 1), 8, {**INTERLEAVED, PER_STAGE: 1, FIRST_LESS: 0, LAST_LESS: 0}),
    ((2, 2, 1, 2, 1), 3, LOOPED),
    ((2, 2, 2, 2, 1), 4, LOOPED),
    ((2, 5, 1, 1, 1), 8, {**LOOPED, PER_STAGE: 1}),
    ((3, 2, 1, 1, 1), 5, INTERLEAVED),
    ((8, 1, 1, 1, 1), 8, {}),
    ((2, 1, 1, 32, 2), 2, {}),
    ((2, 1, 4, 8, 1), 3, GPIPE),
    ((4, 1, 1, 1, 2), 3, parts("tok_embeddings | layers.0 layers.1 | layers.2 | norm lm_head")),
]


def pipelines(seed: int = SEED) -> list[dict[str, Any]]:
    """The table's second part: every layout of `PIPELINES`, each with settings of its own."""
    draw = random.Random(seed)
    out = []
    for (ranks, stages, replicate, shard, tensor), layers, cut in PIPELINES:
        schedule = cut.get(SCHEDULE, "1F1B")
        micro, passes = draw.choice([1, 2]), draw.choice([1, 1, 2])
        possible = [n for n in range(1, 2 * ranks + 2) if n % max(1, n // ranks) == 0]
        each = draw.choice(range(ranks, 2 * ranks + 2)) if schedule == "1F1B" else draw.choice(possible)
        shape, own = model(draw, tensor), settings(draw)
        if tensor > 1 or own["spmd_backend"] == "full_dtensor":
            own["spmd_backend"] = "spmd_types"
        if schedule in ("1F1B", "Interleaved1F1B") and own["mixed_precision_param"] == "bfloat16":
            own["num_chunks"] = max(4, own["num_chunks"])  # one chunk is refused
        shape |= {"num_layers": layers, "tie_embeddings": False, "vocab_size": draw.choice([522, 524, 96])}
        if shard == 32:
            shape["head_dim"] = 14  # rows enough for every shard
        sequence_parallel = tensor > 1 and draw.random() < 0.7
        if sequence_parallel:
            micro = 1  # more is refused
        bare = cut.get(PARTS, [[]])[0] == ["tok_embeddings"] or stages in (3, 5)
        local = micro * each if passes > 1 or draw.random() < 0.5 else None
        out.append(
            {
                "name": f"torchtitan-pp-{len(out):02d}",
                "model": shape,
                "run": {
                    "framework": "torchtitan",
                    "world_size": ranks * replicate * shard * tensor,
                    "micro_batch": micro,
                    "global_batch": micro * each * passes * replicate * shard,
                    "parallel": {
                        "tensor_parallel": tensor,
                        "sequence_parallel": sequence_parallel,
                        "pipeline_parallel": ranks,
                        "virtual_pipeline_parallel": stages,
                        "data_parallel_replicate": replicate,
                        "data_parallel_shard": shard,
                    },
                    # A stage without norms has no parameters for a group of them, which torchtitan refuses.
                    "optimizer": {
                        "clip_grad": draw.choice([1.0, 1.0, 0.0]),
                        "decay_norms": bare or draw.random() < 0.7,
                    },
                    "torchtitan": {**own, **cut, "local_batch_size": local},
                },
            }
        )
    return out


#: Sequences that are split: pipeline ranks, stages a rank, replicate, shard, context, tensor, and the backend.
CONTEXTS: list[tuple[int, int, int, int, int, int, str]] = [
    (1, 1, 1, 1, 2, 1, "spmd_types"),
    (1, 1, 1, 2, 2, 1, "spmd_types"),
    (1, 1, 1, 1, 2, 2, "spmd_types"),
    (1, 1, 2, 2, 2, 1, "spmd_types"),
    (1, 1, 2, 1, 3, 2, "spmd_types"),
    (1, 1, 1, 1, 2, 1, "partial_dtensor"),
    (1, 1, 1, 2, 2, 2, "partial_dtensor"),
    (1, 1, 2, 1, 2, 1, "partial_dtensor"),
    (1, 1, 1, 3, 4, 1, "spmd_types"),
    (1, 1, 1, 32, 2, 2, "spmd_types"),
    (2, 1, 1, 1, 2, 1, "spmd_types"),
    (2, 2, 1, 2, 2, 1, "partial_dtensor"),
    (2, 1, 2, 1, 2, 2, "spmd_types"),
    (2, 2, 1, 1, 2, 1, "spmd_types"),
]


def contexts(seed: int = SEED) -> list[dict[str, Any]]:
    """The table's third part: every layout of `CONTEXTS`, each with settings of its own."""
    draw = random.Random(seed)
    out = []
    for pipeline, stages, replicate, shard, context, tensor, backend in CONTEXTS:
        micro, accumulation = draw.choice([1, 2]), draw.choice([1, 2])
        shape, own = model(draw, tensor), settings(draw) | {"spmd_backend": backend}
        shape |= {"seq_length": 128 * context * draw.choice([1, 2]), "vocab_size": draw.choice([522, 524])}
        if shard == 32:
            shape["head_dim"] = 14  # rows enough for every shard
        sequence_parallel = tensor > 1 and draw.random() < 0.7
        if pipeline > 1:
            accumulation, micro = 2 * pipeline, 1
            # A stage without layers is refused under partial_dtensor; under spmd_types the last of four has none.
            layers = 2 * pipeline * (stages if backend == "partial_dtensor" else 1)
            shape |= {"num_layers": layers, "tie_embeddings": False}
            own |= {SCHEDULE: "1F1B" if stages == 1 else "Interleaved1F1B", "num_chunks": 4}
        out.append(
            {
                "name": f"torchtitan-cp-{len(out):02d}",
                "model": shape,
                "run": {
                    "framework": "torchtitan",
                    "world_size": pipeline * replicate * shard * context * tensor,
                    "micro_batch": micro,
                    "global_batch": micro * accumulation * replicate * shard,
                    "parallel": {
                        "tensor_parallel": tensor,
                        "sequence_parallel": sequence_parallel,
                        "context_parallel": context,
                        "pipeline_parallel": pipeline,
                        "virtual_pipeline_parallel": stages,
                        "data_parallel_replicate": replicate,
                        "data_parallel_shard": shard,
                    },
                    "torchtitan": own,
                },
            }
        )
    return out


def _head_dim(shape: dict[str, Any]) -> int:
    return int(shape["head_dim"] or shape["hidden_size"] // shape["num_attention_heads"])


if __name__ == "__main__":
    print("# Made by torchtitan_generate.py; do not edit.")
    table = configurations() + pipelines() + contexts()
    yaml.safe_dump(table, sys.stdout, sort_keys=False, default_flow_style=None, width=200)
