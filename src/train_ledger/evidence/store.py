"""Folders under reference/: `<set>/provenance.json` and, a comparison each, `<set>/<comparison>/<run>/`.

A run's folder holds the files of its launch, rank files compressed, and `resolved.json`, the run that was launched.
"""

from __future__ import annotations

import gzip
import shutil
import subprocess
import zlib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from train_ledger.predict import predict
from train_ledger.predict.device import DEVICES, on_device
from train_ledger.reconcile.compare import Reconciliation, reconcile_files, write
from train_ledger.reconcile.tidy import write_tidy
from train_ledger.spec.errors import ConfigError, DataError
from train_ledger.spec.io import check_name, read_json, write_json
from train_ledger.spec.launched import Launch, read_launch
from train_ledger.spec.resolved import read_resolved
from train_ledger.spec.run import Run

SCHEMA = "train-ledger/evidence/1"
PROVENANCE = "provenance.json"
RESOLVED = "resolved.json"


def find_sets(root: str | Path) -> list[Path]:
    """The sets below `root` (reference/), in order of their names.

    Raises:
        DataError: a folder with packed launches does not say where they come from.
    """
    sets = {p.parent for p in Path(root).glob(f"*/{PROVENANCE}")}
    for launch in sorted(Path(root).glob("*/*/*/run.json")):
        if launch.parents[2] not in sets:
            raise DataError("is missing: where were these launches measured?", file=launch.parents[2] / PROVENANCE)
    return sorted(sets)


def comparisons(set_dir: Path) -> list[str]:
    """Names of the comparisons that a set holds.

    Raises:
        DataError: its provenance is missing or wrong.
    """
    read_json(set_dir / PROVENANCE, SCHEMA, "evidence")
    return sorted(p.name for p in set_dir.iterdir() if p.is_dir())


def pack(launch_dir: str | Path, run: Run, set_dir: str | Path, comparison: str) -> Path:
    """Keeps a finished launch in a set. Equal files give equal bytes.

    A set that is new gets a provenance.json with what the launch says of itself, to be completed by hand.

    Args:
        launch_dir: folder with run.json and the rank files; they are checked first.
        run: the run that was launched.

    Raises:
        DataError: the launch is not whole, or not of this run; the set is of other hardware; another launch of the run
            is kept there already.
    """
    launch_dir = Path(launch_dir)
    launch = read_launch(launch_dir)
    if launch.meta["config_sha256"] != run.sha256():
        raise DataError("was launched with another configuration", file=launch_dir / "run.json", key="config_sha256")
    target = Path(set_dir) / check_name(comparison) / check_name(run.name)
    kept = target / "run.json"
    if kept.is_file() and kept.read_bytes() != (launch_dir / "run.json").read_bytes():
        raise DataError("is kept there already, from another launch; remove it first", file=target)
    provenance = Path(set_dir) / PROVENANCE
    device = str(launch.ranks[0]["device"].get("name", "CPU"))
    if not provenance.is_file():
        write_json(provenance, _first_provenance(launch, run, comparison, device))
    hardware = read_json(provenance, SCHEMA, "evidence")["hardware"]
    if device not in hardware:
        raise DataError(f"is {hardware!r}, but the launch was on {device!r}", file=provenance, key="hardware")
    target.mkdir(parents=True, exist_ok=True)
    write_json(target / RESOLVED, run.to_dict())
    for entry in launch.meta["ranks"]:
        content = (launch_dir / entry["file"]).read_bytes()
        (target / f"{entry['file']}.gz").write_bytes(gzip.compress(content, 9, mtime=0))
    shutil.copyfile(launch_dir / "run.json", target / "run.json")
    return target


def _first_provenance(launch: Launch, run: Run, comparison: str, device: str) -> dict[str, Any]:
    """What the launch itself tells; hardware and notes want words."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    first = launch.ranks[0]
    return {
        "schema": SCHEMA,
        "model": run.model.name,
        "hardware": f"{device}, world {run.world}",
        "driver": str(first["device"].get("driver", "none")),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": git.stdout.strip() or "not known",
        "versions": dict(first["versions"]),
        "commands": [
            f"train-ledger launch config/runs/RUN.yaml --comparison {comparison} --world {run.world} --out DIR"
        ],
        "notes": [],
    }


def unpack(set_dir: str | Path, comparison: str, results_dir: str | Path) -> Reconciliation:
    """Makes a results folder of a kept comparison: launch/, today's predict/, probe/ and reconcile/.

    Raises:
        DataError: a file is missing, damaged, or not what run.json hashed.
    """
    results = Path(results_dir)
    predicted, tidy = [], []
    for run in resolved_runs(Path(set_dir) / comparison):
        kept = Path(set_dir) / comparison / run.name
        launch_dir = results / "launch" / run.name
        _expand(kept, launch_dir)
        launch = _read_kept(kept, launch_dir)
        predicted.append(results / "predict" / f"{run.name}.json")
        write_json(predicted[-1], _prediction(run, [r["rank"] for r in launch.ranks], launch.ranks[0]["device"]))
        tidy.append(results / "probe" / f"{run.name}.parquet")
        write_tidy(launch, tidy[-1])
    if not tidy:
        raise DataError("holds no run", file=Path(set_dir) / comparison)
    found = reconcile_files(predicted, tidy)
    write(found, results / "reconcile")
    return found


def _expand(kept: Path, launch_dir: Path) -> None:
    launch_dir.mkdir(parents=True, exist_ok=True)
    try:
        for file in kept.glob("rank*.json.gz"):
            (launch_dir / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
        shutil.copyfile(kept / "run.json", launch_dir / "run.json")
    except (OSError, EOFError, zlib.error) as e:
        raise DataError(f"cannot be unpacked: {e}", file=kept) from e


def _read_kept(kept: Path, launch_dir: Path) -> Launch:
    """The unpacked launch; an error names the file that is kept, not the copy, which does not outlive the command."""
    try:
        return read_launch(launch_dir)
    except DataError as e:
        name = Path(e.file or "").name
        named = kept / (f"{name}.gz" if name.startswith("rank") else name)
        raise DataError(e.message, file=named, key=e.key) from e


def resolved_runs(kept: Path) -> list[Run]:
    """The runs of a kept comparison, by name.

    Raises:
        DataError: one of them cannot be read.
    """
    return [_resolved(folder / RESOLVED) for folder in sorted(kept.iterdir()) if folder.is_dir()]


def _resolved(file: Path) -> Run:
    """The run of a run's folder, which is named as the run is."""
    try:
        run = read_resolved(file)
    except ConfigError as e:
        raise DataError(e.message, file=e.file, key=e.key) from e
    if run.name != file.parent.name:
        raise DataError(f"is {run.name!r}, but the folder is {file.parent.name!r}", file=file, key="name")
    return run


def _prediction(run: Run, ranks: list[int], measured_on: dict[str, Any]) -> dict[str, Any]:
    """Today's prediction of those ranks, and of what their GPU's allocator reads beside the containers."""
    out = predict(run, ranks).to_dict()
    name = next(
        (n for n, d in DEVICES.items() if d.title.split()[:2] == str(measured_on.get("name")).split()[:2]), None
    )
    if name and measured_on["type"] == "cuda":
        gpu = replace(run, world="nccl")
        readings = [on_device(gpu, ledger, name) for ledger in predict(gpu, ranks).ranks]
        out["device"] = {"name": name, "ranks": [reading.to_dict() for reading in readings]}
    return out
