"""The table of torchtitan configurations: each is run in world `fake` and held against the prediction, on every kind
of rank.

Three steps are compared call by call: the first, a plain one (where logging is rarer than every step) and one that
logs.
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
TABLE: list[dict[str, Any]] = yaml.safe_load((DATA / "torchtitan_sweep.yaml").read_text(encoding="utf-8"))
STEPS = (1, 2, 3)
#: The first pipeline of the table; those before have no stages.
PIPELINES = next(i for i, e in enumerate(TABLE) if e["run"]["parallel"].get("pipeline_parallel", 1) > 1)
#: The first that splits sequences.
CONTEXTS = next(i for i, e in enumerate(TABLE) if e["run"]["parallel"].get("context_parallel", 1) > 1)
#: FSDP x TP and tied, a tie that holds, HSDP x TP that sums activations: seconds each; pipelines of 1F1B with FSDP,
#: and of several stages a rank; sequences split with FSDP, and with DTensors and tensor parallelism.
FEW = [14, 24, 62, PIPELINES + 1, PIPELINES + 12, *(CONTEXTS + i for i in (1, 6))]

#: Of two to four ranks, tied and not, of every backend: these also train together on gloo. Pipelines of every schedule;
#: split sequences alone, with FSDP, tensor parallelism and replicas, and in a pipeline.
ON_GLOO = [
    13,
    16,
    23,
    30,
    35,
    46,
    56,
    *(PIPELINES + i for i in (1, 4, 5, 10, 12, 17)),
    *(CONTEXTS + i for i in (0, 1, 2, 5, 7, 10)),
]

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
@pytest.mark.parametrize("entry", [TABLE[i] for i in ON_GLOO], ids=lambda e: e["name"])
def test_exact_on_gloo(entry: dict[str, Any], tmp_path: Path) -> None:
    """With peers that answer: the same bytes and calls as without."""
    assert differences(resolved(entry, tmp_path, STEPS, "cpu"), tmp_path / "out") == []


def test_the_table_is_what_the_generator_makes() -> None:
    """Nobody has edited it, and it covers every value of every setting."""
    sys.path.insert(0, str(DATA))
    from torchtitan_generate import configurations, contexts, pipelines

    assert configurations() + pipelines() + contexts() == TABLE
    assert len({json.dumps(e["run"], sort_keys=True) for e in TABLE}) >= 40
    for key, values in {
        "spmd_backend": {"spmd_types", "partial_dtensor", "full_dtensor"},
        "activation_checkpoint": {"none", "selective", "full"},
        "fsdp_reshard_after_forward": {"default", "always", "never"},
        "mixed_precision_param": {"bfloat16", "float32"},
        "chunked_loss": {True, False},
        "log_freq": {1, 3},
    }.items():
        assert {e["run"]["torchtitan"][key] for e in TABLE} == values
    schedules = {e["run"]["torchtitan"].get("pipeline_parallel_schedule", "1F1B") for e in TABLE[PIPELINES:CONTEXTS]}
    assert schedules == {"1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"}
    without = [e["run"] for e in TABLE if e["run"]["parallel"]["tensor_parallel"] > 1]
    without = [r for r in without if not r["parallel"]["sequence_parallel"]]
    assert {r["torchtitan"]["spmd_backend"] for r in without} == {"spmd_types", "partial_dtensor", "full_dtensor"}
