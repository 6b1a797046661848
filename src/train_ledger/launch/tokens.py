"""One stream of synthetic tokens for all frameworks, by global sample index.

Independent of layout, split and accumulation.
"""

from __future__ import annotations

import numpy as np


def sample(seed: int, index: int, length: int, vocab_size: int) -> np.ndarray:
    """`length` token ids of global sample `index`, int64, uniform over [0, vocab_size).

    Each sample has a generator of its own, so that any rank can make any sample alone. A model of `seq_length` s
    needs s + 1
    tokens: inputs are [:-1], labels [1:].
    """
    return np.random.default_rng([seed, index]).integers(0, vocab_size, size=length, dtype=np.int64)


def step_samples(step: int, global_batch: int) -> range:
    """Global indices of the samples of optimizer step `step` (from 1)."""
    return range((step - 1) * global_batch, step * global_batch)
