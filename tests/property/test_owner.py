"""Who keeps the master of a weight: for every weight of every run, the parts add up to whole copies, nothing twice."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from train_ledger.predict.owner import slices
from train_ledger.spec.config import load_run
from train_ledger.spec.model import canonical_tensors
from train_ledger.spec.run import Run

ROOT = Path(__file__).parents[2]
RUNS = sorted((ROOT / "config" / "runs").glob("*.yaml"))
#: GPT's kind of model: learned positions, biases, a tied head.
GPT = {
    "position_embedding": "learned",
    "gated_mlp": False,
    "activation": "gelu",
    "normalization": "layernorm",
    "qkv_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "tie_embeddings": True,
}


def check(run: Run) -> int:
    """How many weights were placed; each copy of a slice is kept whole, in ranges that follow one another."""
    placed = 0
    for tensor in canonical_tensors(run.model):
        for part in slices(_followed(run, tensor.name)):
            copies = defaultdict(list)
            for k in part.kept:
                copies[k.copy].append((k.first, k.numel))
            assert copies, (run.name, tensor.name)
            for ranges in copies.values():
                end = 0
                for first, numel in sorted(ranges):
                    assert first == end, (run.name, tensor.name, ranges)
                    end += numel
                assert end == part.numel, (run.name, tensor.name, ranges)
            placed += 1
    return placed


def _followed(run: Run, weight: str) -> Run:
    return replace(run, probe=replace(run.probe, lifeline_weight=weight))


@pytest.mark.parametrize("file", RUNS, ids=lambda f: f.stem)
def test_every_weight_of_every_run_is_kept_once_a_copy(file: Path) -> None:
    run = load_run(file, overrides={"model": "laptop"})
    assert check(run) >= len(canonical_tensors(run.model))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_flat_groups_of_deepspeed(stage: int) -> None:
    run = load_run(
        ROOT / "config/runs/deepspeed-zero3-dp8.yaml",
        overrides={
            "model": "laptop",
            "deepspeed": {"zero_optimization": {"stage": stage}},
            "optimizer": {"decay_norms": False},
        },
    )
    assert check(run) == len(canonical_tensors(run.model))


def test_shards_of_ranks_that_split_sequences() -> None:
    """torchtitan's FSDP goes over them too."""
    parallel = {"data_parallel_replicate": 2, "data_parallel_shard": 2, "context_parallel": 3}
    overrides = {"model": "laptop", "seq_length": 768, "world_size": 24, "parallel": parallel}
    run = load_run(ROOT / "config/runs/torchtitan-fsdp4-tp2.yaml", overrides=overrides)
    assert check(run) >= len(canonical_tensors(run.model))
    (half, _) = slices(_followed(run, "model.layers.0.mlp.down_proj.weight"))
    assert half.ranks == tuple(range(0, 24, 2))


@pytest.mark.parametrize("name", ["megatron-tp2-pp2-dp2", "deepspeed-zero1-dp2", "deepspeed-zero3-dp8"])
def test_a_model_of_gpts_kind(name: str) -> None:
    run = load_run(ROOT / f"config/runs/{name}.yaml", overrides={"model": "laptop"})
    run = replace(run, model=replace(run.model, **GPT))
    assert check(run) >= len(canonical_tensors(run.model))
