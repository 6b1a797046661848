"""Megatron Core's prediction: the figures that were measured at full size, and properties that hold at every size."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from train_ledger.predict import predict
from train_ledger.predict.frameworks import megatron
from train_ledger.predict.frameworks.megatron_layout import buffer, chunk_params, owned
from train_ledger.predict.frameworks.megatron_plan import chunks, plan
from train_ledger.spec.config import load_run, model_shape, resolve_run
from train_ledger.spec.model import ModelShape
from train_ledger.spec.run import Run

ROOT = Path(__file__).parents[2]
PAPER_RUN = ROOT / "config" / "runs" / "megatron-tp2-pp2-dp2.yaml"
TABLE: list[dict[str, Any]] = yaml.safe_load((ROOT / "tests/data/megatron_sweep.yaml").read_text(encoding="utf-8"))


def table_runs() -> list[Run]:
    """The configurations that the sweep launches."""
    return [
        resolve_run(e["name"], e["run"], "sweep", "config", model=model_shape(e["name"], e["model"], "sweep"))
        for e in TABLE
    ]


@pytest.fixture(scope="module")
def paper() -> Run:
    """Llama 3.2 1B, tensor 2 x pipeline 2 x data 2, sequence 8192."""
    return load_run(PAPER_RUN)


def counts(run: Run, rank: int) -> Counter[str]:
    """Calls of one step by op."""
    out: Counter[str] = Counter()
    for c in megatron.rank_ledger(run, rank).collectives:
        out[c.op] += c.count
    return out


def test_state_bytes_of_the_paper_run(paper: Run) -> None:
    """As measured on a GPU: first stage, last stage, every rank of each."""
    state = [ledger.state_bytes for ledger in predict(paper).ranks]
    assert state == [4_495_638_528] * 4 + [4_495_663_104] * 4


def test_calls_of_the_paper_run(paper: Run) -> None:
    """Six gathers and four scatters a layer, not four and four: the weight gradient gathers its input again."""
    assert counts(paper, 0) == {"all_gather": 398, "reduce_scatter": 270, "all_reduce": 2, "send": 8, "recv": 8}
    assert counts(paper, 7) == {"all_gather": 401, "reduce_scatter": 265, "all_reduce": 26, "send": 8, "recv": 8}


def test_buckets_of_the_paper_run(paper: Run) -> None:
    """The first stage reduces in buckets, the last in one piece."""
    rule = plan(paper)
    sizes = [[e - s for chunk in chunks(rule, stage) for s, e in buffer(rule, chunk).buckets] for stage in (0, 1)]
    assert sizes == [[55578624, 44048384, 47190016, 44048384, 47190016, 136581120], [374638592]]


def test_other_containers_of_the_paper_run(paper: Run) -> None:
    """Scratch 2 B x sequence x batch x hidden; the last stage still holds the tensor it received and its gradient."""
    first, last = ({c.name: c.bytes for c in megatron.rank_ledger(paper, r).containers} for r in (0, 4))
    assert first["global_memory_buffer"] == last["global_memory_buffer"] == 33_554_432
    assert "received_activation" not in first
    assert last["received_activation"] == 2 * 16_777_216
    assert first["rope_cache"] == 2_097_152
    assert first["rope_frequencies"] == 128


def test_calls_at_one_rank_of_everything_else(paper: Run) -> None:
    """TP 2, eight micro-batches, no pipeline, no data parallelism: what NCCL's kernels counted on two GPUs."""
    run = load_run(
        PAPER_RUN,
        overrides={
            "world_size": 2,
            "global_batch": 8,
            "parallel": {"pipeline_parallel": 1, "data_parallel": 1},
        },
    )
    calls = Counter[tuple[str, str]]()
    for c in megatron.rank_ledger(run, 0).collectives:
        calls[c.op, c.group] += c.count
    assert calls["all_gather", "tp"] == 792
    assert calls["reduce_scatter", "tp"] == 528
    assert calls["all_reduce", "tp"] + calls["all_reduce", "intra_dist_opt"] == 26
    assert calls["all_gather", "dp_cp"] == calls["reduce_scatter", "dp_cp"] == 12


@pytest.mark.parametrize("run", table_runs(), ids=lambda r: r.name)
def test_shards_add_up(run: Run) -> None:
    """Every element of every parameter has one fp32 master among the ranks that share the optimizer's state."""
    rule = plan(run)
    for stage in range(rule.pp):
        for chunk in chunks(rule, stage):
            layout, numel = buffer(rule, chunk), sum(p.numel for p in chunk_params(rule, chunk))
            assert layout.real_numel == numel
            shards = range(rule.shards) if rule.distributed_optimizer else range(1)
            assert sum(n * count for s in shards for n, count in owned(rule, chunk, s).items()) == numel
            if rule.distributed_optimizer:
                assert all(edge % rule.shards == 0 for bucket in layout.buckets for edge in bucket)
            assert layout.buckets[0][0] == 0
            assert all(a[1] == b[0] for a, b in itertools.pairwise(layout.buckets))


@pytest.mark.parametrize("run", table_runs(), ids=lambda r: r.name)
def test_stages_hold_the_model_once(run: Run) -> None:
    """Over all stages and tensor-parallel ranks: the model's parameters, norms once a rank, a tied head twice."""
    rule, shape = plan(run), run.model
    held = [p for stage in range(rule.pp) for chunk in chunks(rule, stage) for p in chunk_params(rule, chunk)]
    assert sum(chunk.layers for stage in range(rule.pp) for chunk in chunks(rule, stage)) == shape.num_layers
    split = sum(p.numel for p in held if is_split(p.name)) * rule.tp
    whole = sum(p.numel for p in held if not is_split(p.name))
    padding = (rule.vocab - shape.vocab_size) * shape.hidden_size
    embeddings = sum(p.name in {"embedding.word_embeddings.weight", "output_layer.weight"} for p in held)
    twice = (embeddings - (1 if shape.tie_embeddings else 2)) * shape.vocab_size * shape.hidden_size
    assert split + whole == shape.num_parameters + embeddings * padding + twice


def is_split(name: str) -> bool:
    """Whether tensor parallelism cuts this parameter."""
    if name.endswith(("linear_proj.bias", "linear_fc2.bias")):
        return False
    return any(part in name for part in ("linear_", "word_embeddings", "output_layer"))


@pytest.mark.parametrize("run", table_runs(), ids=lambda r: r.name)
def test_every_call_has_its_counterpart(run: Run) -> None:
    """All ranks of a group make the same collectives; what one stage sends, its neighbour receives."""
    ledgers = [megatron.rank_ledger(run, r) for r in range(run.world_size)]
    grouped = [g for g in megatron.groups(run) if g.name in {"tp", "dp_cp", "intra_dist_opt", "mp", "embd"}]
    for group in grouped:
        calls = {frozenset(collectives_on(ledgers[r].collectives, group.name).items()) for r in group.ranks}
        assert len(calls) == 1, group
    sent, received = (
        sum(c.count for ledger in ledgers for c in ledger.collectives if c.op == op) for op in ("send", "recv")
    )
    assert sent == received


def collectives_on(rows: Iterable[Any], group: str) -> Counter[tuple[Any, ...]]:
    """Calls on a group by op, type and sizes."""
    out: Counter[tuple[Any, ...]] = Counter()
    for c in rows:
        if c.group == group and c.op not in {"send", "recv"}:
            out[c.op, c.dtype, c.in_numel, c.out_numel] += c.count
    return out


@pytest.mark.parametrize("run", table_runs(), ids=lambda r: r.name)
def test_ranks_of_a_class_are_equal(run: Run) -> None:
    """Containers and calls of ranks in one class do not differ."""
    seen: dict[Any, Any] = {}
    for rank in range(run.world_size):
        ledger = megatron.rank_ledger(run, rank)
        facts = (ledger.containers, ledger.collectives)
        assert seen.setdefault(megatron.rank_class(run, rank), facts) == facts


def test_groups_of_eight_ranks(paper: Run) -> None:
    """Order tp-cp-ep-dp-pp: tensor parallel neighbours, pipeline across halves."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for g in megatron.groups(paper):
        found.setdefault(g.name, []).append(g.ranks)
    assert found["world"] == found["intra_dist_opt"] == [tuple(range(8))]
    assert found["tp"] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert found["dp"] == found["dp_cp"] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert found["pp"] == found["embd"] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert found["pos_embd"] == [(0,), (1,), (2,), (3,)]
    assert found["mp"] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert found["cp"] == [(r,) for r in range(8)]


def test_405b_on_16384_gpus() -> None:
    """Few kinds of ranks, and their shards hold the model: 12 B a parameter over all."""
    run = load_run(
        PAPER_RUN,
        overrides={
            "model": "llama3-405b",
            "world_size": 16384,
            "global_batch": 2048,
            "parallel": {"tensor_parallel": 8, "pipeline_parallel": 16, "data_parallel": 128},
            "megatron": {"num_layers_in_first_pipeline_stage": 7, "num_layers_in_last_pipeline_stage": 7},
        },
    )
    megatron.check(run)
    kinds: dict[Any, list[int]] = {}
    for rank in range(run.world_size):
        kinds.setdefault(megatron.rank_class(run, rank), []).append(rank)
    assert len(kinds) < 100
    masters = sum(
        c.numel * len(ranks)
        for ranks in kinds.values()
        for c in megatron.rank_ledger(run, ranks[0]).containers
        if c.name == "main_param"
    )
    norms = (2 * 126 + 1) * 16384  # on every tensor-parallel rank
    padding = 2 * (129024 - 128256) * 16384
    assert masters == run.model.num_parameters + 7 * norms + padding


def test_blocks_are_the_bytes() -> None:
    """Single allocations of every container add up to it."""
    for run in table_runs()[::5]:
        for rank in (0, run.world_size - 1):
            for c in megatron.rank_ledger(run, rank).containers:
                assert sum(size * count for size, count in c.blocks) == c.bytes, c


def test_a_step_without_scratch_or_rope() -> None:
    """Without sequence parallelism nothing is gathered, and learned positions need no cache."""
    shape = model_shape(
        "tiny",
        {
            "num_layers": 1,
            "hidden_size": 8,
            "num_attention_heads": 2,
            "ffn_hidden_size": 8,
            "vocab_size": 8,
            "seq_length": 4,
            "position_embedding": "learned",
        },
        "tiny",
    )
    assert isinstance(shape, ModelShape)
    data = {"framework": "megatron", "world_size": 1, "global_batch": 1}
    run = resolve_run("tiny", data, "tiny", "config", model=shape)
    names = {c.name for c in megatron.rank_ledger(run, 0).containers}
    assert not names & {"global_memory_buffer", "rope_cache", "received_activation", "main_grad"}
