"""torchtitan's prediction: published figures, sums that must hold for any layout, and what is refused."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from train_ledger.predict import predict
from train_ledger.predict.distinct import rank_classes
from train_ledger.predict.frameworks import torchtitan
from train_ledger.predict.frameworks.torchtitan_dtensor import LINKS, choice
from train_ledger.spec.config import load_model, load_run
from train_ledger.spec.errors import ConfigError
from train_ledger.spec.run import Parallel, Run

CONFIG = Path(__file__).parents[2] / "config"


@pytest.fixture
def paper() -> Run:
    """The paper's run: 1B, sequence 8192, FSDP 4 x TP 2."""
    return load_run(CONFIG / "runs" / "torchtitan-fsdp4-tp2.yaml", config_dir=CONFIG)


def mesh(run: Run, replicate: int, shard: int, tensor: int, **settings: Any) -> Run:
    """`run` on another mesh."""
    return replace(
        run,
        world_size=replicate * shard * tensor,
        global_batch=run.micro_batch * replicate * shard,
        parallel=Parallel(
            tensor_parallel=tensor,
            sequence_parallel=tensor > 1,
            data_parallel=replicate * shard,
            data_parallel_replicate=replicate,
            data_parallel_shard=shard,
        ),
        settings={**run.settings, **settings},
    )


def counts(run: Run, step: str = "steady") -> Counter[str]:
    """Calls of rank 0 by operation."""
    out: Counter[str] = Counter()
    for call in predict(run, [0], step).ranks[0].collectives:
        out[call.op] += call.count
    return out


def test_paper_memory(paper: Run) -> None:
    """749,275,136 B each of parameters, gradients and moments on every rank; RoPE caches and step counters beside
    them.
    """
    for rank in predict(paper).ranks:
        kept = {(c.name, c.owner): c for c in rank.containers}
        for name, owner in (
            ("param", "framework"),
            ("grad", "framework"),
            ("exp_avg", "optimizer"),
            ("exp_avg_sq", "optimizer"),
        ):
            assert kept[name, owner].bytes == 749_275_136
        assert rank.state_bytes == 2_997_100_544
        assert kept["rope_cache", "model"].bytes == 33_554_432
        assert kept["step", "optimizer"].bytes == 4 * 115


def test_paper_calls(paper: Run) -> None:
    """315 calls in a steady step; the first gathers the last unit once less and ends with a barrier."""
    assert counts(paper) == {"all_gather": 135, "reduce_scatter": 117, "all_reduce": 63}
    assert counts(paper, "first") == {"all_gather": 134, "reduce_scatter": 117, "all_reduce": 63, "barrier": 1}
    assert counts(replace(paper, settings={**paper.settings, "log_freq": 10})) == {
        "all_gather": 135,
        "reduce_scatter": 117,
        "all_reduce": 60,
    }


def test_two_gpus_as_nccl_recorded(paper: Run) -> None:
    """FSDP over two: NCCL ran 37 all-gathers, 19 reduce-scatters, 3 fp32 and 2 integer all-reduces."""
    run = mesh(paper, 1, 2, 1)
    assert counts(run) == {"all_gather": 37, "reduce_scatter": 19, "all_reduce": 5}
    reduced = Counter[str]()
    for call in predict(run, [0]).ranks[0].collectives:
        if call.op == "all_reduce":
            reduced[call.dtype] += call.count
    assert reduced == {"float32": 3, "int64": 2}


@pytest.mark.parametrize("seed", range(40))
def test_shards_make_the_whole(paper: Run, seed: int) -> None:
    """Over one replica the owned parts add up to the model, norms once a tensor-parallel rank; sizes of calls fit."""
    draw = random.Random(seed)
    replicate, shard, tensor = draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 5, 7]), draw.choice([1, 2, 4])
    heads = 4 * draw.randint(1, 3)
    model = replace(
        paper.model,
        num_layers=draw.randint(1, 4),
        num_attention_heads=heads,
        num_query_groups=4,
        head_dim=2 * draw.randint(3, 9),
        hidden_size=draw.randint(30, 99),
        ffn_hidden_size=4 * draw.randint(9, 40),
        vocab_size=draw.randint(9, 600),
        tie_embeddings=draw.random() < 0.4,
    )
    backend = "full_dtensor" if model.vocab_size % tensor else "spmd_types"
    run = replace(mesh(paper, replicate, shard, tensor, spmd_backend=backend), model=model, seq_length=64)
    ranks = predict(run).ranks
    norms = (2 * model.num_layers + 1) * model.hidden_size
    for name in ("param", "exp_avg"):
        total = sum(c.numel for r in ranks for c in r.containers if c.name == name)
        assert total == replicate * (model.num_parameters + (tensor - 1) * norms)
    for rank in ranks:
        for c in rank.containers:
            assert sum(size * n for size, n in c.blocks) == c.bytes, c.name
        for call in rank.collectives:
            n = {"tp": tensor, "dp_shard": shard}.get(call.group, 1)
            if call.op == "all_gather":
                assert call.out_numel == n * call.in_numel
            elif call.op == "reduce_scatter":
                assert call.in_numel == n * call.out_numel


def test_classes_tell_ranks_apart(paper: Run) -> None:
    """Ranks of one class have equal containers and calls; ranks that differ in a size are of different classes."""
    run = mesh(paper, 2, 3, 2)
    run = replace(run, model=replace(load_model("laptop", CONFIG), ffn_hidden_size=146), seq_length=32)
    classes = rank_classes(run)
    ledgers = {r.rank: (r.containers, r.collectives) for r in predict(run).ranks}
    for ranks in classes:
        assert len({ledgers[r] for r in ranks}) == 1
    assert len(classes) > 1
    for one, other in itertools.combinations(classes, 2):
        assert ledgers[one[0]] != ledgers[other[0]]


def test_groups_partition_the_world(paper: Run) -> None:
    """Each name's groups hold every rank once; ranks stand together as on torchtitan's mesh."""
    run = mesh(paper, 2, 3, 2)
    by_name: dict[str, list[tuple[int, ...]]] = {}
    for group in torchtitan.groups(run):
        by_name.setdefault(group.name, []).append(group.ranks)
    assert set(by_name) == {"world", "batch", "loss", "dp", "dp_replicate", "dp_shard", "tp"}
    for ranks in by_name.values():
        assert sorted(r for group in ranks for r in group) == list(range(12))
    assert (0, 1) in by_name["tp"]
    assert (0, 2, 4) in by_name["dp_shard"]
    assert (0, 6) in by_name["dp_replicate"]


def test_405b_on_16384_gpus(paper: Run) -> None:
    """Few kinds of rank, and each is predicted as any other."""
    run = replace(mesh(paper, 1, 2048, 8), model=load_model("llama3-405b", CONFIG))
    classes = rank_classes(run)
    assert sum(map(len, classes)) == 16384
    assert len(classes) < 20
    ledgers = predict(run, [ranks[0] for ranks in classes]).ranks
    owned = sum(
        c.numel * len(ranks)
        for ranks, ledger in zip(classes, ledgers, strict=True)
        for c in ledger.containers
        if c.name == "param"
    )
    assert owned == run.model.num_parameters + 7 * (2 * 126 + 1) * 16384


def test_a_tie_is_gathered_twice(paper: Run) -> None:
    """FSDP2 sees two parameters, and where a shard is padded it keeps a second one; the real tie has neither."""
    tied = replace(paper.model, tie_embeddings=True, vocab_size=128254)
    run = replace(mesh(paper, 1, 4, 2), model=tied)
    last = predict(run, [7]).ranks[0]
    rows = -(-64127 // 4)
    copies = [c for c in last.containers if c.name == "tied_param_copy"]
    assert [c.numel for c in copies] == [rows * 2048]
    gathered = {c.in_numel for c in last.collectives if c.component == "FSDP last" and c.op == "all_gather"}
    assert gathered == {2 * rows * 2048 + 512}
    real = predict(replace(mesh(paper, 1, 4, 1, spmd_backend="partial_dtensor"), model=tied), [3]).ranks[0]
    assert not [c for c in real.containers if c.name == "tied_param_copy"]


def test_norms_of_queries_and_keys(paper: Run) -> None:
    """Qwen 3: two more parameters a layer, their gradients summed over tensor parallel, and a RoPE cache twice as
    wide.
    """
    run = replace(paper, model=replace(paper.model, qk_norm=True))
    plain, normed = predict(paper, [0]).ranks[0], predict(run, [0]).ranks[0]
    size = {
        name: [sum(c.bytes for c in r.containers if c.name == name) for r in (plain, normed)]
        for name in ("step", "rope_cache")
    }
    assert size == {"step": [460, 460 + 4 * 32], "rope_cache": [33_554_432, 67_108_864]}
    more = [c for c in normed.collectives if c.component == "norm gradient" and c.in_numel == 64]
    assert [(c.op, c.group, c.dtype, c.count) for c in more] == [("all_reduce", "tp", "bfloat16", 32)]


@pytest.mark.parametrize(
    ("changes", "key", "why"),
    [
        ({"model": {"normalization": "layernorm"}}, "model.normalization", "layernorm"),
        ({"model": {"position_embedding": "learned"}}, "model.position_embedding", "learned"),
        ({"model": {"gated_mlp": False}}, "model.gated_mlp", "gate"),
        ({"model": {"qkv_bias": True}}, "model.qkv_bias", "bias"),
        ({"model": {"rope_scaling": {"rope_type": "yarn"}}}, "model.rope_scaling", "yarn"),
        ({"model": {"rope_scaling": {"rope_type": "llama3"}}}, "model.rope_scaling", "factor"),
        ({"model": {"rope_scaling": {"rope_type": "llama3", "factor": "8"}}}, "model.rope_scaling", "number above 0"),
        ({"model": {"rope_scaling": {"rope_type": "llama3"}, "qk_norm": True}}, "model.rope_scaling", "Qwen 3"),
        ({"model": {"num_query_groups": 1}}, "parallel.tensor_parallel", "must divide n_kv_heads (1)"),
        ({"model": {"ffn_hidden_size": 8191}}, "parallel.tensor_parallel", "unequal shards of the MLP"),
        ({"model": {"vocab_size": 128255}}, "parallel.tensor_parallel", "vocab"),
        ({"settings": {"num_chunks": 7}}, "torchtitan.num_chunks", "divisible by num_chunks"),
        (
            {"parallel": {"context_parallel": 2}, "settings": {"spmd_backend": "full_dtensor"}},
            "torchtitan.spmd_backend",
            "gradients of keys and values",
        ),
        ({"parallel": {"context_parallel": 3}}, "seq_length", "(8192) must be divisible by 12"),
        (
            {"parallel": {"context_parallel": 128}},
            "seq_length",
            "Q_LEN 8192 is not divisible by CP mesh world size 128",
        ),
        (
            {"parallel": {"context_parallel": 32}, "settings": {"num_chunks": 512}},
            "torchtitan.num_chunks",
            "must be divisible by num_chunks: 256 by 512",
        ),
        (
            {"parallel": {"context_parallel": 2, "data_parallel_shard": 1024}},
            "parallel.data_parallel_shard",
            "1024 x context_parallel 2 x tensor_parallel 2 is more than the 3072 rows of wqkv",
        ),
        ({"parallel": {"data_parallel_shard": 9999}}, "parallel.data_parallel_shard", "rows of wqkv"),
    ],
)
def test_refused(paper: Run, changes: dict[str, dict[str, Any]], key: str, why: str) -> None:
    """By key, with torchtitan's reason or that it is not modelled."""
    run = replace(
        paper,
        model=replace(paper.model, **changes.get("model", {})),
        parallel=replace(paper.parallel, **changes.get("parallel", {})),
        settings={**paper.settings, **changes.get("settings", {})},
    )
    with pytest.raises(ConfigError) as refusal:
        torchtitan.check(run)
    assert refusal.value.key == key
    assert why in refusal.value.message


def split(run: Run, context: int) -> Run:
    """`run` with each of its sequences on `context` ranks."""
    parallel = replace(run.parallel, context_parallel=context)
    return replace(run, world_size=run.world_size * context, parallel=parallel)


def test_a_split_sequence_shards_parameters_too(paper: Run) -> None:
    """Two ranks that split a sequence keep of the model what two that split the data keep, in the same groups."""
    apart, together = mesh(paper, 2, 4, 2), split(mesh(paper, 2, 2, 2), 2)
    for one, other in zip(predict(apart).ranks, predict(together).ranks, strict=True):
        assert one.containers == other.containers
        assert other.coords == {**one.coords, "dp_shard": one.coords["dp_shard"] // 2, "cp": one.rank // 2 % 2}
    by_name: dict[str, set[tuple[int, ...]]] = {}
    for group in torchtitan.groups(together):
        by_name.setdefault(group.name, set()).add(group.ranks)
    assert set(by_name) == {"world", "batch", "loss", "dp", "dp_replicate", "dp_shard", "dp_shard_cp", "cp", "tp"}
    assert (0, 2) in by_name["cp"]
    assert (0, 4) in by_name["dp_shard"]
    assert (0, 2, 4, 6) in by_name["dp_shard_cp"]
    assert (0, 4, 8, 12) in by_name["batch"]
    assert (0, 2, 4, 6, 8, 10, 12, 14) in by_name["loss"]
    partial = replace(together, settings={**together.settings, "spmd_backend": "partial_dtensor"})
    names = {group.name for group in torchtitan.groups(partial)}
    assert names == {"world", "batch", "loss", "dp_replicate", "fsdp", "cp", "tp"}


def test_keys_and_values_are_gathered(paper: Run) -> None:
    """Twice a layer forward, again where activations are recomputed; their gradients are scattered twice a layer."""
    run = split(mesh(paper, 1, 2, 2), 4)
    part = run.micro_batch * run.seq_length // 4 * run.model.kv_size // 2
    layers = run.model.num_layers

    def sent(run: Run) -> Counter[tuple[str, str, int, int]]:
        out: Counter[tuple[str, str, int, int]] = Counter()
        for call in predict(run, [5]).ranks[0].collectives:
            if call.group == "cp":
                assert call.dtype == "bfloat16"
                out[call.op, call.phase, call.in_numel, call.out_numel] += call.count
        return out

    gathered, scattered = (part, 4 * part), (4 * part, part)
    assert sent(run) == {
        ("all_gather", "forward", *gathered): 2 * layers,
        ("all_gather", "backward", *gathered): 2 * layers,
        ("reduce_scatter", "backward", *scattered): 2 * layers,
    }
    kept = replace(run, settings={**run.settings, "activation_checkpoint": "none"})
    assert ("all_gather", "backward", *gathered) not in sent(kept)
    # The batch is shared out over data-parallel ranks alone, the loss over those that split sequences too.
    alone = split(mesh(paper, 1, 1, 1), 2)
    assert {c.group for c in predict(alone, [0]).ranks[0].collectives} == {"dp_shard_cp", "cp", "loss"}


def activations(run: Run) -> Counter[str]:
    """Calls on the tensor-parallel group beside loss and norms, by operation and component."""
    out: Counter[str] = Counter()
    for call in predict(run, [0]).ranks[0].collectives:
        if call.group == "tp" and call.component in ("activation", "recompute", "weight", "weight gradient"):
            out[f"{call.op} {call.component}"] += call.count
    return out


def test_without_sequence_parallel(paper: Run) -> None:
    """spmd_types sums activations both ways."""
    run = replace(paper, parallel=replace(paper.parallel, sequence_parallel=False))
    layers = paper.model.num_layers
    assert activations(run) == {"all_reduce activation": 2 * (2 * layers + 1), "all_reduce recompute": 2 * layers}


def test_dtensor_decides_by_cost(paper: Run) -> None:
    """At the paper's size the weights are gathered in the backward, and w2's activation is not: the gradient is
    summed.
    """
    run = replace(
        paper,
        parallel=replace(paper.parallel, sequence_parallel=False),
        settings={**paper.settings, "spmd_backend": "partial_dtensor", "activation_checkpoint": "none"},
    )
    layers = paper.model.num_layers
    assert activations(run) == {
        "all_reduce activation": (2 * layers + 1) + 1 + layers,
        "all_gather activation": layers,
        "all_gather weight": 2 * layers,
        "reduce_scatter activation": 3 * layers,
        "reduce_scatter weight gradient": layers,
    }
    small, large = 1000, 10**9
    for link in LINKS:
        assert choice(small, small, 2, link) == "gather"
        assert choice(large, large, 2, link) == "gather"
        assert choice(large, 4 * large, 2, link) == "sum"
        assert choice(large, 4 * large, 8, link) == "exchange"
    eight = replace(run, world_size=32, parallel=replace(run.parallel, tensor_parallel=8))
    with pytest.raises(ConfigError, match="exchanges shards"):
        torchtitan.check(eight)
