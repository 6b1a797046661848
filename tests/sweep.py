"""A table's configuration as a run, and the run against its prediction: every container to the byte, every call by op,
group, dtype, size and phase.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from train_ledger.launch.launcher import launch
from train_ledger.predict import predict
from train_ledger.predict.distinct import rank_classes
from train_ledger.reconcile.core import group_ranks, predicted_rank, reconcile_collectives, reconcile_resident
from train_ledger.reconcile.layout import reconcile_layout
from train_ledger.reconcile.rows import EXACT
from train_ledger.spec.config import load_run
from train_ledger.spec.run import Run


def resolved(entry: dict[str, Any], folder: Path, steps: tuple[int, ...], world: str = "fake") -> Run:
    """An entry (name, model, run) as the run that a user's files would give; `steps` are recorded, the last ends it."""
    for kind in ("models", "runs"):
        (folder / kind).mkdir()
    name = entry["name"]
    model = folder / "models" / f"{name}.yaml"
    model.write_text(yaml.safe_dump(entry["model"]), encoding="utf-8")
    more = {"model": str(model), "world": world, "steps": steps[-1], "probe": {"collective_steps": list(steps)}}
    file = folder / "runs" / f"{name}.yaml"
    file.write_text(yaml.safe_dump({**entry["run"], **more}), encoding="utf-8")
    return load_run(file, overrides={"probe": {"lifeline_weight": ""}})


def differences(run: Run, folder: Path, ranks: list[int] | None = None) -> list[str]:
    """Launches one rank of each kind and the last (`ranks`: these; all outside of world `fake`). What is not exact.

    Nothing is alive but what is predicted: storages that nobody claims are differences too.
    """
    ranks = ranks or sorted({*(same[0] for same in rank_classes(run)), run.world_size - 1})
    if run.world != "fake":
        ranks = list(range(run.world_size))
    launch(run, folder, ranks=ranks)
    return [text for rank in ranks for text in _of_rank(run, folder, rank)]


def _of_rank(run: Run, folder: Path, rank: int) -> list[str]:
    measured = json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8"))
    out = []
    for step in run.probe.collective_steps:
        logs = run.framework == "torchtitan" and step % run.settings["log_freq"] == 0
        prediction = predict(run, [rank], "first" if step == 1 else "log" if logs else "steady").to_dict()
        ledger = predicted_rank(prediction, measured)
        rows: list[Any] = [*reconcile_collectives(prediction, ledger, measured, step)]
        assert rows or run.world_size == 1
        out += [f"step {step}: {text}" for text in _misplaced(prediction, ledger, measured, step)]
        if step == run.steps:
            rows += [*reconcile_resident(prediction, ledger, measured), *reconcile_layout(prediction, measured)]
        out += [f"step {step}: {row}" for row in rows if row.verdict != EXACT]
    return out


def _misplaced(prediction: dict[str, Any], ledger: dict[str, Any], measured: dict[str, Any], step: int) -> list[str]:
    """Calls that fall into another phase of the step than predicted: the reconciliation joins calls without it."""
    ranks = group_ranks(prediction, measured["rank"])
    said, seen = Counter[tuple[Any, ...]](), Counter[tuple[Any, ...]]()
    for c in ledger["collectives"]:
        said[c["op"], ranks[c["group"]], c["dtype"], c["in_numel"], c["out_numel"], c["phase"]] += c["count"]
    for c in measured["collectives"]:
        if c["step"] == step:
            key = (c["op"], tuple(c["ranks"]), c["dtype"], c["in_numel"], c["out_numel"], c["phase"])
            seen[key] += c["count"]
    return [f"{key}: predicted {said[key]}, measured {seen[key]}" for key in said | seen if said[key] != seen[key]]
