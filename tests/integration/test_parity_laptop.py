"""The laptop shape, eight ranks a framework, twenty steps: no drift beyond rounding, every trained weight compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from train_ledger.spec.config import load_comparison

pytestmark = [pytest.mark.launch, pytest.mark.sweep]

ROOT = Path(__file__).parents[2]


def ledger(*words: str) -> str:
    """`train-ledger` with these words. Returns what it prints."""
    command = [sys.executable, "-m", "train_ledger.cli", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_twenty_steps_of_the_three_frameworks(tmp_path: Path) -> None:
    """Three runs and two references: every pair, every step, every tensor inside the measured bound."""
    runs = load_comparison("parity", ROOT / "config").runs
    weights = str(tmp_path / "w.safetensors")
    ledger("weights", "--model", "laptop", "--seed", "1234", "--out", weights)
    ledger("reference", "parity", "--weights", weights, "--out", str(tmp_path / "reference"))
    for name in runs:
        file, out = f"config/runs/{name}.yaml", str(tmp_path / "launch" / name)
        ledger("launch", file, "--comparison", "parity", "--weights", weights, "--export", "--out", out)
    where = ("--launch", str(tmp_path / "launch"), "--reference", str(tmp_path / "reference" / "reference.json"))
    said = ledger("parity", "parity", *where, "--weights", weights, "--out", str(tmp_path / "parity"))
    assert said.startswith("parity: 3 runs and the reference agree over 20 steps")
    summary = json.loads((tmp_path / "parity" / "parity.json").read_text())
    assert len(summary["pairs"]) == 3 + 3 * 2
    for pair in summary["pairs"]:
        assert pair["loss"]["worst"] < 1e-3
        assert all(pair[quantity] for quantity in ("loss", "grad_norm", "update", "along"))
    complete = {"expected": 39, "missing": [], "double": [], "unknown": []}
    assert [r["weights"] for r in summary["runs"]] == [complete] * 3
    assert len((tmp_path / "parity" / "losses.csv").read_text().splitlines()) == 1 + 9 * 20
