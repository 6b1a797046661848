"""Canonical weights to and from Megatron's tensor-parallel parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from train_ledger.launch.frameworks.megatron_weights import canonical_tensors, local_tensor, origin
from train_ledger.predict.frameworks.megatron_layout import chunk_params
from train_ledger.predict.frameworks.megatron_plan import chunks, plan
from train_ledger.spec.config import model_shape, resolve_run
from train_ledger.spec.model import canonical_tensors as every_tensor
from train_ledger.spec.run import Run

SHAPES: list[dict[str, Any]] = [
    {"num_query_groups": 2},
    {"num_query_groups": 1, "gated_mlp": False, "tie_embeddings": True, "normalization": "layernorm"},
    {
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "qk_norm": True,
        "position_embedding": "learned",
        "num_query_groups": 4,
    },
]


def make_run(shape: dict[str, Any], tp: int) -> Run:
    """Three layers on one stage."""
    base = {
        "num_layers": 3,
        "hidden_size": 24,
        "num_attention_heads": 4,
        "head_dim": 6,
        "ffn_hidden_size": 20,
        "vocab_size": 29,
        "seq_length": 8,
    }
    model = model_shape("m", base | shape, "m")
    data = {"framework": "megatron", "world_size": tp, "parallel": {"tensor_parallel": tp}}
    data["megatron"] = {"make_vocab_size_divisible_by": 8}
    return resolve_run("r", data, "r", "config", model=model)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_there_and_back(shape: dict[str, Any], tp: int) -> None:
    """Cut for every rank and joined again, each canonical tensor comes back once and unchanged."""
    run = make_run(shape, tp)
    generator = torch.Generator().manual_seed(1)
    given = {t.name: torch.randn(t.shape, generator=generator) for t in every_tensor(run.model)}
    (chunk,) = chunks(plan(run), 0)
    back: dict[str, torch.Tensor] = {}
    for param in chunk_params(plan(run), chunk):
        where = origin(param.name, 0, run.model)
        parts = [local_tensor(given.__getitem__, where, run.model, tp, r, plan(run).vocab) for r in range(tp)]
        assert {p.numel() for p in parts} == {param.numel}
        for name, tensor in canonical_tensors(parts, where, run.model):
            assert name not in back
            back[name] = tensor
    assert back.keys() == given.keys()
    for name, tensor in given.items():
        assert torch.equal(back[name], tensor), name


def test_query_key_value_stand_group_by_group() -> None:
    """Two groups of two heads: q q k v, q q k v (transformer/attention.py:get_query_key_value_tensors)."""
    run = make_run({"num_query_groups": 2}, 2)
    rows = {
        f"model.layers.0.self_attn.{x}_proj.weight": torch.full((n * 6, 24), base)
        + torch.arange(n).repeat_interleave(6)[:, None]
        for x, n, base in (("q", 4, 10.0), ("k", 2, 20.0), ("v", 2, 30.0))
    }
    where = origin("decoder.layers.0.self_attention.linear_qkv.weight", 0, run.model)
    for rank, heads in enumerate(([10, 11, 20, 30], [12, 13, 21, 31])):
        part = local_tensor(rows.__getitem__, where, run.model, 2, rank, 32)
        assert part[::6, 0].tolist() == heads


def test_gate_before_up_on_each_rank() -> None:
    """Each rank holds its rows of the gate, then its rows of the up projection (transformer/mlp.py:MLP.forward)."""
    run = make_run({}, 2)
    rows = {
        f"model.layers.2.mlp.{x}_proj.weight": torch.arange(20.0)[:, None] + base
        for x, base in (("gate", 0), ("up", 100))
    }
    where = origin("decoder.layers.1.mlp.linear_fc1.weight", 1, run.model)
    part = local_tensor(rows.__getitem__, where, run.model, 2, 1, 32)
    assert part[:, 0].tolist() == [*range(10, 20), *range(110, 120)]


def test_padding_rows_are_zero() -> None:
    """The vocabulary of 29 is padded to 32 for two ranks of 16."""
    run = make_run({}, 2)
    where = origin("output_layer.weight", 0, run.model)
    part = local_tensor(lambda name: torch.ones(29, 24), where, run.model, 2, 1, 32)
    assert part.sum(1).tolist() == [24.0] * 13 + [0.0] * 3


def test_an_unknown_parameter_is_named() -> None:
    """A new parameter in Megatron must not be passed over."""
    with pytest.raises(KeyError, match="softmax_offset"):
        origin("decoder.layers.0.self_attention.core_attention.softmax_offset", 0, make_run({}, 1).model)
