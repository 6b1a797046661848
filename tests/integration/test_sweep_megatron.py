"""The table of Megatron Core configurations: each is run in world `fake` and held against the prediction, on every
kind of rank: every container to the byte, every call of the first and of a steady step by op, group, dtype, size and
phase.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.sweep import differences, resolved
from train_ledger.spec.config import load_model

DATA = Path(__file__).parents[1] / "data"
TABLE: list[dict[str, Any]] = yaml.safe_load((DATA / "megatron_sweep.yaml").read_text(encoding="utf-8"))
STEPS = (1, 2)
#: A tied head on uneven stages without the distributed optimizer; tied and interleaved with bf16 gradients; context,
#: tensor and interleaved pipeline parallelism at once; fewer query groups than ranks, with Megatron's own attention; a
#: sequence of one token.
FEW = [14, 21, 33, 41, 70]

pytestmark = pytest.mark.launch


@pytest.mark.parametrize("entry", [TABLE[i] for i in FEW], ids=lambda e: e["name"])
def test_exact(entry: dict[str, Any], tmp_path: Path) -> None:
    """A small part of the table."""
    assert differences(resolved(entry, tmp_path, STEPS), tmp_path / "out") == []


@pytest.mark.sweep
@pytest.mark.parametrize("entry", TABLE, ids=lambda e: e["name"])
def test_exact_everywhere(entry: dict[str, Any], tmp_path: Path) -> None:
    """The whole table."""
    assert differences(resolved(entry, tmp_path, STEPS), tmp_path / "out") == []


@pytest.mark.sweep
def test_width_of_405b_on_16384_ranks(tmp_path: Path) -> None:
    """Tensor 8 x pipeline 128 x data 16 at the width of Llama 3.1 405B, one layer a stage: first, middle and last
    stage.

    16,384 ranks make some 45,000 process groups, all real; each rank takes up to 7 GiB.
    """
    model = load_model("llama3-405b", DATA.parents[1] / "config").to_dict()
    entry = {
        "name": "megatron-405b-width",
        "model": {**model, "num_layers": 128, "seq_length": 16, "max_position_embeddings": 16},
        "run": {
            "framework": "megatron",
            "world_size": 16384,
            "global_batch": 32,
            "parallel": {
                "tensor_parallel": 8,
                "sequence_parallel": True,
                "pipeline_parallel": 128,
                "data_parallel": 16,
            },
        },
    }
    del entry["model"]["name"]
    assert differences(resolved(entry, tmp_path, STEPS), tmp_path / "out", [0, 64 * 128, 16383]) == []


def test_the_table_is_what_the_generator_makes() -> None:
    """Nobody has edited it, and it covers every value of every setting."""
    sys.path.insert(0, str(DATA))
    from megatron_generate import LAYOUTS, configurations

    assert configurations() == TABLE
    assert len({json.dumps(e["run"], sort_keys=True) for e in TABLE}) >= 40
    assert len(TABLE) >= 2 * len(LAYOUTS)
    for key, values in {
        "use_distributed_optimizer": {True, False},
        "overlap_grad_reduce": {True, False},
        "overlap_param_gather": {True, False},
        "grad_reduce_in_fp32": {True, False},
        "pad_buckets_for_high_nccl_busbw": {True, False},
        "core_attention": {"sdpa", "local"},
        "recompute_granularity": {None, "selective", "full"},
        "recompute_method": {None, "uniform", "block"},
    }.items():
        assert {e["run"]["megatron"].get(key) for e in TABLE} == values
