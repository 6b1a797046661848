"""The lifeline outside and inside of FSDP2's hooks, on two real ranks: it must cost no call and no memory."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from ranks import on_ranks

from train_ledger.probe import MemoryProbe
from train_ledger.probe.census import census


class Layer(torch.nn.Module):
    """FSDP2 hangs its hooks on this one; the weight is a level below."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def train(follow: bool) -> tuple[list, list, dict]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    gc.collect()
    torch.manual_seed(0)
    model = torch.nn.Sequential(Layer(), Layer(), Layer())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model, model):
        fully_shard(part, mp_policy=policy)
        part.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inner = model[1].inner
    sharded = inner.weight

    def local() -> torch.Tensor:
        return inner.weight.to_local() if hasattr(inner.weight, "to_local") else inner.weight

    weight = SimpleNamespace(
        name="w", module=inner, full_numel=36, current=local, master=lambda: ("param", sharded.to_local())
    )
    probe = MemoryProbe("t", [2], optimizer=(optimizer, "step"), weight=weight if follow else None)
    for step in (1, 2):
        with probe.step(step):
            for _ in range(2):
                model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    events = [
        (e["micro_batch"], e["event"], e["state"], e["dtype"], e["numel"])
        for e in (probe.lifeline["events"] if probe.lifeline else [])
    ]
    del weight, local
    gc.collect()
    return events, probe.collectives, census([])


def both(rank: int) -> tuple[tuple, tuple]:
    train(False)  # what torch keeps once and for all
    return train(False), train(True)


def test_fsdp2() -> None:
    shard, full = ("shard", "float32", 18), ("full", "bfloat16", 36)
    passes = [
        (i, f"{when}{way}", *state)
        for i in (0, 1)
        for way in ("forward", "backward")
        for when, state in (("before_", shard), ("", full), ("after_", shard))
    ]
    for (_, calls, alive), (events, calls_followed, alive_followed) in on_ranks(2, both):
        assert events == [
            (-1, "step_begin", *shard),
            *passes,
            (-1, "before_optimizer", *shard),
            (-1, "after_optimizer", *shard),
            (-1, "step_end", *shard),
        ]
        assert calls_followed == calls
        assert sum(o["bytes"] for o in alive_followed["other"]) == sum(o["bytes"] for o in alive["other"])
