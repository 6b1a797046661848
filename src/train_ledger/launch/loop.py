"""One rank from start to its file: build the framework's session, step it with the probes around, census, write."""

from __future__ import annotations

import gc
import importlib
import math
import os
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from train_ledger.probe.census import census
from train_ledger.probe.matrix import matrix_rate
from train_ledger.probe.memory import MemoryProbe
from train_ledger.spec.errors import LaunchError
from train_ledger.spec.io import write_json
from train_ledger.spec.registry import FRAMEWORKS
from train_ledger.spec.run import Run

from .session import Program, Rank, Session, StepResult

SCHEMA = "train-ledger/rank/1"


def program(name: str, *, warm: bool = True) -> Program:
    """The training program of a framework. The version installed must be the one that was verified.

    Args:
        name: a key of `spec.registry.FRAMEWORKS`.
        warm: also import the framework.

    Raises:
        LaunchError: the framework is missing, of another version, or does not import.
    """
    wanted = FRAMEWORKS[name]
    try:
        found = metadata.version(wanted.distribution)
    except metadata.PackageNotFoundError:
        raise LaunchError(f"{wanted.distribution} {wanted.version} is not installed in this environment") from None
    if found.split("+")[0] != wanted.version:
        raise LaunchError(
            f"{wanted.distribution} {found} is installed, but {wanted.version} is what the ledger was verified with; "
            "its rules would be another version's"
        )
    module: Program = importlib.import_module(wanted.launch)  # type: ignore[assignment]
    if not warm:
        return module
    try:
        module.warm_up()
    except (ImportError, OSError) as e:  # a part that is missing, a shared library that does not load
        raise LaunchError(f"{wanted.distribution} {found} cannot be imported: {type(e).__name__}: {e}") from e
    return module


def run_rank(
    run: Run,
    rank: Rank,
    out_dir: str | Path,
    *,
    weights: Path | None = None,
    export: bool = False,
    on_step: Callable[[int], None] | None = None,
) -> Path:
    """Trains one rank and writes `rank<r>.json` into `out_dir`.

    Args:
        run: resolved.
        rank: where this process stands; made by the world.
        out_dir: folder for the file.
        weights: canonical weights to start from.
        export: also write `weights<r>.safetensors`, this rank's part of the trained weights.
        on_step: called with the number of each step that is done, and with 0 when the session is built.

    Returns:
        The file.

    Raises:
        LaunchError: wrong version, a loss or gradient norm that is not finite.
        ConfigError: a setting that the framework refuses.
    """
    module = program(run.framework)
    done = on_step or (lambda step: None)
    gc.freeze()  # what imports left is no part of the census, and each collection is faster
    session = module.build(run, rank)
    if weights is not None:
        from .weights import open_weights

        session.load_weights(open_weights(weights, run.model))
    probe = MemoryProbe(
        run.name,
        profile_steps=run.probe.collective_steps,
        device=rank.device,
        rank=rank.rank,
        optimizer=session.optimizer_steps(),
        weight=session.weight(run.probe.lifeline_weight) if run.probe.lifeline_weight else None,
        kernels=rank.world == "nccl",
        settle_steps=(run.steps, *run.probe.collective_steps),
    )
    done(0)
    steps = []
    for step in range(1, run.steps + 1):
        with probe.step(step):
            result = session.step(step)
        steps.append(_step_record(rank, step, result, probe.records[-1]))
        del result
        done(step)
    file = Path(out_dir) / f"rank{rank.rank}.json"
    measured = _rank_file(run, rank, session, steps, probe)
    if rank.device.type == "cuda" and "timeline" in measured:  # every reading is done: this takes memory
        measured["timeline"]["matrix_flop_per_s"] = matrix_rate(rank.device)
    if export:
        from .weights import write_weights

        held = session.export_weights()  # all ranks take part, also one that ends up with nothing
        if held:
            write_weights(Path(out_dir) / f"weights{rank.rank}.safetensors", held)
    write_json(file, measured)  # last of all: a rank file says that its rank is done
    session.close()
    return file


def _step_record(rank: Rank, step: int, result: StepResult, record: dict[str, Any]) -> dict[str, Any]:
    """Loss and norm mean nothing in the fake world, where nothing is received; elsewhere they must be finite."""
    loss, norm = (None, None) if rank.world == "fake" else (result.loss, result.grad_norm)
    for what, value in (("loss", loss), ("gradient norm", norm)):
        if value is not None and not math.isfinite(value):
            raise LaunchError(f"the {what} is {value}: the run has lost its numerics")
    return {"step": step, "loss": loss, "grad_norm": norm, "time_s": record["time_s"], "memory": record["memory"]}


def _rank_file(run: Run, rank: Rank, session: Session, steps: list[Any], probe: MemoryProbe) -> dict[str, Any]:
    gc.collect()
    return {
        "schema": SCHEMA,
        "run": run.name,
        "framework": run.framework,
        "world": rank.world,
        "world_size": rank.world_size,
        "rank": rank.rank,
        "coords": dict(session.coords),
        "config_sha256": run.sha256(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            FRAMEWORKS[run.framework].distribution: metadata.version(FRAMEWORKS[run.framework].distribution),
        },
        "host": host(),
        "device": device(rank.device),
        "groups": [{"name": name, "ranks": [int(r) for r in ranks]} for name, ranks in session.groups],
        "steps": steps,
        "census": {"step": run.steps, **census((o.container, o.owner, o.tensor) for o in session.owners())},
        "collectives": probe.collectives,
        "lifeline": probe.lifeline,
        **probe.extra(),
    }


def host() -> dict[str, Any]:
    """The machine: kind, logical CPUs, memory in bytes."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"machine": platform.machine(), "cpus": os.cpu_count(), "memory_bytes": memory_bytes}


def device(where: torch.device) -> dict[str, Any]:
    """The device a rank trains on; for CUDA its name, compute capability, memory in bytes and the driver."""
    if where.type != "cuda":
        return {"type": where.type}
    p = torch.cuda.get_device_properties(where)
    driver = Path("/sys/module/nvidia/version")
    return {
        "type": "cuda",
        "name": p.name,
        "capability": f"{p.major}.{p.minor}",
        "memory_bytes": p.total_memory,
        "driver": driver.read_text().strip() if driver.is_file() else "",
    }
