"""Figures that Megatron's own people published, against the prediction: what is left over, and what it is made of.

Sources: Megatron Core's continuous integration at tag core_v0.18.0 (`mem-allocated-bytes`: allocated at the end of a
step on the last pipeline stage, 8 x H100), and the log line "number of parameters on (tensor, pipeline) model parallel
rank" of a GPT 13B. CI keeps its figures within 5%, so one can be a little stale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from train_ledger.predict.frameworks import megatron
from train_ledger.predict.frameworks.megatron_layout import chunk_params
from train_ledger.predict.frameworks.megatron_plan import chunks, plan
from train_ledger.spec.config import model_shape, resolve_run
from train_ledger.spec.run import Run

MIB = 2**20
#: cuBLAS takes 32 MiB on Hopper for each handle and stream (ATen/cuda/CublasHandlePool.cpp:parseChosenWorkspaceSize);
#: Transformer Engine keeps workspaces of the same size for its own GEMMs (pytorch/module/base.py:get_workspace).
WORKSPACE_BYTES = 32 * MIB
GPT = {
    "position_embedding": "learned",
    "normalization": "layernorm",
    "gated_mlp": False,
    "activation": "gelu",
    "qkv_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
}
SMALL = GPT | {
    "num_layers": 12,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "ffn_hidden_size": 2048,
    "vocab_size": 50257,
    "seq_length": 1024,
    "tie_embeddings": True,
}
SEVEN_B = GPT | {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 16384,
    "vocab_size": 131073,
    "seq_length": 8192,
}
#: Containers that Transformer Engine's modules have too; the scratch buffer belongs to Megatron's own.
IN_BOTH = {"param", "grad", "main_param", "main_grad", "exp_avg", "exp_avg_sq", "received_activation", "loss_scale"}


class Case(NamedTuple):
    """A published figure, bytes, the run it is of, how many workspaces lie beside, and how much may stay unnamed."""

    name: str
    model: dict[str, Any]
    micro_batch: int
    parallel: dict[str, int]
    settings: dict[str, Any]
    published_bytes: int
    workspaces: int
    unnamed: float


CASES = [
    Case("7B TP4 DP2", SEVEN_B, 2, {"tensor_parallel": 4, "data_parallel": 2}, {}, 20_663_519_232, 3, 0.001),
    Case("12 layers DP8", SMALL, 4, {"data_parallel": 8}, {"overlap": False}, 581_489_664, 3, 0.001),
    Case("12 layers DP8, local", SMALL, 4, {"data_parallel": 8}, {}, 518_880_768, 1, 0.01),
    Case(
        "12 layers TP2 PP2 DP2, no distributed optimizer",
        SMALL,
        4,
        {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 2},
        {"use_distributed_optimizer": False, "overlap": False},
        517_243_392,
        3,
        0.011,
    ),
]


def make_run(model: dict[str, Any], micro_batch: int, parallel: dict[str, int], settings: dict[str, Any]) -> Run:
    """The run of a case."""
    own = dict(settings)
    overlap = own.pop("overlap", True)
    own |= {
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": overlap and own.get("use_distributed_optimizer", True),
    }
    world = 1
    for degree in parallel.values():
        world *= degree
    data = {
        "framework": "megatron",
        "world_size": world,
        "micro_batch": micro_batch,
        "global_batch": micro_batch * parallel.get("data_parallel", 1),
        "parallel": parallel,
        "megatron": own,
    }
    return resolve_run("case", data, "case", "config", model=model_shape("case", model, "case"))


def unnamed_bytes(case: Case) -> int:
    """What predicted containers and named workspaces leave of a published figure; docs/cases.md prints it."""
    run = make_run(case.model, case.micro_batch, case.parallel, case.settings)
    megatron.check(run)
    ledger = megatron.rank_ledger(run, run.world_size - 1)
    predicted = sum(c.bytes for c in ledger.containers if c.name in IN_BOTH)
    return case.published_bytes - predicted - case.workspaces * WORKSPACE_BYTES


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_memory_of_megatrons_ci(case: Case) -> None:
    """Predicted containers and named workspaces leave between nothing and the stated share of the published figure."""
    assert 0 <= unnamed_bytes(case) <= case.unnamed * case.published_bytes


def test_what_the_local_layers_leave_is_less_than_their_scores() -> None:
    """The published figure leaves no room for the scratch of unfused attention, so that run did not use it."""
    run = make_run(SMALL, 4, {"data_parallel": 8}, {"core_attention": "local"})
    scratch = next(c for c in megatron.rank_ledger(run, 0).containers if c.name == "global_memory_buffer")
    assert scratch.bytes == 2 * 4 * 8 * 1024**2
    assert scratch.bytes > 518_880_768 - megatron.rank_ledger(run, 7).state_bytes


@pytest.mark.parametrize(
    ("stage", "published"), [(0, 1_712_942_080), (1, 1_573_350_400), (2, 1_573_350_400), (3, 1_702_466_560)]
)
def test_parameters_of_a_13b_on_each_stage(stage: int, published: int) -> None:
    """The vocabulary is padded to 50432, the last stage holds a copy of the tied embedding: equal to the element."""
    shape = SMALL | {
        "num_layers": 40,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "ffn_hidden_size": 20480,
        "seq_length": 2048,
    }
    run = make_run(shape, 1, {"tensor_parallel": 2, "pipeline_parallel": 4}, {})
    rule = plan(run)
    assert sum(p.numel for chunk in chunks(rule, stage) for p in chunk_params(rule, chunk)) == published


def test_first_order_is_what_the_published_sum_says() -> None:
    """12 B a parameter at TP4 DP2 and 7.5 B at DP8; padding and counters are all that the exact figures add."""
    for model, parallel, published, per_parameter in (
        (SEVEN_B, {"tensor_parallel": 4, "data_parallel": 2}, 20_559_593_472, 12),
        (SMALL, {"data_parallel": 8}, 480_821_760, 7.5),
    ):
        run = make_run(model, 1, parallel, {})
        (chunk,) = chunks(plan(run), 0)
        numel = sum(p.numel for p in chunk_params(plan(run), chunk))
        assert numel * per_parameter == published
        assert 0 <= megatron.rank_ledger(run, 0).state_bytes - published < published * 1e-4
