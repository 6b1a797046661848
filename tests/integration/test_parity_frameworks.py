"""The three frameworks, really launched: layouts train as the plain reference does, and planted faults are caught."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import parity_driver as driver
import pytest

from train_ledger.commands.parity import make
from train_ledger.commands.reference import make as make_reference
from train_ledger.parity.problem import Problem
from train_ledger.spec.model import canonical_tensors
from train_ledger.spec.run import Run
from train_ledger.spec.steps import global_steps

pytestmark = pytest.mark.launch

NORMS = {t.name for t in canonical_tensors(driver.MODEL) if len(t.shape) == 1}
LAYOUTS = [(framework, layout) for framework, known in driver.LAYOUTS.items() for layout in known]


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """reference.json of the problems that the driver's runs work on, by the model's name."""
    out = {}
    for layout in ("zero3", "gpt-zero3", "scaled-zero2"):
        problem = Problem.of(driver.make_run("deepspeed", layout))
        folder = tmp_path_factory.mktemp(problem.model.name)
        make_reference(problem, None, folder)
        out[problem.model.name] = folder / "reference.json"
    return out


@pytest.fixture(scope="session")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of all the driver's launches, by framework."""
    out = {}
    for framework, layouts in driver.LAYOUTS.items():
        out[framework] = tmp_path_factory.mktemp(framework)
        command = [sys.executable, driver.__file__, framework, str(out[framework]), *layouts, *driver.FAULTS, "again"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
    return out


def judge(
    runs: dict[str, Run], dirs: dict[str, Path], references: dict[str, Path], out: Path
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """The stage's summary, and its rows of weights that differ."""
    model = next(iter(runs.values())).model
    summary = make(runs, dirs, references[model.name], None, out)
    with (out / "weights.csv").open() as f:
        return summary, [row for row in csv.DictReader(f) if row["verdict"] != "equal"]


@pytest.mark.parametrize(("framework", "layout"), LAYOUTS)
def test_layout_trains_as_the_reference(
    framework: str, layout: str, launched: dict[str, Path], references: dict[str, Path], tmp_path: Path
) -> None:
    """Losses, norms and every exported weight are inside the bound that the reference runs measured."""
    run = driver.make_run(framework, layout)
    summary, wrong = judge({run.name: run}, {run.name: launched[framework] / layout}, references, tmp_path)
    assert summary["failures"] == []
    assert wrong == []
    expected = len(canonical_tensors(run.model))
    assert summary["runs"][0]["weights"] == {"expected": expected, "missing": [], "double": [], "unknown": []}
    first = (tmp_path / "losses.csv").read_text().splitlines()[1].split(",")
    assert float(first[6]) < 1e-3


@pytest.mark.parametrize(("model", "count"), [("tiny", 15), ("tiny-gpt", 3), ("tiny-scaled", 2)])
def test_frameworks_and_layouts_agree_with_each_other(
    model: str, count: int, launched: dict[str, Path], references: dict[str, Path], tmp_path: Path
) -> None:
    """All layouts of a model in one comparison: every pair is compared, across frameworks and inside each."""
    runs, dirs = {}, {}
    for framework, layout in LAYOUTS:
        run = driver.make_run(framework, layout)
        if run.model.name == model:
            runs[run.name], dirs[run.name] = run, launched[framework] / layout
    summary, wrong = judge(runs, dirs, references, tmp_path)
    assert len(summary["pairs"]) == count * (count - 1) // 2 + count * 2
    assert summary["failures"] == []
    assert wrong == []


@pytest.mark.parametrize("framework", driver.LAYOUTS)
@pytest.mark.parametrize("fault", driver.FAULTS)
def test_planted_fault_is_caught(
    framework: str, fault: str, launched: dict[str, Path], references: dict[str, Path], tmp_path: Path
) -> None:
    """Each by what it must show: a wrong forward by the first loss or norm, a missed exclusion by exactly the norms."""
    run = driver.make_run(framework, driver.FAULTY[framework])
    summary, wrong = judge({run.name: run}, {run.name: launched[framework] / fault}, references, tmp_path)
    assert summary["verdict"] == "differs"
    assert all(p["verdict"] == "differs" for p in summary["pairs"])
    why = summary["failures"][0]
    if fault == "decayed-norms":
        assert {row["tensor"] for row in wrong} == NORMS
    elif fault == "interleaved-rope":
        assert "grad_norm of step 1" in why or "loss of step 1" in why
    else:
        assert "loss of step 1" in why


@pytest.mark.parametrize("framework", driver.LAYOUTS)
def test_same_run_twice_is_bitwise_the_same(framework: str, launched: dict[str, Path]) -> None:
    """Losses and gradient norms as they were written, and the exported weights as bytes."""
    first, second = (launched[framework] / job for job in (driver.FAULTY[framework], "again"))
    ranks = [json.loads(p.read_text()) for p in sorted(first.glob("rank*.json"))]
    repeated = [json.loads(p.read_text()) for p in sorted(second.glob("rank*.json"))]
    assert [r["rank"] for r in ranks] == [0, 1]
    assert global_steps(ranks) == global_steps(repeated)
    for a, b in zip(ranks, repeated, strict=True):
        assert [(s["loss"], s["grad_norm"]) for s in a["steps"]] == [(s["loss"], s["grad_norm"]) for s in b["steps"]]
    files = sorted(p.name for p in first.glob("weights*.safetensors"))
    assert files
    assert all((first / f).read_bytes() == (second / f).read_bytes() for f in files)
