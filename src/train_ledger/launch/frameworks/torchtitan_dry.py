"""A rank of any world and any size without memory: torchtitan built and stepped under PyTorch's FakeTensorMode.

FSDP2, tensor parallelism, the optimizer and every call run as they do in training, on tensors that have shapes but no
data. What a step reads back to the host (token counts, the loss, the norm) cannot be read, so that the few lines of
`trainer.py:Trainer.train_step` that do so are left out, and with them a logging step's three reductions.

    python -m train_ledger.launch.frameworks.torchtitan_dry RUN.json RANK OUT.json
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from train_ledger.launch.loop import SCHEMA, host
from train_ledger.launch.session import Rank, StepResult
from train_ledger.probe.census import parts
from train_ledger.probe.collectives import CollectiveProbe
from train_ledger.spec.errors import ConfigError
from train_ledger.spec.io import write_json
from train_ledger.spec.run import Run

from .torchtitan import TorchtitanSession, warm_up
from .torchtitan_device import use_device

#: DeviceMesh computes ranks with tensors; those must hold numbers.
_MESH_METHODS = ("__init__", "__getitem__", "_flatten", "_unflatten", "get_coordinate", "get_local_rank")


class DrySession(TorchtitanSession):
    """A session whose steps read nothing back."""

    def _keep_losses(self) -> None:
        return None

    def step(self, step: int) -> StepResult:
        """`Trainer.train_step` without what it reads from tensors; every tensor of it is as large as there."""
        from torchtitan.distributed import utils

        trainer = self.trainer
        trainer.step = step
        trainer.optimizers.zero_grad(set_to_none=True)
        batches = [next(self.batches) for _ in range(trainer.gradient_accumulation_steps)]
        tokens = torch.ones((), dtype=torch.int64)
        if trainer.parallel_dims.dp_enabled:
            tokens = utils.dist_sum_tensor(tokens, trainer.parallel_dims.get_mesh("batch"))
        for inputs, labels in batches:
            trainer.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=tokens)
        parameters = [p for part in trainer.model_parts for p in part.parameters()]
        utils.clip_grad_norm_(parameters, trainer.config.training.max_norm, foreach=True)
        trainer.optimizers.step()
        trainer.lr_schedulers.step()
        return StepResult(None, None)


def dry_rank(run: Run, rank: int) -> dict[str, Any]:
    """The rank file of `rank` after `run.steps` steps, calls recorded as the run asks for.

    Args:
        run: resolved; its `log_freq` above its steps, since a step that logs reads back.
        rank: any rank of its world.

    Returns:
        As in spec/schemas/rank.yaml, world `fake`. Containers are counted by storage; nothing is looked for beyond
        them.

    Raises:
        ConfigError: the run has pipeline stages, which exchange shapes by value.
    """
    if run.parallel.pipeline_parallel > 1:
        raise ConfigError("tensors without data have no pipeline stages", key="parallel.pipeline_parallel")
    where = _place(run, rank)
    recorded: list[dict[str, Any]] = []
    times = []
    with _no_data():
        session = _build(run, where)
        for step in range(1, run.steps + 1):
            began = time.perf_counter()
            probe = CollectiveProbe(step)
            with probe if step in run.probe.collective_steps else contextlib.nullcontext():
                session.step(step)
            recorded += probe.rows()
            times.append(time.perf_counter() - began)
        containers = _containers(session)
    from importlib import metadata

    return {
        "schema": SCHEMA,
        "run": run.name,
        "framework": run.framework,
        "world": "fake",
        "world_size": run.world_size,
        "rank": rank,
        "coords": session.coords,
        "config_sha256": run.sha256(),
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "torchtitan": metadata.version("torchtitan"),
        },
        "host": host(),
        "device": {"type": "cpu"},
        "groups": [{"name": name, "ranks": [int(r) for r in ranks]} for name, ranks in session.groups],
        "steps": [
            {"step": i + 1, "loss": None, "grad_norm": None, "time_s": t, "memory": None} for i, t in enumerate(times)
        ],
        "census": {"step": run.steps, "containers": containers, "other": []},
        "collectives": recorded,
        "lifeline": None,
    }


def _place(run: Run, rank: int) -> Rank:
    def init(timeout: timedelta) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group(
            "fake", store=FakeStore(), rank=rank, world_size=run.world_size, timeout=timeout
        )

    return Rank(rank, 0, run.world_size, "fake", torch.device("cpu"), init)


def _build(run: Run, where: Rank) -> DrySession:
    from .torchtitan_config import TIMEOUT_S, trainer_config

    use_device(where.device)
    torch.autograd.set_multithreading_enabled(False)
    with unset_fake_temporarily():
        where.init_process_group(timedelta(seconds=TIMEOUT_S))
    return DrySession(run, trainer_config(run).build())


@contextlib.contextmanager
def _no_data() -> Iterator[None]:
    """FakeTensorMode, with device meshes on real tensors and without the work of drawing initial weights."""
    warm_up()
    from torchtitan.distributed import ParallelDims
    from torchtitan.protocols.module import Module

    def really(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return method(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in _MESH_METHODS:
            stack.enter_context(mock.patch.object(DeviceMesh, name, really(getattr(DeviceMesh, name))))
        concatenate = staticmethod(really(DeviceMesh._concatenate))
        stack.enter_context(mock.patch.object(DeviceMesh, "_concatenate", concatenate))
        stack.enter_context(mock.patch.object(ParallelDims, "build_mesh", really(ParallelDims.build_mesh)))
        stack.enter_context(mock.patch.object(Module, "_init_self_parameters", return_value=None))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def _containers(session: DrySession) -> list[dict[str, Any]]:
    """What the session owns, each storage once, as `probe.census` gives it for tensors with data."""
    seen: dict[int, dict[str, Any]] = {}
    for owned in session.owners():
        for leaf in parts(owned.tensor):
            storage = leaf.untyped_storage()
            if not storage.nbytes():
                continue
            entry = seen.setdefault(
                storage._cdata,
                {
                    "key": (owned.container, owned.owner, str(leaf.dtype)[6:]),
                    "bytes": storage.nbytes(),
                    "numel": 0,
                },
            )
            entry["numel"] += leaf.numel()
    out: dict[tuple[str, str, str], dict[str, Any]] = {}
    for entry in seen.values():
        name, owner, dtype = entry["key"]
        row = out.setdefault(
            entry["key"],
            {"name": name, "owner": owner, "dtype": dtype, "numel": 0, "bytes": 0, "storages": 0, "device": "cpu"},
        )
        row["numel"] += entry["numel"]
        row["bytes"] += entry["bytes"]
        row["storages"] += 1
    return [out[key] for key in sorted(out)]


def main(argv: list[str]) -> None:
    """A resolved run (JSON), a rank, and the file to write."""
    run_file, rank, out = argv
    run = Run.from_dict(json.loads(Path(run_file).read_text(encoding="utf-8")))
    write_json(out, dry_rank(run, int(rank)))


if __name__ == "__main__":
    main(sys.argv[1:])
