"""`MemoryProbe` as people use it in their own scripts, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from train_ledger.probe import MemoryProbe


def test_steps_are_recorded_and_dumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    probe = MemoryProbe("mine", profile_steps=range(1, 2))
    model = torch.nn.Linear(3, 3)
    for i in range(3):
        with probe.step(i):
            model(torch.ones(1, 3)).sum().backward()
    found = probe.census(param=model.parameters(), grad=[p.grad for p in model.parameters()])
    assert {c["name"]: c["bytes"] for c in found["containers"]} == {"param": 48, "grad": 48}
    file = probe.dump(tmp_path / "sub" / "probe.json")
    assert file == tmp_path / "sub" / "probe.rank3.json"
    data = json.loads(file.read_text())
    assert data["tag"] == "mine"
    assert data["rank"] == 3
    assert [r["step"] for r in data["records"]] == [0, 1, 2]
    assert all(r["time_s"] > 0 and r["memory"] is None for r in data["records"])
    assert data["collectives"] == []
    assert data["census"] == found
    assert list(file.parent.iterdir()) == [file]


def test_a_step_that_fails_is_not_recorded() -> None:
    probe = MemoryProbe("mine", profile_steps=[1])
    with pytest.raises(ValueError, match="mine"), probe.step(1):
        raise ValueError("mine")
    assert probe.records == []
    with probe.step(1):
        pass
    assert [r["step"] for r in probe.records] == [1]


def test_the_probe_needs_nothing_but_torch() -> None:
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("yaml", "jsonschema", "megatron", "deepspeed", "torchtitan", "pandas"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
from train_ledger.probe import MemoryProbe
with MemoryProbe("t", [0]).step(0):
    pass
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
