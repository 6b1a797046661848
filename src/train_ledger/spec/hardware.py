"""What a GPU can do at most, by its datasheet, and what a model needs: for the share that a run reaches (MFU)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .model import ModelShape

#: Dense bf16 matrix rate, operations a second, by the whole name that the driver gives: cards of one chip differ.
BF16_FLOP_PER_S: dict[str, float] = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA B200": 2250e12,
}


def datasheet_rate(device_name: str) -> float | None:
    """Operations a second of that device, None where no datasheet is kept here."""
    return BF16_FLOP_PER_S.get(device_name)


def flop_per_token(config: Mapping[str, Any]) -> float:
    """Operations that training needs for one token, without recomputation.

    6 for each element of a matrix that multiplies (the embedding is looked up, not multiplied), and causal attention:
    scores and values are 2 x 2 operations for each query element and half of the sequence, three times for forward and
    backward, 6 x layers x query width x sequence in all (Megatron-LM's and PaLM's formulas with the causal half).

    Args:
        config: a resolved run, `Run.to_dict()`.
    """
    model = ModelShape(**config["model"])
    looked_up = model.vocab_size * model.hidden_size * (0 if model.tie_embeddings else 1)
    attention = 6 * model.num_layers * model.query_size * config["seq_length"]
    return float(6 * (model.num_parameters - looked_up) + attention)
