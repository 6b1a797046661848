"""The table of DeepSpeed configurations: each is run in world `fake` and held against the prediction, on every kind of
rank: every container to the byte, every call of the first and of a steady step by op, group, dtype, size and phase. A
few run with all their ranks on gloo too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.sweep import differences, resolved

DATA = Path(__file__).parents[1] / "data"
TABLE: list[dict[str, Any]] = yaml.safe_load((DATA / "deepspeed_sweep.yaml").read_text(encoding="utf-8"))
#: With one micro-batch a step, DeepSpeed still checks its trace in the second step: the third is the first steady one.
STEPS = (1, 3)
#: One rank of ZeRO-3 with a tied head, ZeRO-3 with learned positions and several sub-groups, ZeRO-3 that checkpoints
#: layers and gathers nothing ahead, stage 0, stage 1 with its other optimizer class, stage 2 without one buffer.
FEW = [0, 3, 4, 8, 9, 13]
#: ZeRO-3 with a tied head on two ranks, stage 1 with fp32 gradients on three.
ON_GLOO = [7, 9]

pytestmark = pytest.mark.launch


@pytest.mark.parametrize("entry", [TABLE[i] for i in FEW], ids=lambda e: e["name"])
def test_exact(entry: dict[str, Any], tmp_path: Path) -> None:
    """A small part of the table."""
    assert differences(resolved(entry, tmp_path, STEPS), tmp_path / "out") == []


@pytest.mark.parametrize("entry", [TABLE[i] for i in ON_GLOO], ids=lambda e: e["name"])
def test_exact_with_all_ranks(entry: dict[str, Any], tmp_path: Path) -> None:
    """Ranks that really talk to each other keep and send what a rank alone does."""
    assert differences(resolved(entry, tmp_path, STEPS, "cpu"), tmp_path / "out") == []


@pytest.mark.sweep
@pytest.mark.parametrize("entry", TABLE, ids=lambda e: e["name"])
def test_exact_everywhere(entry: dict[str, Any], tmp_path: Path) -> None:
    """The whole table."""
    assert differences(resolved(entry, tmp_path, STEPS), tmp_path / "out") == []


def test_the_table_is_what_the_generator_makes() -> None:
    """Nobody has edited it, and it covers every value of every setting."""
    sys.path.insert(0, str(DATA))
    from deepspeed_generate import GRADIENTS, configurations

    assert configurations() == TABLE
    assert len({json.dumps([e["model"], e["run"]], sort_keys=True) for e in TABLE}) == len(TABLE) >= 40
    settings = [e["run"]["deepspeed"] for e in TABLE]
    assert {s["zero_optimization"]["stage"] for s in settings} == {0, 1, 2, 3}
    assert {e["run"]["world_size"] for e in TABLE} > set(range(1, 9))
    accumulation = {e["run"]["global_batch"] // e["run"]["micro_batch"] // e["run"]["world_size"] for e in TABLE}
    assert accumulation == {1, 2, 3, 4}
    for key in ("overlap_comm", "contiguous_gradients", "reduce_scatter"):
        for stage in (1, 2, 3):
            seen = {s["zero_optimization"][key] for s in settings if s["zero_optimization"]["stage"] == stage}
            assert seen == {True, False}, (key, stage)
    for stage, kinds in GRADIENTS.items():
        seen = {s["data_types"]["grad_accum_dtype"] for s in settings if s["zero_optimization"]["stage"] == stage}
        assert seen == {None, *kinds}, stage
    assert {s["communication_data_type"] for s in settings} == {None, "bf16", "fp16", "fp32"}
    for key in ("activation_checkpointing", "zero_init"):
        assert {s[key] for s in settings if key in s} == {True, False}
    for key in ("tie_embeddings", "qkv_bias", "attention_output_bias", "mlp_bias", "qk_norm", "gated_mlp"):
        assert {e["model"][key] for e in TABLE} == {True, False}
