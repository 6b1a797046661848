"""Megatron Core on real gloo ranks: layouts that must not change what is learned, each reconciled on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from train_ledger.launch.launcher import launch
from train_ledger.launch.weights import write_initial
from train_ledger.predict import predict
from train_ledger.reconcile.core import reconcile_rank
from train_ledger.reconcile.layout import reconcile_layout
from train_ledger.reconcile.rows import CLEAN
from train_ledger.spec.config import model_shape, resolve_run

pytestmark = pytest.mark.launch

LLAMA = {
    "num_layers": 4,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 1,
    "ffn_hidden_size": 92,
    "vocab_size": 260,
    "seq_length": 24,
    "qk_norm": True,
}
GPT = LLAMA | {
    "num_query_groups": 4,
    "position_embedding": "learned",
    "normalization": "layernorm",
    "gated_mlp": False,
    "activation": "gelu",
    "tie_embeddings": True,
    "qkv_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "qk_norm": False,
}
WHOLE = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}
#: Name: (model, degrees, settings). The first of each model is what the others are held against.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llama": (LLAMA, {}, {}),
    "llama-again": (LLAMA, {}, {}),
    "llama-recomputed": (LLAMA, {}, WHOLE),
    "llama-local": (LLAMA, {}, {"core_attention": "local"}),
    "llama-tp2": (LLAMA, {"tensor_parallel": 2}, {}),
    "llama-cp2": (LLAMA, {"context_parallel": 2}, {}),
    "llama-dp2-plain": (
        LLAMA,
        {"data_parallel": 2},
        {"use_distributed_optimizer": False, "overlap_param_gather": False},
    ),
    "gpt": (GPT, {}, {}),
    "gpt-tp2-sp": (GPT, {"tensor_parallel": 2, "sequence_parallel": True}, {}),
    "gpt-pp2-interleaved": (GPT, {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}, {}),
}
#: bf16 has 8 bits: sums in another order differ by about 2^-9 of a term, and far less in a mean over 96 tokens.
RELATIVE_BOUND = 1e-3


def trained(name: str, folder: Path) -> tuple[list[float], list[float]]:
    """Launches a layout from the canonical weights; losses and gradient norms of three steps. Every rank reconciles."""
    model, degrees, settings = LAYOUTS[name]
    size = 1
    for key in ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel"):
        size *= degrees.get(key, 1)
    data = {
        "framework": "megatron",
        "world": "cpu",
        "world_size": size,
        "global_batch": 4,
        "steps": 3,
        "parallel": degrees,
        "megatron": {"bucket_size": 8000, "make_vocab_size_divisible_by": 1} | settings,
    }
    run = resolve_run(name, data, name, "config", model=model_shape(name.split("-")[0], model, name))
    weights = folder / f"{run.model.name}.safetensors"
    if not weights.exists():
        write_initial(run.model, run.seed, weights)
    launch(run, folder / name, 120, weights)
    prediction = predict(run).to_dict()
    losses: list[float] = []
    norms: list[float] = []
    for rank in range(size):
        measured = json.loads((folder / name / f"rank{rank}.json").read_text(encoding="utf-8"))
        resident, calls = reconcile_rank(prediction, measured)
        assert [r for r in [*resident, *calls, *reconcile_layout(prediction, measured)] if r.verdict not in CLEAN] == []
        norms = [s["grad_norm"] for s in measured["steps"]]
        losses = [s["loss"] for s in measured["steps"]] if measured["steps"][0]["loss"] is not None else losses
    return losses, norms


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[float], list[float]]]:
    """All layouts, one after the other; Megatron is imported once."""
    folder = tmp_path_factory.mktemp("megatron")
    return {name: trained(name, folder) for name in LAYOUTS}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_does_not_change_what_is_learned(name: str, results: dict[str, tuple[list[float], list[float]]]) -> None:
    """Losses and gradient norms are those of one rank, up to the order of summation."""
    for got, wanted in zip(results[name], results[name.split("-")[0]], strict=True):
        assert got == pytest.approx(wanted, rel=RELATIVE_BOUND)


def test_the_same_run_twice_is_bitwise_equal(results: dict[str, tuple[list[float], list[float]]]) -> None:
    """On CPUs with one thread a rank nothing is left to chance; nor does recomputation change a bit."""
    assert results["llama"] == results["llama-again"] == results["llama-recomputed"]
