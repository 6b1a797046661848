"""torchtitan trained for real on gloo ranks: exact against the prediction, one weight's life, weights in and out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from ranks import on_ranks

from train_ledger.launch.frameworks import torchtitan
from train_ledger.launch.launcher import launch
from train_ledger.launch.schedule import lr_at
from train_ledger.launch.session import Rank
from train_ledger.launch.weights import generate
from train_ledger.predict import predict
from train_ledger.reconcile.core import reconcile_rank
from train_ledger.reconcile.layout import reconcile_layout
from train_ledger.reconcile.rows import CLEAN
from train_ledger.spec.config import load_comparison, load_run
from train_ledger.spec.errors import ConfigError
from train_ledger.spec.model import canonical_tensors
from train_ledger.spec.run import Parallel, Probe, Run

CONFIG = Path(__file__).parents[2] / "config"

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def laptop() -> Run:
    """The laptop comparison's run with two accumulation steps."""
    return load_comparison("laptop", CONFIG).runs["torchtitan-fsdp4-tp2-matched"]


@pytest.fixture(scope="module")
def measured(laptop: Run, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The eight rank files of a real launch of it."""
    out = tmp_path_factory.mktemp("laptop")
    launch(laptop, out)
    return [json.loads((out / f"rank{r}.json").read_text(encoding="utf-8")) for r in range(8)]


def test_every_byte_and_call_of_eight_ranks(laptop: Run, measured: list[dict[str, Any]]) -> None:
    """Containers, collectives, coordinates and groups."""
    prediction = predict(laptop).to_dict()
    rows: list[Any] = []
    for rank in measured:
        rows += [*(r for part in reconcile_rank(prediction, rank) for r in part), *reconcile_layout(prediction, rank)]
    assert [row for row in rows if row.verdict not in CLEAN] == []
    assert len(rows) > 8 * 20


def test_loss_and_norm_are_global(measured: list[dict[str, Any]]) -> None:
    """Every step logs: each rank has the mean over all tokens, not its own."""
    for key in ("loss", "grad_norm"):
        every = {tuple(step[key] for step in rank["steps"]) for rank in measured}
        assert len(every) == 1
        assert all(value > 0 for value in every.pop())


def test_life_of_a_weight(measured: list[dict[str, Any]]) -> None:
    """fp32 shard, bf16 whole, shard again, whole for the backward, shard; the shard is its own fp32 master."""
    life = measured[3]["lifeline"]
    assert life["full_numel"] == 60 * 30
    states = {e["event"]: (e["state"], e["dtype"]) for e in life["events"] if e["micro_batch"] in (-1, 1)}
    for event in ("step_begin", "before_forward", "after_forward", "after_backward", "before_optimizer", "step_end"):
        assert states[event] == ("shard", "float32"), event
    for event in ("forward", "backward"):
        assert states[event] == ("full", "bfloat16"), event
    ends = [e["master"] for e in life["events"] if e["event"] in ("step_begin", "step_end")]
    assert all(m["name"] == "param" and m["dtype"] == "float32" and m["same_storage"] for m in ends)


@pytest.mark.sweep
def test_dry_run_is_exact_too(laptop: Run, tmp_path: Path) -> None:
    """The program that makes reference/dry-torchtitan, on a shape where every shard is padded."""
    run = replace(laptop, world="fake", steps=2, probe=Probe((2,), ""), settings={**laptop.settings, "log_freq": 100})
    (tmp_path / "run.json").write_text(json.dumps(run.to_dict()), encoding="utf-8")
    out = tmp_path / "rank7.json"
    module = "train_ledger.launch.frameworks.torchtitan_dry"
    command = [sys.executable, "-m", module, str(tmp_path / "run.json"), "7", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [r for part in reconcile_rank(predict(run, [7]).to_dict(), json.loads(out.read_text())) for r in part]
    assert [row for row in rows if row.verdict not in CLEAN] == []
    assert len(rows) > 15


def session(run: Run, rank: int) -> torchtitan.TorchtitanSession:
    """A rank's session inside a process group that is there already."""
    return torchtitan.build(run, Rank(rank, rank, run.world_size, "cpu", torch.device("cpu"), lambda timeout: None))


def layout(run: Run, replicate: int, shard: int, tensor: int, **changes: Any) -> Run:
    """`run` on another mesh, one micro-batch a step."""
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
        model=replace(run.model, **changes),
    )


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ((1, 2, 2), {}),
        ((1, 3, 1), {"tie_embeddings": True}),
        ((2, 1, 2), {"head_dim": 14, "num_query_groups": 6}),
        ((1, 1, 2), {"qk_norm": True}),
    ],
)
def test_weights_in_and_out(laptop: Run, mesh: tuple[int, int, int], changes: dict[str, Any]) -> None:
    """What is loaded comes back bit for bit, every name once, from shards that are padded and split both ways."""
    run = layout(laptop, *mesh, **changes)
    torchtitan.warm_up()

    def there_and_back(rank: int) -> dict[str, np.ndarray]:
        here = session(run, rank)
        here.load_weights(generate(run.model, 7))
        return {name: tensor.numpy() for name, tensor in here.export_weights().items()}

    first, *others = on_ranks(run.world_size, there_and_back)
    read = generate(run.model, 7)
    assert list(first) == [t.name for t in canonical_tensors(run.model)]
    assert all(np.array_equal(first[name], read(name).numpy()) for name in first)
    assert others == [{}] * (run.world_size - 1)


def test_learning_rate_and_decay(laptop: Run) -> None:
    """The optimizer steps with the rate that all frameworks share, and leaves norms alone where it is told to."""
    run = layout(laptop, 1, 1, 1)
    run = replace(run, steps=6, optimizer=replace(run.optimizer, lr_warmup_steps=2, decay_norms=False))
    torchtitan.warm_up()

    def rates(rank: int) -> tuple[list[float], dict[float, int]]:
        here = session(run, rank)
        (optimizer,) = here.trainer.optimizers
        seen = []
        for step in range(1, run.steps + 1):
            seen.append(optimizer.param_groups[0]["lr"])
            here.step(step)
        return seen, {g["weight_decay"]: len(g["params"]) for g in optimizer.param_groups}

    ((seen, decayed),) = on_ranks(1, rates)
    assert seen == [lr_at(run.optimizer, step, run.steps) for step in range(1, run.steps + 1)]
    norms = 2 * run.model.num_layers + 1
    assert decayed == {0.0: norms, run.optimizer.weight_decay: 5 * run.model.num_layers + 2}


def test_plain_steps_tell_the_loss_of_their_own_rank(laptop: Run) -> None:
    """Where torchtitan does not log, the mean over data-parallel ranks of what each returns is the global mean."""
    often = layout(laptop, 1, 2, 1)
    rarely = replace(often, settings={**often.settings, "log_freq": 100})
    torchtitan.warm_up()

    def losses(run: Run) -> Any:
        def steps(rank: int) -> Iterable[tuple[float | None, float | None]]:
            here = session(run, rank)
            return [(r.loss, r.grad_norm) for r in (here.step(step) for step in (1, 2, 3))]

        return steps

    logged, plain = on_ranks(2, losses(often)), on_ranks(2, losses(rarely))
    assert logged[0] == logged[1]
    for step in (1, 2):
        own = [rank[step][0] for rank in plain]
        assert own[0] != own[1]
        assert sum(own) / 2 == pytest.approx(logged[0][step][0], rel=1e-6)
        assert plain[0][step][1] is None


def test_the_framework_s_own_refusal(laptop: Run) -> None:
    """A run that was never checked ends in torchtitan's words, not in a traceback."""
    run = replace(layout(laptop, 1, 1, 2), seq_length=31)
    torchtitan.warm_up()

    def refused(rank: int) -> str:
        try:
            session(run, rank)
        except ConfigError as e:
            return str(e)
        return ""

    said = on_ranks(2, refused)
    assert "must be divisible by 2" in said[0]
    assert "torchtitan" in said[0]


def test_a_weight_that_is_not_there(laptop: Run) -> None:
    """The lifeline's weight is named by the user."""
    torchtitan.warm_up()

    def ask(rank: int) -> str:
        try:
            session(layout(laptop, 1, 1, 1), rank).weight("model.layers.9.self_attn.o_proj.weight")
        except ConfigError as e:
            return str(e)
        return ""

    assert "layers.9" in on_ranks(1, ask)[0]


def test_run_files_of_the_repository_are_accepted() -> None:
    """Every torchtitan run in config/ passes torchtitan's checks with the model that it names."""
    files = sorted((CONFIG / "runs").glob("torchtitan-*.yaml"))
    assert len(files) >= 2
    for file in files:
        assert predict(load_run(file, config_dir=CONFIG), [0]).ranks[0].state_bytes > 0
