"""A training program as small as can be, for tests of the engine: an MLP whose gradients are all-reduced by hand.

`run.settings["fault"]` plants one fault: {"kind": "kill" | "hang" | "raise" | "nan", "rank": r, "step": s}.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from train_ledger.launch.session import Owned, Rank, StepResult, Weight
from train_ledger.spec.errors import ConfigError
from train_ledger.spec.run import Run

WEIGHT = "model.layers.0.self_attn.o_proj.weight"


def warm_up() -> None:
    """Nothing to import."""


def build(run: Run, rank: Rank) -> ToySession:
    """A session."""
    if run.settings.get("refuse"):
        raise ConfigError("is refused by the toy", file=run.source or None, key="toy.refuse")
    return ToySession(run, rank)


class ToySession:
    """Data parallel over all ranks."""

    def __init__(self, run: Run, rank: Rank) -> None:
        self.run, self.rank = run, rank
        self.fault = run.settings.get("fault") or {}
        rank.init_process_group(timedelta(seconds=run.settings.get("group_timeout_s", 60)))
        torch.manual_seed(run.seed)
        h = run.model.hidden_size
        self.model = torch.nn.Sequential(torch.nn.Linear(h, 2 * h), torch.nn.ReLU(), torch.nn.Linear(2 * h, h))
        self.model.to(rank.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=run.optimizer.lr, foreach=False)
        self.coords = {"dp": rank.rank}
        self.groups = [("data_parallel", range(rank.world_size))]

    def step(self, step: int) -> StepResult:
        """One step."""
        generator = torch.Generator().manual_seed(self.run.seed * 1000 + step * 10 + self.rank.rank)
        x = torch.randn(4, self.run.model.hidden_size, generator=generator).to(self.rank.device)
        loss = self.model(x).square().mean()
        loss.backward()
        self._fault(step)
        for p in self.model.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.grad /= self.rank.world_size
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mean = loss.detach()
        dist.all_reduce(mean)
        value = mean.item() / self.rank.world_size
        if self.fault.get("kind") == "nan" and self.fault["step"] == step:
            value = float("nan")
        return StepResult(value, norm.item())

    def _fault(self, step: int) -> None:
        if self.fault.get("rank") != self.rank.rank or self.fault.get("step") != step:
            return
        kind = self.fault["kind"]
        print(f"planting {kind}", flush=True)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "hang":
            time.sleep(3600)
        elif kind == "raise":
            raise ValueError("a planted fault")

    def owners(self) -> Iterator[Owned]:
        """Parameters and moments."""
        for p in self.model.parameters():
            yield Owned("param", "framework", p)
            for name, value in self.optimizer.state[p].items():
                yield Owned(name, "optimizer", value)

    def optimizer_steps(self) -> tuple[object, str]:
        """Adam's step."""
        return self.optimizer, "step"

    def weight(self, name: str) -> Weight | None:
        """The first linear layer's weight, under the one name that the toy knows."""
        if name != WEIGHT:
            return None
        layer = self.model[0]
        return Weight(name, layer, layer.weight.numel(), lambda: layer.weight, lambda: ("param", layer.weight))

    def load_weights(self, read: Callable[[str], torch.Tensor]) -> None:
        """The toy takes its one known weight."""
        with torch.no_grad():
            self.model[0].weight.copy_(read(WEIGHT))

    def export_weights(self) -> dict[str, torch.Tensor]:
        """Rank 0 holds it."""
        return {WEIGHT: self.model[0].weight.detach().clone()} if self.rank.rank == 0 else {}

    def close(self) -> None:
        """Ends the process group."""
        dist.destroy_process_group()
