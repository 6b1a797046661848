"""`--sdm conda`: each rule in its own environment, built from envs/*.yaml. A stand-in for conda builds with uv.

That proves rules, pins and their completeness; not conda's solver.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from working_copy import ROOT, WorkingCopy, clear_errors

from train_ledger.workflow import envs

STAND_IN = Path(__file__).parent / "conda" / "bin"


@pytest.mark.launch
def test_a_run_in_conda_environments(tmp_path: Path) -> None:
    """The framework comes from its own environment, not from the one that Snakemake runs in."""
    copy = WorkingCopy(tmp_path / "copy", {"ds": 2})
    path = os.pathsep.join([str(STAND_IN), os.environ["PATH"]])
    target = "results/small/reconcile/differences.txt"
    code, out = copy.snakemake("--sdm", "conda", "--conda-prefix", str(tmp_path / "conda"), target, PATH=path)
    assert code == 0, out
    assert "0 bytes, 0 calls unexplained" in copy.path("reconcile/differences.txt").read_text()
    built = {e.name for e in (tmp_path / "conda").iterdir() if e.is_dir()}
    assert len(built) == 2  # workflow and deepspeed
    (metadata,) = (tmp_path / "conda").glob("*/lib/python3*/site-packages/deepspeed-0.19.2.dist-info/METADATA")
    assert not (metadata.parents[1] / "snakemake").exists()
    # Another version there, and only there, is what the launch then finds.
    other = metadata.read_text(encoding="utf-8").replace("Version: 0.19.2", "Version: 9.9.9", 1)
    metadata.unlink()  # the file is a hard link into uv's cache: written in place it would spoil every later install
    metadata.write_text(other)
    copy.edit("config/comparisons/small.yaml", "^  ds:$", "  ds: {seed: 7}")
    code, out = copy.snakemake("--sdm", "conda", "--conda-prefix", str(tmp_path / "conda"), target, PATH=path)
    assert code != 0
    assert any("deepspeed 9.9.9 is installed" in line for line in clear_errors(out)), out


@pytest.mark.parametrize("name", ["workflow", "megatron", "deepspeed", "torchtitan"])
def test_the_pins_are_complete(name: str, tmp_path: Path) -> None:
    """The resolver finds nothing to add to the pins, and nothing that contradicts them."""
    pins = [p for p in envs.pins(ROOT / f"envs/{name}.yaml") if "==" in p]
    (tmp_path / "pins.in").write_text("\n".join(pins) + "\n")
    command = [ROOT / ".uv/bin/uv", "pip", "compile", "--no-header", "--no-annotate", "--python-version", "3.12"]
    done = subprocess.run([*command, tmp_path / "pins.in"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == pins
