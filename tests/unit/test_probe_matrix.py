"""The matrix rate: what is counted, and what a device without memory gives."""

from __future__ import annotations

import pytest
import torch

from train_ledger.probe import matrix


def test_two_operations_for_each_multiply_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product is counted, the median is of the timed ones only."""
    took = iter([100.0] * matrix.WARM_UP + [0.5, 9.0, 0.25])
    monkeypatch.setattr(matrix, "_seconds", lambda device, a, b, out: next(took))
    assert matrix.matrix_rate(torch.device("cpu"), edge=8, timed=3) == 2 * 8**3 / 0.5
    assert next(took, None) is None


def test_products_are_timed() -> None:
    small, large = (matrix.matrix_rate(torch.device("cpu"), edge=edge, timed=3) for edge in (16, 64))
    assert small
    assert large


def test_no_memory_for_it_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(matrix.torch, "randn", full)
    assert matrix.matrix_rate(torch.device("cpu")) is None
