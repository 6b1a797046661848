"""The examples run as they stand, on the CPU: a person's own loop in each framework, the probe around its steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, ranks: int, folder: Path) -> dict:
    """The example under torchrun, or alone in one process; what its last rank wrote."""
    script = [str(EXAMPLES / f"{name}_loop.py"), "--out", str(folder / "probe.json")]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(torchrun if ranks > 1 else []), *script]
    env = {**os.environ, **(alone if ranks == 1 else {}), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / f"probe.rank{ranks - 1}.json").read_text())


@pytest.mark.launch
@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("deepspeed", 2, {("all_gather", "bfloat16", "forward"), ("reduce_scatter", "bfloat16", "backward")}),
        ("megatron", 1, {("reduce_scatter", "bfloat16", "backward"), ("all_gather", "bfloat16", "optimizer")}),
        ("torchtitan", 2, {("all_gather", "bfloat16", "forward"), ("reduce_scatter", "float32", "backward")}),
    ],
)
def test_example(name: str, ranks: int, expected: set, tmp_path: Path) -> None:
    data = run(name, ranks, tmp_path)
    first = 1 if name == "torchtitan" else 0
    assert [r["step"] for r in data["records"]] == [first + i for i in range(4)]
    assert {c["step"] for c in data["collectives"]} == {2}
    calls = {(c["op"], c["dtype"], c["phase"]) for c in data["collectives"]}
    assert expected <= calls, calls
    assert {tuple(c["ranks"]) for c in data["collectives"]} == {tuple(range(ranks))}
