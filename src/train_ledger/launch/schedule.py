"""The learning rate of every step, one pure function for all frameworks: none of their own schedulers counts alike."""

from __future__ import annotations

import math

from train_ledger.spec.run import Optimizer


def lr_at(optimizer: Optimizer, step: int, steps: int) -> float:
    """Learning rate of optimizer step `step`, from 1 to `steps`.

    It rises linearly and reaches `lr` at step `lr_warmup_steps` (at step 1 without warm-up), then falls along half a
    cosine and reaches `min_lr` at step `steps`. A run that ends inside its warm-up never decays.
    """
    peak = max(optimizer.lr_warmup_steps, 1)
    if step <= peak:
        return optimizer.lr * step / peak
    fallen = (step - peak) / (steps - peak)
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * 0.5 * (1.0 + math.cos(math.pi * fallen))
