"""The three frameworks, really launched: layouts train as the plain reference does, and planted faults are caught."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """reference.json of the problem that the driver's runs work on."""
    out = tmp_path_factory.mktemp("reference")
    make_reference(Problem.of(driver.make_run("deepspeed", "zero3")), None, out)
    return out / "reference.json"


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


def judge(runs: dict[str, Run], dirs: dict[str, Path], reference: Path, out: Path) -> tuple[dict, list[dict[str, str]]]:
    """The stage's summary, and its rows of weights that differ."""
    import csv

    summary = make(runs, dirs, reference, None, out)
    with (out / "weights.csv").open() as f:
        return summary, [row for row in csv.DictReader(f) if row["verdict"] != "equal"]


@pytest.mark.parametrize(("framework", "layout"), LAYOUTS)
def test_layout_trains_as_the_reference(
    framework: str, layout: str, launched: dict[str, Path], reference: Path, tmp_path: Path
) -> None:
    """Losses, norms and every exported weight are inside the bound that the reference runs measured."""
    run = driver.make_run(framework, layout)
    summary, wrong = judge({run.name: run}, {run.name: launched[framework] / layout}, reference, tmp_path)
    assert summary["failures"] == []
    assert wrong == []
    assert summary["runs"][0]["weights"] == {"expected": 21, "missing": [], "double": [], "unknown": []}
    first = (tmp_path / "losses.csv").read_text().splitlines()[1].split(",")
    assert float(first[6]) < 1e-3


def test_frameworks_and_layouts_agree_with_each_other(
    launched: dict[str, Path], reference: Path, tmp_path: Path
) -> None:
    """All twelve layouts in one comparison: every pair is compared, across frameworks and inside each."""
    runs = {run.name: run for run in (driver.make_run(*both) for both in LAYOUTS)}
    dirs = {driver.make_run(f, layout).name: launched[f] / layout for f, layout in LAYOUTS}
    summary, wrong = judge(runs, dirs, reference, tmp_path)
    assert len(summary["pairs"]) == 12 * 11 // 2 + 12 * 2
    assert summary["failures"] == []
    assert wrong == []


@pytest.mark.parametrize("framework", driver.LAYOUTS)
@pytest.mark.parametrize("fault", driver.FAULTS)
def test_planted_fault_is_caught(
    framework: str, fault: str, launched: dict[str, Path], reference: Path, tmp_path: Path
) -> None:
    """Each by what it must show: a wrong forward by the first loss or norm, a missed exclusion by exactly the norms."""
    run = driver.make_run(framework, driver.FAULTY[framework])
    summary, wrong = judge({run.name: run}, {run.name: launched[framework] / fault}, reference, tmp_path)
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
