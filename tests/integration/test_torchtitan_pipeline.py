"""Stages, schedules and sizes as torch and torchtitan themselves make them; pipelines that train as one rank does."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from ranks import on_ranks
from torchtitan_runs import on_one_rank

from train_ledger.launch.frameworks import torchtitan
from train_ledger.launch.session import Rank
from train_ledger.launch.weights import generate
from train_ledger.launch.worlds import staged
from train_ledger.predict.frameworks.torchtitan_pipeline import transfers
from train_ledger.predict.frameworks.torchtitan_schedule import order
from train_ledger.predict.frameworks.torchtitan_stages import layer_counts
from train_ledger.spec.model import canonical_tensors
from train_ledger.spec.run import Run

pytestmark = pytest.mark.launch

KINDS = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "UNSHARD": "unshard",
    "RESHARD": "reshard",
    "REDUCE_GRAD": "reduce",
}


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Once, before anything forks."""
    torchtitan.warm_up()


@pytest.fixture(scope="module")
def laptop() -> Run:
    """The laptop comparison's run, four layers, four micro-batches on one rank."""
    return on_one_rank(4, global_batch=4)


def pipelined(run: Run, virtual: int = 1, **settings: Any) -> Run:
    """`run` in two pipeline ranks."""
    parallel = replace(run.parallel, pipeline_parallel=2, virtual_pipeline_parallel=virtual)
    return replace(run, world_size=2, parallel=parallel, settings={**run.settings, **settings})


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a process of its own: process groups are global."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, args)


def generated(cases: list[tuple[int, int, int, int]]) -> list[Any]:
    """torchtitan's own stages of each case, or its refusal."""
    from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

    out = []
    for case in cases:
        try:
            out.append(_generate_llm_fqn_per_model_part(*case))
        except ValueError as e:
            out.append(str(e))
    return out


def test_layers_fall_to_stages_as_torchtitan_s_own_function_says() -> None:
    """Every number of stages and layers up to nine, and weights up to three, refusals included."""
    cases = [(s, n, i, o) for s in range(1, 10) for n in range(1, 10) for i in range(4) for o in range(4)]
    refused = 0
    for case, theirs in zip(cases, in_child(generated, cases), strict=True):
        if isinstance(theirs, str):
            refused += 1
            with pytest.raises(ValueError, match=r"Number of stages|weight") as refusal:
                layer_counts(*case)
            assert str(refusal.value) == theirs
            continue
        counts = layer_counts(*case)
        named = [f"layers.{i}" for i in range(sum(counts))]
        ours = [[named.pop(0) for _ in range(count)] for count in counts]
        ours[0].insert(0, "tok_embeddings")
        ours[-1] += ["norm", "lm_head"]
        assert ours == theirs, case
    assert 100 < refused < len(cases) - 100


def scheduled(cases: list[tuple[str, int, int, int, int]]) -> list[list[tuple[str, int]]]:
    """Actions of one rank as torch's schedule has them, without sends and receives."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torch.testing._internal.distributed.fake_pg import FakeStore

    out = []
    for name, ranks, rank, per_rank, micro_batches in cases:
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        stages = [
            PipelineStage(torch.nn.Linear(1, 1), rank + i * ranks, ranks * per_rank, torch.device("cpu"))
            for i in range(per_rank)
        ]
        single = name in ("1F1B", "GPipe")
        schedule: Any = get_schedule_class(name)(stages[0] if single else stages, micro_batches, loss_fn=torch.sum)
        lowered = schedule.pipeline_order[rank] if single else schedule.pipeline_order_with_comms[rank]
        actions = [a for a in lowered if a is not None and a.computation_type.name in KINDS]
        out.append([(KINDS[a.computation_type.name], a.stage_index) for a in actions])
        torch.distributed.destroy_process_group()
    return out


def test_orders_are_those_of_torch_s_schedules() -> None:
    """Every rank of pipelines up to four ranks; evictions where a rank has more stages than it keeps whole."""
    cases = []
    for ranks in (2, 3, 4):
        for rank in range(ranks):
            for micro_batches in (2, 4, 5, 6, 8):
                if micro_batches >= ranks:
                    cases.append(("1F1B", ranks, rank, 1, micro_batches))
                cases.append(("GPipe", ranks, rank, 1, micro_batches))
                for per_rank in (2, 3, 5):
                    if micro_batches % max(1, micro_batches // ranks) == 0:
                        cases.append(("Interleaved1F1B", ranks, rank, per_rank, micro_batches))
                    cases.append(("LoopedBFS", ranks, rank, per_rank, micro_batches))
    for case, theirs in zip(cases, in_child(scheduled, cases), strict=True):
        ours = [tuple(action) for action in order(*case)]
        # What is evicted at once is evicted in the order of a set.
        assert sorted_runs(ours) == sorted_runs(theirs), case


def sorted_runs(actions: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """With neighbouring reshards in the order of their stages."""
    out: list[tuple[str, int]] = []
    for action in actions:
        at = len(out)
        while action[0] == "reshard" and at and out[at - 1][0] == "reshard" and out[at - 1][1] > action[1]:
            at -= 1
        out.insert(at, action)
    return out


def pickled(shapes: list[tuple[tuple[int, int, int], str]]) -> list[tuple[int, int]]:
    """Bytes of what a stage tells the next one and the one before."""
    from torch.distributed.distributed_c10d import _object_to_tensor
    from torch.distributed.pipelining._utils import _StageBackwardMeta, _StageForwardMeta, _TensorMeta

    out = []
    for (batch, tokens, hidden), dtype in shapes:
        metas = [
            _TensorMeta(
                torch.Size((batch, tokens, hidden)),
                (tokens * hidden, hidden, 1),
                getattr(torch, dtype),
                requires_grad=g,
            )
            for g in (True, False)
        ]
        told = _StageForwardMeta((metas[0],)), _StageBackwardMeta((metas[1],))
        out.append(tuple(_object_to_tensor(t, "cpu", None)[0].numel() for t in told))
    return out


def test_shapes_are_pickled_as_long_as_predicted(laptop: Run) -> None:
    """Numbers of one, two, four and more bytes."""
    shapes = [
        ((batch, tokens, hidden), dtype)
        for batch in (1, 300)
        for tokens, hidden in ((24, 40), (255, 256), (256, 256), (8192, 2048), (2**20, 2**11), (2**24, 2**14))
        for dtype in ("bfloat16", "float32")
    ]
    for ((batch, tokens, hidden), dtype), theirs in zip(shapes, in_child(pickled, shapes), strict=True):
        run = pipelined(laptop, mixed_precision_param=dtype)
        run = replace(
            run,
            micro_batch=batch,
            seq_length=tokens,
            global_batch=4 * batch,
            model=replace(run.model, hidden_size=hidden),
        )
        ours = {c.op: c.in_numel + c.out_numel for c in transfers(run, 0, True) if c.dtype == "uint8"}
        assert (ours["send"], ours["recv"]) == theirs


def session(run: Run, rank: int) -> torchtitan.TorchtitanSession:
    """A rank's session inside a process group that is there already."""
    return torchtitan.build(run, Rank(rank, rank, run.world_size, "cpu", torch.device("cpu"), lambda timeout: None))


def trained(
    run: Run, store: Path | None = None
) -> list[tuple[list[tuple[float | None, float | None]], dict[str, np.ndarray]]]:
    """Losses and norms of each step, and the weights that each rank exports at the end.

    With a file for the store over the backend of world `shared`, else over gloo.
    """

    def train(rank: int) -> tuple[list[tuple[float | None, float | None]], dict[str, np.ndarray]]:
        if store is not None:
            dist.barrier()  # nobody leaves before all are connected
            dist.destroy_process_group()
            staged.install()
            files = dist.FileStore(str(store), run.world_size)
            dist.init_process_group(staged.NAME, store=files, rank=rank, world_size=run.world_size)
        here = session(run, rank)
        here.load_weights(generate(run.model, 7))
        seen = [(r.loss, r.grad_norm) for r in (here.step(step) for step in range(1, run.steps + 1))]
        return seen, {name: tensor.numpy() for name, tensor in here.export_weights().items()}

    return on_ranks(run.world_size, train)


@pytest.fixture(scope="module")
def alone(laptop: Run) -> list[tuple[float | None, float | None]]:
    """One rank's losses and norms in fp32."""
    ((seen, _),) = trained(replace(laptop, settings={**laptop.settings, "mixed_precision_param": "float32"}))
    return seen


@pytest.mark.parametrize(("schedule", "virtual"), [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2), ("LoopedBFS", 2)])
def test_a_schedule_trains_as_one_rank_does(
    laptop: Run, alone: list[tuple[float | None, float | None]], schedule: str, virtual: int
) -> None:
    """The same loss on the last stage, none elsewhere, the same norm everywhere; each stage exports its own weights."""
    run = pipelined(laptop, virtual, pipeline_parallel_schedule=schedule, mixed_precision_param="float32")
    (first, some), (last, others) = trained(run)
    assert [loss for loss, _ in first] == [None] * run.steps
    for (loss, norm), (wanted, wanted_norm) in zip(last, alone, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-6)
        assert norm == pytest.approx(wanted_norm, rel=1e-5)
    assert [norm for _, norm in first] == [norm for _, norm in last]
    assert not some.keys() & others.keys()
    assert some.keys() | others.keys() == {t.name for t in canonical_tensors(run.model)}
    assert "model.embed_tokens.weight" in some
    assert "lm_head.weight" in others


def test_ranks_that_share_a_gpu_train_alike(laptop: Run, tmp_path: Path) -> None:
    """Sends and receives over the staged backend give the same bits as over gloo."""
    run = pipelined(laptop, 2, pipeline_parallel_schedule="Interleaved1F1B")
    for (seen, weights), (wanted, same) in zip(trained(run, tmp_path / "store"), trained(run), strict=True):
        assert seen == wanted
        assert weights.keys() == same.keys()
        assert all(np.array_equal(weights[name], same[name]) for name in same)


def test_weights_in_and_out_of_stages(laptop: Run) -> None:
    """What is loaded comes back bit for bit, every name once, with FSDP and tensor parallelism inside the stages."""
    parallel = replace(
        laptop.parallel,
        pipeline_parallel=2,
        data_parallel=2,
        data_parallel_shard=2,
        tensor_parallel=2,
        sequence_parallel=True,
    )
    run = replace(laptop, world_size=8, global_batch=8, parallel=parallel)

    def there_and_back(rank: int) -> tuple[dict[str, np.ndarray], bool]:
        here = session(run, rank)
        here.load_weights(generate(run.model, 7))
        held = here.weight("model.layers.3.mlp.down_proj.weight") is not None
        return {name: tensor.numpy() for name, tensor in here.export_weights().items()}, held

    back = on_ranks(8, there_and_back)
    read = generate(run.model, 7)
    assert [bool(weights) for weights, _ in back] == [True, False, False, False] * 2
    assert [held for _, held in back] == [False] * 4 + [True] * 4
    whole = back[0][0] | back[4][0]
    assert whole.keys() == {t.name for t in canonical_tensors(run.model)}
    assert all(np.array_equal(value, read(name).numpy()) for name, value in whole.items())
