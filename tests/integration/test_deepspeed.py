"""DeepSpeed's training program on real gloo ranks: the life of a weight, and weights in and out of every optimizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import on_ranks
from train_ledger.launch.frameworks import deepspeed
from train_ledger.launch.launcher import launch
from train_ledger.launch.session import Rank
from train_ledger.launch.weights import generate
from train_ledger.spec.config import load_run
from train_ledger.spec.errors import ConfigError
from train_ledger.spec.model import canonical_tensors
from train_ledger.spec.run import Run

RUN = Path(__file__).parents[2] / "config" / "runs" / "deepspeed-zero3-dp8.yaml"
THRESHOLDS = {
    "reduce_bucket_size": 20000,
    "stage3_prefetch_bucket_size": 20000,
    "stage3_param_persistence_threshold": 100,
    "stage3_max_live_parameters": 100000,
    "stage3_max_reuse_distance": 20000,
    "sub_group_size": 9000,
}

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Once here, not in every rank."""
    deepspeed.warm_up()


def make(stage: int, deepspeed: dict[str, Any] | None = None, **overrides: Any) -> Run:
    """Two ranks at the laptop shape."""
    settings = {"zero_optimization": {**THRESHOLDS, "stage": stage}, **(deepspeed or {})}
    small = {"world_size": 2, "parallel": {"data_parallel": 2}, "global_batch": 4, "model": "laptop", "steps": 2}
    return load_run(RUN, overrides={**small, **overrides, "deepspeed": settings})


def session(run: Run, rank: int) -> deepspeed.Session:
    """In a rank whose process group exists already."""
    return deepspeed.build(run, Rank(rank, rank, run.world_size, "cpu", torch.device("cpu"), lambda timeout: None))


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        (3, {}),
        (3, {"zero_init": False, "data_types": {"grad_accum_dtype": "fp32"}}),
        (2, {}),
        (1, {"data_types": {"grad_accum_dtype": "fp32"}}),
        (0, {}),
    ],
    ids=["zero3", "zero3-fp32", "zero2", "zero1-fp32", "zero0"],
)
def test_weights_come_out_as_they_went_in(stage: int, settings: dict[str, Any]) -> None:
    """fp32 masters take canonical weights bit for bit, the model's copies their rounding; then training moves them."""
    run = make(stage, settings, optimizer={"decay_norms": False})
    read = generate(run.model, run.seed)

    def rank(number: int) -> dict[str, Any]:
        one = session(run, number)
        one.load_weights(read)
        before = one.export_weights()
        results = [one.step(step) for step in (1, 2)]
        after = one.export_weights()
        return {
            "exact": [name for name, value in before.items() if torch.equal(value, read(name))],
            "moved": [name for name, value in after.items() if not torch.equal(value, before[name])],
            "losses": [r.loss for r in results],
            "norms": [r.grad_norm for r in results],
        }

    ranks = on_ranks(2, rank, timeout_s=120)
    names = sorted(t.name for t in canonical_tensors(run.model))
    assert sorted(ranks[0]["exact"] + ranks[1]["exact"]) == names  # each on exactly one rank
    assert sorted(ranks[0]["moved"] + ranks[1]["moved"]) == names
    assert ranks[0]["norms"] == ranks[1]["norms"]
    # Another sample, another loss; all near the log of 522 words that a fresh model gives.
    assert ranks[0]["losses"] != ranks[1]["losses"]
    assert all(5.5 < loss < 8 for r in ranks for loss in r["losses"])


def test_a_parameter_is_whole_only_while_it_is_used(tmp_path: Path) -> None:
    """ZeRO-3: empty, full in the forward, empty, full in the backward, empty; its fp32 master never moves."""
    run = make(3)
    launch(run, tmp_path)
    life = json.loads((tmp_path / "rank1.json").read_text(encoding="utf-8"))["lifeline"]
    assert life["full_numel"] == 60 * 60
    states = [e["state"] for e in life["events"]]
    changes = [s for i, s in enumerate(states) if i == 0 or states[i - 1] != s]
    assert changes == ["empty", "full", "empty", "full", "empty", "full", "empty", "full", "empty"]  # two micro-batches
    assert {e["event"] for e in life["events"] if e["state"] == "full"} == {"forward", "backward"}
    assert {(e["master"]["name"], e["master"]["numel"], e["master"]["dtype"]) for e in life["events"]} == {
        ("main_param", 60 * 60 // 2, "float32")
    }


def test_what_deepspeed_cannot_build_is_a_config_error() -> None:
    run = make(3)
    unknown = replace(run, model=replace(run.model, rope_scaling={"rope_type": "yarn", "factor": 2.0}))
    nowhere = replace(run.probe, lifeline_weight="model.layers.9.self_attn.o_proj.weight")

    def rank(number: int) -> list[str]:
        said = []
        try:
            session(unknown, number)
        except ConfigError as e:
            said.append(str(e))
        try:
            session(run, number).weight(nowhere.lifeline_weight)
        except ConfigError as e:
            said.append(str(e))
        return said

    for said in on_ranks(2, rank, timeout_s=120):
        assert "rope_scaling of kind 'yarn'" in said[0]
        assert "the model has no weight 'model.layers.9.self_attn.o_proj.weight'" in said[1]
