"""What the allocator reads, against one H200 with torch 2.14.1: the paper's runs at full shape, rank 0."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from train_ledger.predict import predict
from train_ledger.predict.device import MIB, cublas_workspace_bytes, find_device, on_device, reserved_at_least, rounded
from train_ledger.spec.config import load_run
from train_ledger.spec.errors import ConfigError

RUNS = Path(__file__).parents[2] / "config/runs"

#: Bytes of one batch of token ids and labels that the measuring script held: 8193 int64.
BATCH = 8193 * 8

#: requested_bytes.all.current and allocated_bytes.all.current at a step boundary, and batches held beside the ledger.
MEASURED = {
    "deepspeed-zero3-dp8": (3_164_274_961, 3_165_046_272, BATCH),
    "megatron-tp2-pp2-dp2": (4_598_923_460, 4_600_910_848, 8 * BATCH),
    "torchtitan-fsdp4-tp2": (3_064_472_012, 3_101_689_344, 0),
}


@pytest.mark.parametrize("name", MEASURED)
def test_paper_runs_on_an_h200(name):
    requested, allocated, batches = MEASURED[name]
    run = replace(load_run(RUNS / f"{name}.yaml"), world="nccl")
    reading = on_device(run, predict(run, [0]).ranks[0], "h200")
    assert reading.blocks_known
    assert reading.requested_bytes == requested - batches
    assert reading.allocated_bytes <= allocated <= reading.allocated_bytes + reading.slack_bytes + 8 * rounded(BATCH)
    assert sum(line.bytes for line in reading.lines if line.in_allocator and line.bytes) == reading.allocated_bytes
    assert reading.reserved_bytes >= reading.allocated_bytes


def test_workspace_follows_the_architecture():
    assert cublas_workspace_bytes(find_device("H200")) == 32 * MIB
    assert cublas_workspace_bytes(find_device("b200")) == 32 * MIB
    assert cublas_workspace_bytes(find_device("a100")) == 8_519_680


def test_blocks_are_rounded_and_packed_as_the_allocator_does():
    assert [rounded(n) for n in (1, 512, 513)] == [512, 512, 1024]
    assert reserved_at_least([(512, 1)]) == 2 * MIB
    assert reserved_at_least([(MIB, 3)]) == 4 * MIB
    assert reserved_at_least([(2 * MIB, 2)]) == 20 * MIB
    assert reserved_at_least([(11 * MIB, 1)]) == 12 * MIB


def test_unknown_device():
    with pytest.raises(ConfigError, match="--device: there is no device 'h300'; known: v100"):
        find_device("h300")
