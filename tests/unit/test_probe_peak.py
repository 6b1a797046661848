"""The allocator's history of a step, by hand: the peak, and whose blocks it holds."""

from __future__ import annotations

from pathlib import Path

import torch

from train_ledger.probe.peak import NO_PYTHON, RESIDENT, peak_owners


def _event(action: str, addr: int, size: int, *frames: tuple[str, str]) -> dict:
    return {
        "action": action,
        "addr": addr,
        "size": size,
        "frames": [{"filename": file, "name": name, "line": 1} for file, name in frames],
    }


SITE = Path(torch.__file__).parent.parent
LINEAR = (f"{SITE}/torch/nn/modules/linear.py", "forward")
MLP = (f"{SITE}/megatron/core/transformer/mlp.py", "forward")
OURS = ("/home/me/train/loop.py", "step")


def test_peak_is_the_largest_sum_and_names_the_frameworks_frame():
    trace = [
        _event("alloc", 1, 100, LINEAR, MLP, OURS),
        _event("alloc", 2, 50, OURS),
        _event("free_completed", 1, 100),
        _event("alloc", 3, 40),
        _event("free_completed", 9, 30),  # was there before the history began
        _event("alloc", 4, 10, LINEAR, MLP),
    ]
    found = peak_owners(trace, before_bytes=1000)
    assert found["peak_bytes"] == 1150
    assert found["owners"] == [
        {"site": RESIDENT, "bytes": 1000, "blocks": 0},
        {"site": "megatron/core/transformer/mlp.py:forward", "bytes": 100, "blocks": 1},
        {"site": "loop.py:step", "bytes": 50, "blocks": 1},
    ]


def test_a_peak_at_the_end_after_resident_blocks_went():
    trace = [_event("free_completed", 9, 300), _event("alloc", 1, 400), _event("alloc", 2, 1, LINEAR)]
    found = peak_owners(trace, before_bytes=1000)
    assert found["peak_bytes"] == 1101
    assert {o["site"]: o["bytes"] for o in found["owners"]} == {RESIDENT: 700, NO_PYTHON: 401}


def test_what_is_beyond_the_top_is_added_up():
    trace = [_event("alloc", i, 10 * i, (f"/a/b/f{i}.py", "g")) for i in range(1, 6)]
    found = peak_owners(trace, before_bytes=0, top=2)
    assert [o["site"] for o in found["owners"]] == ["f5.py:g", "f4.py:g", "the rest"]
    assert found["owners"][-1]["bytes"] == 60
    assert sum(o["bytes"] for o in found["owners"]) == found["peak_bytes"] == 150
