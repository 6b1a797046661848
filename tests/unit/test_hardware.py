"""The share of a GPU's rate: operations of a token, by hand."""

from __future__ import annotations

from pathlib import Path

from train_ledger.spec.config import load_run
from train_ledger.spec.hardware import datasheet_rate, flop_per_token

RUNS = Path(__file__).parents[2] / "config" / "runs"


def test_operations_of_a_token_of_the_1b_shape():
    config = load_run(RUNS / "megatron-1gpu.yaml").to_dict()
    matrices = 1_498_482_688 - 128_256 * 2_048
    assert flop_per_token(config) == 6 * matrices + 6 * 16 * 2_048 * 8_192


def test_a_tied_head_multiplies():
    config = load_run(RUNS / "megatron-1gpu.yaml").to_dict()
    config["model"]["tie_embeddings"] = True
    assert flop_per_token(config) == 6 * (1_498_482_688 - 128_256 * 2_048) + 6 * 16 * 2_048 * 8_192


def test_rates_are_known_by_the_drivers_name_only():
    assert datasheet_rate("NVIDIA H200") == datasheet_rate("NVIDIA H100 80GB HBM3") == 989e12
    assert datasheet_rate("NVIDIA A100-SXM4-80GB") == 312e12
    assert datasheet_rate("NVIDIA H100 PCIe") == 756e12
    assert datasheet_rate("NVIDIA H200 of another kind") is None
    assert datasheet_rate("NVIDIA Tesla T4") is None
    assert datasheet_rate("") is None
