"""DeepSpeed's prediction against figures that were measured, and against the rules by hand."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from train_ledger.predict import predict
from train_ledger.predict.frameworks import deepspeed
from train_ledger.spec.config import load_run, merge
from train_ledger.spec.errors import ConfigError
from train_ledger.spec.ledger import Collective, RankLedger
from train_ledger.spec.model import canonical_tensors
from train_ledger.spec.run import Run

RUN = Path(__file__).parents[2] / "config" / "runs" / "deepspeed-zero3-dp8.yaml"
PARAMETERS = 1_498_482_688  # of the 1B shape


def make(zero: dict[str, Any] | None = None, **overrides: Any) -> Run:
    """The run of the paper with other settings."""
    return load_run(RUN, overrides=merge(overrides, {"deepspeed": {"zero_optimization": zero or {}}}))


def sized(world_size: int, accumulation: int = 2) -> dict[str, Any]:
    return {
        "world_size": world_size,
        "parallel": {"data_parallel": world_size},
        "global_batch": world_size * accumulation,
    }


def ledger(run: Run, rank: int = 0, step: str = "steady") -> RankLedger:
    return predict(run, [rank], step).ranks[0]


def calls(rank: RankLedger, **wanted: str) -> list[Collective]:
    return [c for c in rank.collectives if all(getattr(c, k) == v for k, v in wanted.items())]


def count(rank: RankLedger, **wanted: str) -> int:
    return sum(c.count for c in calls(rank, **wanted))


def container_bytes(rank: RankLedger) -> dict[str, int]:
    return {c.name: c.bytes for c in rank.containers}


# --- ZeRO-3, the paper's run: measured on 8 ranks and in a world of one rank, to the byte and to the call ------------


def test_zero3_resident_bytes_of_the_paper() -> None:
    for rank in (0, 7):
        kept = ledger(make(), rank)
        assert kept.resident_bytes == 3_097_100_557
        assert container_bytes(kept) == {
            "param": 374_620_672,
            "main_param": 749_241_344,
            "exp_avg": 749_241_344,
            "exp_avg_sq": 749_241_344,
            "step": 4,
            "grad": 374_620_672,
            "reduce_bucket": 100_000_000,
            "persisted_param": 135_168,
            "inf_or_nan_tracker": 1,
            "global_grad_norm": 8,
        }


def test_zero3_calls_of_a_steady_step() -> None:
    sent = ledger(make())
    assert {op: count(sent, op=op) for op in ("all_gather", "reduce_scatter", "all_reduce", "broadcast")} == {
        "all_gather": 72,
        "reduce_scatter": 52,
        "all_reduce": 1,
        "broadcast": 0,
    }
    assert count(sent, op="all_gather", phase="optimizer") == 33  # the persisted parameters, one by one
    assert sum(c.in_numel * c.count for c in calls(sent, op="all_gather")) == 422_650_112
    # Both micro-batches reduce every gradient.
    assert sum(c.in_numel * c.count for c in calls(sent, op="reduce_scatter")) == 2 * PARAMETERS
    assert {c.dtype for c in calls(sent, op="all_reduce")} == {"float64"}


def test_zero3_calls_of_the_first_step() -> None:
    sent = ledger(make(), step="first")
    assert count(sent, op="all_gather") == 294 + 19 + 33
    assert count(sent, op="reduce_scatter") == 52
    assert count(sent, op="broadcast") == 2 + 6


def test_first_and_steady_keep_the_same() -> None:
    assert ledger(make(), step="first").containers == ledger(make()).containers


def test_checking_the_trace_falls_into_the_second_step_without_accumulation() -> None:
    assert count(ledger(make(**sized(8, 1)), step="first"), op="broadcast") == 2
    assert count(ledger(make(**sized(8, 1))), op="broadcast") == 0


def test_many_micro_batches_add_up() -> None:
    """From the second micro-batch of a step on, all are alike."""

    def total(accumulation: int) -> Counter[tuple[Any, ...]]:
        sent = ledger(make(**sized(8, accumulation)))
        return Counter({(c.op, c.phase, c.in_numel): c.count for c in sent.collectives})

    two, three, many = total(2), total(3), total(50)
    for key, n in many.items():
        assert n == two[key] + 48 * (three[key] - two[key])


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6, 7, 8])
def test_shards_hold_the_model_once_over_all_ranks(world_size: int) -> None:
    run = make(model="laptop", **sized(world_size))
    ranks = predict(run).ranks
    total = sum(t.numel for t in canonical_tensors(run.model))
    for name in ("param", "main_param", "exp_avg", "exp_avg_sq", "grad"):
        own = [next(c for c in r.containers if c.name == name) for r in ranks]
        assert sum(c.numel for c in own) == total
        assert len({c.numel + c.pad_numel for c in own}) == 1
    assert len({deepspeed.rank_class(run, r) for r in range(world_size)}) <= len(ranks)


def test_one_rank_gathers_nothing() -> None:
    sent = ledger(make(model="laptop", **sized(1)))
    assert count(sent, op="all_gather") == 0
    assert "persisted_param" not in container_bytes(sent)


def test_one_rank_still_copies_a_single_persisted_parameter(tmp_path: Path) -> None:
    """One parameter alone takes another way through DeepSpeed than several do."""
    shape = tmp_path / "one.yaml"
    shape.write_text(
        "{num_layers: 1, hidden_size: 6, num_attention_heads: 1, ffn_hidden_size: 2, vocab_size: 5, seq_length: 4, "
        "gated_mlp: false, mlp_bias: true}"
    )
    seen = {}
    for threshold in (1, 2, 6):  # nothing; the bias of 2 elements; that and four vectors of 6
        one = ledger(make({"stage3_param_persistence_threshold": threshold}, model=str(shape), **sized(1)))
        seen[threshold] = count(one, op="all_gather"), container_bytes(one).get("persisted_param", 0)
    assert seen == {1: (0, 0), 2: (1, 4), 6: (0, 0)}


def test_sub_groups_bound_the_optimizer_step() -> None:
    run = make({"sub_group_size": 100_000_000})
    kept = ledger(run)
    main = next(c for c in kept.containers if c.name == "main_param")
    assert main.bytes == 749_241_344
    assert sum(n for _, n in main.blocks) == 2
    assert sum(size * n for size, n in main.blocks) == main.bytes
    assert count(kept, op="all_reduce") == 2  # a norm each
    assert container_bytes(kept)["step"] == 8


@pytest.mark.parametrize(
    ("settings", "name", "ratio"),
    [
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "grad", 2),
        ({"communication_data_type": "fp32"}, "reduce_bucket", 2),
        ({"zero_optimization": {"contiguous_gradients": False}}, "reduce_bucket", 0),
        ({"zero_optimization": {"stage3_param_persistence_threshold": 0}}, "persisted_param", 0),
    ],
)
def test_each_setting_changes_its_own_container(settings: dict[str, Any], name: str, ratio: int) -> None:
    plain = container_bytes(ledger(make()))
    changed = container_bytes(ledger(make(deepspeed=settings)))
    assert changed.pop(name, 0) == ratio * plain.pop(name)
    assert changed == plain


def test_fetches_do_not_depend_on_the_rank() -> None:
    run = make(model="laptop")
    assert len({ledger(run, rank).collectives for rank in range(8)}) == 1


# --- stages 0 to 2 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_shard_optimizer_state_alone(stage: int) -> None:
    kept = container_bytes(ledger(make({"stage": stage})))
    assert kept == {
        "param": 2 * PARAMETERS,  # divides by 16
        "main_param": PARAMETERS // 2,
        "exp_avg": PARAMETERS // 2,
        "exp_avg_sq": PARAMETERS // 2,
        "step": 4,
        "global_grad_norm": 4,
    }


def test_stages_1_and_2_pad_to_twice_the_ranks() -> None:
    ranks = predict(make({"stage": 2}, model="laptop")).ranks
    total = sum(t.numel for t in canonical_tensors(make(model="laptop").model))
    assert total % 16 == 12
    whole = next(c for c in ranks[0].containers if c.name == "param")
    assert (whole.numel, whole.pad_numel) == (total, 4)
    parts = [next(c for c in r.containers if c.name == "main_param") for r in ranks]
    assert [c.pad_numel for c in parts] == [0] * 7 + [4]
    assert sum(c.numel for c in parts) == total


def test_stage_2_reduces_every_micro_batch_and_stage_1_once() -> None:
    one, two = ledger(make({"stage": 1})), ledger(make({"stage": 2}))
    for sent, times in ((one, 1), (two, 2)):
        reduced = calls(sent, op="all_reduce", component="grad_reduce")
        assert sum(c.in_numel * c.count for c in reduced) == times * PARAMETERS
        [gather] = calls(sent, op="all_gather")
        assert (gather.count, gather.out_numel) == (1, PARAMETERS)


def test_stage_1_with_fp32_gradients_keeps_them_whole() -> None:
    kept = ledger(make({"stage": 1}, deepspeed={"data_types": {"grad_accum_dtype": "fp32"}}))
    assert container_bytes(kept)["grad"] == 4 * PARAMETERS
    # and sends them in bf16, in calls of 5e8 elements or a tensor more
    [reduced] = calls(kept, component="grad_reduce")
    assert (reduced.dtype, reduced.in_numel, reduced.count) == ("bfloat16", PARAMETERS, 1)


def test_stage_0_shards_nothing() -> None:
    kept = ledger(make({"stage": 0}))
    tensors = len(canonical_tensors(make().model))
    assert kept.resident_bytes == 14 * PARAMETERS + 4 * tensors
    assert sum(c.in_numel * c.count for c in calls(kept, op="all_reduce")) == PARAMETERS
    assert count(kept, op="all_reduce") == 3  # of more than 5e8 elements each, but the last


# --- groups, refusals, speed ----------------------------------------------------------------------------------------


def test_groups_are_the_world_and_its_clone() -> None:
    prediction = predict(make(), [0])
    assert [(g.name, g.ranks) for g in prediction.groups] == [
        ("world", tuple(range(8))),
        ("data_parallel", tuple(range(8))),
    ]
    assert prediction.ranks[0].coords == {"dp": 0}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"world_size": 16, "parallel": {"tensor_parallel": 2}}, "parallel.tensor_parallel"),
        ({"world_size": 16, "parallel": {"pipeline_parallel": 2}}, "parallel.pipeline_parallel"),
        ({"world_size": 16, "parallel": {"context_parallel": 2}}, "parallel.context_parallel"),
        ({"parallel": {"sequence_parallel": True}}, "parallel.sequence_parallel"),
        (
            {"deepspeed": {"zero_optimization": {"stage": 0}, "data_types": {"grad_accum_dtype": "fp32"}}},
            "deepspeed.data_types.grad_accum_dtype",
        ),
        (
            {"deepspeed": {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp16"}}},
            "deepspeed.data_types.grad_accum_dtype",
        ),
        (
            {"deepspeed": {"zero_optimization": {"stage": 2, "allgather_bucket_size": 7}}},
            "deepspeed.zero_optimization.allgather_bucket_size",
        ),
        (
            {"deepspeed": {"zero_optimization": {"reduce_bucket_size": 1.5}}},
            "deepspeed.zero_optimization.reduce_bucket_size",
        ),
        (
            {"deepspeed": {"zero_optimization": {"offload_optimizer": {}}}},
            "deepspeed.zero_optimization.offload_optimizer",
        ),
        ({"deepspeed": {"zero_optimization": {"stage": 4}}}, "deepspeed.zero_optimization.stage"),
        ({"deepspeed": {"fp16": {"enabled": True}}}, "deepspeed.fp16"),
    ],
)
def test_what_cannot_be_is_refused_by_name(overrides: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        predict(load_run(RUN, overrides=overrides))
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "yarn", "factor": 2.0}, "'yarn' is not modelled"),
        ({"rope_type": "llama3", "factor": 8.0}, "llama3 scaling needs low_freq_factor"),
    ],
)
def test_rope_scaling_that_the_model_does_not_know(scaling: dict[str, Any], words: str) -> None:
    run = load_run(RUN)
    with pytest.raises(ConfigError, match=words) as refused:
        predict(replace(run, model=replace(run.model, rope_scaling=scaling)))
    assert refused.value.key == "model.rope_scaling"


def test_every_distinct_rank_of_405b_on_16384_gpus_is_predicted_in_a_second() -> None:
    run = make(model="llama3-405b", **sized(16384))
    began = time.process_time()
    prediction = predict(run)
    assert time.process_time() - began < 1.0
    assert len(prediction.ranks) == 16384
