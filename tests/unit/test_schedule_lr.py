"""The learning rate of each step."""

from __future__ import annotations

import itertools

import pytest

from train_ledger.launch.schedule import lr_at
from train_ledger.spec.run import Optimizer


def test_warm_up_then_cosine() -> None:
    """Linear up to the peak, half a cosine down to the least."""
    o = Optimizer(lr=1.0, min_lr=0.1, lr_warmup_steps=4)
    rates = [lr_at(o, step, 10) for step in range(1, 11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[6] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(rates[3:]))


def test_no_warm_up_starts_at_the_peak() -> None:
    """And a run that ends in its warm-up only rises."""
    o = Optimizer(lr=2.0, min_lr=0.0)
    assert lr_at(o, 1, 5) == 2.0
    assert lr_at(o, 5, 5) == pytest.approx(0.0)
    assert lr_at(o, 1, 1) == 2.0
    short = Optimizer(lr=1.0, lr_warmup_steps=10)
    assert [lr_at(short, s, 4) for s in (1, 4)] == [0.1, 0.4]
