"""Sequences that ranks split: torchtitan trains as one rank does, its weights go in and out, and what it cannot."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from ranks import on_ranks
from torchtitan_runs import on_one_rank

from train_ledger.launch.frameworks import torchtitan
from train_ledger.launch.frameworks.torchtitan_device import attend
from train_ledger.launch.session import Rank
from train_ledger.launch.weights import generate
from train_ledger.spec.model import canonical_tensors
from train_ledger.spec.run import Parallel, Run

Seen = tuple[list[tuple[float | None, float | None]], dict[str, np.ndarray]]

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Once, before anything forks."""
    torchtitan.warm_up()


@pytest.fixture(scope="module")
def single() -> Run:
    """The laptop comparison's shape with two layers on one rank in fp32, two micro-batches of 256 tokens."""
    return on_one_rank(2, {"mixed_precision_param": "float32"}, global_batch=2, seq_length=256)


def split(run: Run, pipeline: int = 1, replicate: int = 1, shard: int = 1, tensor: int = 1, **settings: Any) -> Run:
    """`run` on another mesh with two ranks a sequence."""
    parallel = Parallel(
        pipeline_parallel=pipeline,
        data_parallel=replicate * shard,
        data_parallel_replicate=replicate,
        data_parallel_shard=shard,
        context_parallel=2,
        tensor_parallel=tensor,
        sequence_parallel=tensor > 1,
    )
    world_size = pipeline * replicate * shard * 2 * tensor
    return replace(run, world_size=world_size, parallel=parallel, settings={**run.settings, **settings})


def session(run: Run, rank: int) -> torchtitan.TorchtitanSession:
    """A rank's session inside a process group that is there already."""
    return torchtitan.build(run, Rank(rank, rank, run.world_size, "cpu", torch.device("cpu"), lambda timeout: None))


def trained(run: Run) -> list[Seen]:
    """Losses and norms of each step, and the weights that each rank exports at the end."""

    def train(rank: int) -> Seen:
        here = session(run, rank)
        here.load_weights(generate(run.model, 7))
        seen = [(r.loss, r.grad_norm) for r in (here.step(step) for step in range(1, run.steps + 1))]
        return seen, {name: tensor.numpy() for name, tensor in here.export_weights().items()}

    return on_ranks(run.world_size, train)


@pytest.fixture(scope="module")
def alone(single: Run) -> Seen:
    """What one rank trains, by PyTorch's attention."""
    (seen,) = trained(single)
    return seen


@pytest.mark.parametrize(
    "mesh",
    [
        {},
        {"spmd_backend": "partial_dtensor"},
        pytest.param({"shard": 2}, marks=pytest.mark.sweep),
        pytest.param({"replicate": 2, "spmd_backend": "partial_dtensor"}, marks=pytest.mark.sweep),
        {"tensor": 2},
        {"pipeline": 2},
    ],
    ids=str,
)
def test_ranks_that_split_sequences_train_as_one_does(single: Run, alone: Seen, mesh: dict[str, Any]) -> None:
    """The same losses, norms and trained weights, as far as fp32 and Adam's division tell."""
    ranks = trained(split(single, **mesh))
    for (loss, norm), (wanted, wanted_norm) in zip(ranks[-1][0], alone[0], strict=True):
        assert loss == pytest.approx(wanted, rel=1e-6)
        assert norm == pytest.approx(wanted_norm, rel=1e-5)
    weights: dict[str, np.ndarray] = {}
    for _, held in ranks:
        assert not weights.keys() & held.keys()
        weights |= held
    assert weights.keys() == alone[1].keys()
    for name, value in weights.items():
        np.testing.assert_allclose(value, alone[1][name], rtol=0, atol=1e-5)


def test_plain_steps_tell_the_loss_of_their_own_tokens(single: Run) -> None:
    """The mean over ranks that share out data and sequences is the loss of the whole."""
    often = split(single, shard=2)
    rarely = replace(often, settings={**often.settings, "log_freq": 100})
    logged, plain = trained(often), trained(rarely)
    own = [seen[1][0] for seen, _ in plain]
    assert len(set(own)) == 4
    assert sum(own) / 4 == pytest.approx(logged[0][0][1][0], rel=1e-6)


def test_weights_in_and_out(single: Run) -> None:
    """What is loaded comes back bit for bit, from shards that are padded, over two kinds of ranks and replicas."""
    run = split(replace(single, global_batch=4), replicate=2, shard=2)

    def there_and_back(rank: int) -> dict[str, np.ndarray]:
        here = session(run, rank)
        here.load_weights(generate(run.model, 7))
        return {name: tensor.numpy() for name, tensor in here.export_weights().items()}

    first, *others = on_ranks(8, there_and_back)
    read = generate(run.model, 7)
    assert list(first) == [t.name for t in canonical_tensors(run.model)]
    assert all(np.array_equal(first[name], read(name).numpy()) for name in first)
    assert others == [{}] * 7


def test_full_dtensor_loses_the_gradients_of_keys_and_values(single: Run) -> None:
    """Why it is refused: rows of wqkv that make queries have a gradient, those of keys and values have none at all."""

    def gradients(run: Run) -> Any:
        def train(rank: int) -> list[float]:
            here = session(run, rank)
            here.load_weights(generate(run.model, 7))
            here.step(1)
            m = run.model
            gradient = here.parameters["layers.0.attention.qkv_linear.wqkv.weight"].grad
            heads = m.num_attention_heads // m.num_query_groups
            rows = gradient.full_tensor().view(m.num_query_groups, heads + 2, m.head_dim, m.hidden_size)
            return [float(part.norm()) for part in rows.split([heads, 1, 1], dim=1)]

        return on_ranks(2, train)[0]

    right = gradients(split(single))
    assert all(norm > 0 for norm in right)
    queries, keys, values = gradients(split(single, spmd_backend="full_dtensor"))
    assert queries > 0
    assert (keys, values) == (0, 0)


def test_torchtitan_s_own_refusals(single: Run) -> None:
    """Runs that were never checked end in torchtitan's words: a short sequence, a stage without layers."""

    def refused(run: Run) -> str:
        def ask(rank: int) -> str:
            try:
                session(run, rank).step(1)
            except Exception as e:  # a pipeline's other stage hears only that its peer has gone
                return str(e)
            return ""

        return str(on_ranks(run.world_size, ask)[-1])

    assert "must be divisible by 4" in refused(replace(split(single), seq_length=254))
    assert "Q_LEN 260 is not divisible by CP mesh world size 2 * BLOCK_SIZE 128" in refused(
        replace(split(single), seq_length=260)
    )
    bare = [["tok_embeddings", *(f"layers.{i}" for i in range(single.model.num_layers))], ["norm", "lm_head"]]
    run = split(single, pipeline=2, spmd_backend="partial_dtensor", module_fqns_per_model_part=bare)
    assert "list index out of range" in refused(run)


def test_the_substitute_on_a_cpu_is_flex_attention() -> None:
    """Forward of torch's own, which is all that it has on a CPU, over documents, with fewer keys than queries."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 128, 14), torch.randn(2, 2, 256, 14), torch.randn(2, 2, 256, 14)
    document = torch.tensor([[0] * 100 + [1] * 156, [0] * 30 + [1] * 226])

    def mask(b: Any, h: Any, q_index: Any, k_index: Any) -> Any:
        at = q_index + 128
        return (at >= k_index) & (document[b, at] == document[b, k_index])

    with torch.compiler.set_stance("force_eager"):
        blocks = create_block_mask(mask, 2, None, 128, 256, device="cpu")
        whole = flex_attention(q, k, v, block_mask=blocks, scale=0.3, enable_gqa=True)
    ours, aux = attend(
        *(q, k, v), block_mask=blocks, scale=0.3, enable_gqa=True, return_aux=AuxRequest(), score_mod=None
    )
    torch.testing.assert_close(ours, whole)
    assert aux.lse is None
