"""torchtitan's pipelines: sums that must hold for any stages, what FSDP gathers under a schedule, what is refused."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from train_ledger.predict import predict
from train_ledger.predict.distinct import predict_distinct, rank_classes
from train_ledger.predict.frameworks import torchtitan
from train_ledger.predict.frameworks.torchtitan_schedule import order
from train_ledger.predict.frameworks.torchtitan_stages import stages
from train_ledger.predict.owner import slices
from train_ledger.spec.config import load_run
from train_ledger.spec.errors import ConfigError
from train_ledger.spec.io import schema
from train_ledger.spec.run import Run

CONFIG = Path(__file__).parents[2] / "config"


@pytest.fixture
def pp2() -> Run:
    """Two stages of the 1B shape, eight micro-batches."""
    return load_run(CONFIG / "runs" / "torchtitan-pp2.yaml", config_dir=CONFIG)


def pipeline(run: Run, ranks: int, shard: int = 1, tensor: int = 1, virtual: int = 1, **settings: Any) -> Run:
    """`run` on another mesh, eight micro-batches a step."""
    return replace(
        run,
        world_size=ranks * shard * tensor,
        global_batch=8 * run.micro_batch * shard,
        parallel=replace(
            run.parallel,
            tensor_parallel=tensor,
            sequence_parallel=tensor > 1,
            pipeline_parallel=ranks,
            virtual_pipeline_parallel=virtual,
            data_parallel=shard,
            data_parallel_shard=shard,
        ),
        settings={**run.settings, **settings},
    )


def calls(run: Run, rank: int, op: str, step: str = "steady") -> Counter[str]:
    """Calls of a rank by component."""
    out: Counter[str] = Counter()
    for call in predict(run, [rank], step).ranks[0].collectives:
        if call.op == op:
            out[call.component] += call.count
    return out


def test_two_stages_of_the_paper_s_shape(pp2: Run) -> None:
    """The embedding and the head count as a layer each, so that 16 layers fall eight and eight; each rank keeps eight
    received tensors of a micro-batch.
    """
    assert [(len(s.layers), s.embedding, s.end) for s in stages(pp2)] == [(8, True, False), (8, False, True)]
    first, last = predict(pp2).ranks
    m = pp2.model
    norms = m.hidden_size
    assert first.coords == {"pp": 0, "dp_replicate": 0, "dp_shard": 0, "tp": 0}
    assert last.state_bytes - first.state_bytes == pytest.approx(16 * norms, abs=4 * m.vocab_size * m.hidden_size)
    kept = {c.name: c.bytes for c in first.containers}
    assert kept["received_grad"] == 8 * 2 * pp2.seq_length * m.hidden_size
    assert "received_activation" not in kept
    assert {c.name: c.bytes for c in last.containers}["received_activation"] == kept["received_grad"]


@pytest.mark.parametrize("seed", range(30))
def test_stages_make_the_whole(pp2: Run, seed: int) -> None:
    """Parameters of all ranks add up to the model; what one rank sends another receives, in the first step too."""
    draw = random.Random(seed)
    ranks, shard, tensor = draw.choice([2, 3, 4]), draw.choice([1, 2, 3]), draw.choice([1, 2])
    model = replace(
        pp2.model,
        num_layers=draw.randint(8, 12),
        hidden_size=draw.choice([32, 60]),
        ffn_hidden_size=draw.choice([76, 148]),
        vocab_size=522,
        tie_embeddings=False,
    )
    several = draw.random() < 0.5 and ranks < 4
    schedule = draw.choice(["Interleaved1F1B", "LoopedBFS"] if several else ["1F1B", "GPipe"])
    if ranks == 3 and schedule == "Interleaved1F1B":
        schedule = "LoopedBFS"  # eight micro-batches are no whole number of rounds of three
    run = pipeline(
        pp2,
        *(ranks, shard, tensor, 2 if several else 1),
        pipeline_parallel_schedule=schedule,
        chunked_loss=draw.random() < 0.5,
        fsdp_reshard_after_forward=draw.choice(["default", "always"]),
    )
    run = replace(run, model=model, seq_length=64)
    for step in ("steady", "first"):
        prediction = predict(run, step=step)
        norms = (2 * model.num_layers + 1) * model.hidden_size
        total = sum(c.numel for r in prediction.ranks for c in r.containers if c.name == "param")
        assert total == model.num_parameters + (tensor - 1) * norms
        moved: dict[str, Counter[tuple[str, int]]] = {"send": Counter(), "recv": Counter()}
        for rank in prediction.ranks:
            for call in rank.collectives:
                if call.op in moved:
                    moved[call.op][call.dtype, max(call.in_numel, call.out_numel)] += call.count
        assert moved["send"] == moved["recv"]
        assert len(moved["send"]) == (1 if step == "steady" else 5)
    held = [part for piece in slices(run) for part in piece.kept]
    assert sum(part.numel for part in held) == model.hidden_size * model.query_size
    assert len(rank_classes(run)) >= ranks
    distinct, classes = predict_distinct(run)
    every = {r.rank: r for r in predict(run).ranks}
    for ledger, same in zip(distinct.ranks, classes, strict=True):
        assert all(every[rank].collectives == ledger.collectives for rank in same)


def test_a_stage_is_gathered_once_a_step(pp2: Run) -> None:
    """By default stages stay whole until their gradients are reduced; the head's unit is gathered for the loss of each
    micro-batch and again for its backward, since a chunked loss reshards it.
    """
    run = pipeline(pp2, 2, shard=2)
    assert calls(run, 0, "all_gather") == {"FSDP tok_embeddings": 1, "FSDP layers": 8}
    assert calls(run, 2, "all_gather") == {"FSDP layers": 8, "FSDP last": 1 + 8 + 8}
    assert calls(run, 2, "reduce_scatter") == {"FSDP layers": 8, "FSDP last": 8 + 1}
    whole = pipeline(pp2, 2, shard=2, chunked_loss=False)
    assert calls(whole, 2, "all_gather") == {"FSDP layers": 8, "FSDP last": 1}
    assert calls(whole, 2, "reduce_scatter") == {"FSDP layers": 8, "FSDP last": 1}


def test_resharding_follows_the_order_of_the_schedule(pp2: Run) -> None:
    """Under `always` a forward leaves its unit sharded and a backward whole: 1F1B gathers for all but the forwards
    that follow a backward, GPipe for each forward and the first backward.
    """
    one = pipeline(pp2, 2, shard=2, fsdp_reshard_after_forward="always", chunked_loss=False)
    gpipe = replace(one, settings={**one.settings, "pipeline_parallel_schedule": "GPipe"})
    assert calls(one, 0, "all_gather")["FSDP layers"] == 8 * (2 + 7)
    assert calls(one, 2, "all_gather")["FSDP layers"] == 8 * (1 + 8)
    assert calls(gpipe, 0, "all_gather")["FSDP layers"] == calls(gpipe, 2, "all_gather")["FSDP layers"] == 8 * (8 + 1)


def test_the_norm_s_gradient_keeps_the_head_s_buffer(pp2: Run) -> None:
    """In 1F1B the norm's first gradient is reduced with the head's second one, and stays a view of their buffer; in
    GPipe every backward is later.
    """
    extra = {}
    for schedule in ("1F1B", "GPipe"):
        run = pipeline(pp2, 2, pipeline_parallel_schedule=schedule)
        grad = next(c for c in predict(run, [1]).ranks[0].containers if c.name == "grad")
        extra[schedule] = grad.pad_numel
    assert extra == {"1F1B": pp2.model.vocab_size * pp2.model.hidden_size, "GPipe": 0}


def test_orders_of_schedules() -> None:
    """As drawn in the papers: the last rank alternates, the first runs ahead; at most three stages are whole."""
    kinds = [a.kind[0] for a in order("1F1B", 4, 0, 1, 6)]
    assert "".join(kinds) == "ffffbfbfbbbbr"
    assert "".join(a.kind[0] for a in order("1F1B", 4, 3, 1, 6)) == "fb" * 6 + "r"
    assert "".join(a.kind[0] for a in order("GPipe", 4, 1, 1, 3)) == "fffbbbr"
    for schedule in ("Interleaved1F1B", "LoopedBFS"):
        actions = order(schedule, 2, 0, 5, 4)
        whole: set[int] = set()
        for action in actions:
            if action.kind == "unshard":
                whole.add(action.stage)
            elif action.kind == "reshard":
                whole.remove(action.stage)
            else:
                assert action.stage in whole
            assert len(whole) <= 3
        assert not whole
        assert Counter(a.kind for a in actions if a.kind in ("forward", "backward", "reduce")) == {
            "forward": 20,
            "backward": 20,
            "reduce": 5,
        }


@pytest.mark.parametrize(
    ("changes", "key", "why"),
    [
        ({"model": {"tie_embeddings": True}}, "model.tie_embeddings", "Weight tying"),
        ({"settings": {"spmd_backend": "full_dtensor"}}, "torchtitan.spmd_backend", "between pipeline stages"),
        ({"settings": {"pipeline_parallel_schedule": "ZBVZeroBubble"}}, "torchtitan.pipeline_parallel_schedule", "ZBV"),
        ({"settings": {"local_batch_size": 3}}, "torchtitan.local_batch_size", "multiple of local batch size"),
        ({"settings": {"local_batch_size": 1}}, "torchtitan.local_batch_size", "Number of microbatches (1)"),
        ({"run": {"global_batch": 1}}, "global_batch", "Number of microbatches (1)"),
        ({"run": {"micro_batch": 2}, "settings": {"local_batch_size": 1}}, "torchtitan.local_batch_size", "evenly"),
        (
            {"settings": {"pipeline_parallel_layers_per_stage": 5}},
            "torchtitan.pipeline_parallel_layers_per_stage",
            "exactly 1 stage per rank",
        ),
        (
            {"settings": {"pipeline_parallel_layers_per_stage": 7}},
            "torchtitan.pipeline_parallel_layers_per_stage",
            "must be divisible",
        ),
        (
            {"settings": {"pipeline_parallel_first_stage_less_layers": 60}},
            "torchtitan.pipeline_parallel_first_stage_less_layers",
            "input_weight (60) exceeds",
        ),
        (
            {"settings": {"pipeline_parallel_last_stage_less_layers": 60}},
            "torchtitan.pipeline_parallel_last_stage_less_layers",
            "output_weight (60) exceeds",
        ),
        (
            {"settings": {"pipeline_parallel_schedule": "Interleaved1F1B"}},
            "parallel.virtual_pipeline_parallel",
            "makes 2 stages a rank",
        ),
        ({"parallel": {"virtual_pipeline_parallel": 2}}, "parallel.virtual_pipeline_parallel", "makes 1 stages a rank"),
        (
            {"settings": {"module_fqns_per_model_part": [["tok_embeddings", "layers.0"], ["norm", "lm_head"]]}},
            "torchtitan.module_fqns_per_model_part",
            "'layers.1' is missing",
        ),
        (
            {"settings": {"module_fqns_per_model_part": [["tok_embedding"], ["norm", "lm_head"]]}},
            "torchtitan.module_fqns_per_model_part",
            "'tok_embedding' is no module",
        ),
    ],
)
def test_refused(pp2: Run, changes: dict[str, dict[str, Any]], key: str, why: str) -> None:
    """By key, with torchtitan's reason or that it is not modelled."""
    run = replace(
        pp2,
        model=replace(pp2.model, **changes.get("model", {})),
        parallel=replace(pp2.parallel, **changes.get("parallel", {})),
        settings={**pp2.settings, **changes.get("settings", {})},
        **changes.get("run", {}),
    )
    with pytest.raises(ConfigError) as refusal:
        torchtitan.check(run)
    assert refusal.value.key == key
    assert why in refusal.value.message


def test_norm_and_head_apart_and_stages_without_norms_are_refused(pp2: Run) -> None:
    """The one is not modelled, the other torchtitan's own limit: a group of parameters that a stage has none of."""
    layers = [f"layers.{i}" for i in range(pp2.model.num_layers)]
    apart = {"module_fqns_per_model_part": [["tok_embeddings", *layers, "norm"], ["lm_head"]]}
    bare = {"module_fqns_per_model_part": [["tok_embeddings"], [*layers, "norm", "lm_head"]]}
    with pytest.raises(ConfigError, match="different stages"):
        torchtitan.check(replace(pp2, settings={**pp2.settings, **apart}))
    run = replace(pp2, settings={**pp2.settings, **bare})
    torchtitan.check(run)
    with pytest.raises(ConfigError, match="matched no parameters") as refusal:
        torchtitan.check(replace(run, optimizer=replace(run.optimizer, decay_norms=False)))
    assert refusal.value.key == "optimizer.decay_norms"


def test_a_loss_of_one_chunk_is_refused_where_gradients_of_two_types_meet(pp2: Run) -> None:
    """The head's gradient is bf16 then, and the norm's, which waited, fp32: FSDP2 wants one type."""
    one = replace(pp2, settings={**pp2.settings, "num_chunks": 1})
    with pytest.raises(ConfigError, match="uniform gradient dtype") as refusal:
        torchtitan.check(one)
    assert refusal.value.key == "torchtitan.num_chunks"
    for fine in (
        {"mixed_precision_param": "float32"},
        {"pipeline_parallel_schedule": "GPipe"},
        {"chunked_loss": False},
    ):
        torchtitan.check(replace(one, settings={**one.settings, **fine}))


def test_several_sequences_under_sequence_parallelism_are_refused(pp2: Run) -> None:
    """They do not lie in memory as stages tell each other."""
    run = replace(pipeline(pp2, 2, tensor=2), micro_batch=2, global_batch=16)
    with pytest.raises(ConfigError, match="one after the other") as refusal:
        torchtitan.check(run)
    assert refusal.value.key == "micro_batch"
    torchtitan.check(replace(run, micro_batch=1))
    torchtitan.check(replace(run, parallel=replace(run.parallel, sequence_parallel=False)))


def test_dtensors_split_no_sequence_on_a_stage_without_layers(pp2: Run) -> None:
    """torchtitan looks at the first layer of each stage; under spmd_types it need not."""
    run = pipeline(pp2, 2, virtual=2, pipeline_parallel_schedule="Interleaved1F1B", spmd_backend="partial_dtensor")
    parallel = replace(run.parallel, context_parallel=2)
    run = replace(run, world_size=4, parallel=parallel, model=replace(run.model, num_layers=4))
    with pytest.raises(ConfigError, match="stage without layers, here 3") as refusal:
        torchtitan.check(run)
    assert refusal.value.key == "torchtitan.spmd_backend"
    torchtitan.check(replace(run, settings={**run.settings, "spmd_backend": "spmd_types"}))


def test_without_stages_there_is_no_local_batch(pp2: Run) -> None:
    """A rank takes a micro-batch at once then."""
    run = replace(pipeline(pp2, 1), settings={**pp2.settings, "local_batch_size": 4})
    with pytest.raises(ConfigError, match="local_batch_size"):
        torchtitan.check(run)


def test_a_run_without_stages_is_the_run_that_it_was(pp2: Run) -> None:
    """Keys of pipelines are no part of it, so that what was measured before they were known is still of that run."""
    plain = load_run(CONFIG / "runs" / "torchtitan-fsdp2.yaml", config_dir=CONFIG)
    keys = {k for k, v in schema("torchtitan")["properties"].items() if "x-needs" in v}
    assert len(keys) == 6
    assert not keys & plain.settings.keys()
    assert keys <= pp2.settings.keys()
    given = load_run(
        CONFIG / "runs" / "torchtitan-fsdp2.yaml", config_dir=CONFIG, overrides={"torchtitan": {"local_batch_size": 2}}
    )
    with pytest.raises(ConfigError, match="is for pipelines"):
        torchtitan.check(given)
