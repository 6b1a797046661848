"""The lifeline of a weight in a plain model: order of events, micro-batches, recomputation, and nothing left behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

from train_ledger.probe import MemoryProbe
from train_ledger.probe.lifeline import state_word
from train_ledger.probe.watch import recomputing

STEP = ["before_optimizer", "after_optimizer", "step_end"]
FORWARD = ["before_forward", "forward", "after_forward"]
BACKWARD = ["before_backward", "backward", "after_backward"]


@pytest.mark.parametrize(
    ("numel", "shape", "full", "storage", "ranks", "word"),
    [
        (0, (0,), 3600, 0, 8, "empty"),
        (1, (1,), 3600, 1, 8, "empty"),
        (1, (), 3600, 1, 8, "empty"),
        (3600, (60, 60), 3600, 0, 8, "empty"),  # its storage was freed
        (450, (450,), 3600, 450, 8, "shard"),
        (900, (15, 60), 3600, 52864, 8, "shard"),
        (3600, (60, 60), 3600, 3600, 8, "full"),
        (3600, (60, 60), 3600, 3840, 8, "full"),  # padded to 64 rows
        (3605, (3605,), 3605, 3608, 8, "full"),  # padded to 8 elements
        (1800, (60, 30), 1800, 52864, 8, "view"),
        (3600, (60, 60), 3600, 3601, 1, "view"),
        (1, (1,), 1, 1, 8, "full"),
    ],
)
def test_state_word(numel: int, shape: tuple, full: int, storage: int, ranks: int, word: str) -> None:
    assert state_word(numel, shape, full, storage, ranks) == word


class Block(torch.nn.Module):
    """Two layers, the second of them recomputed on demand."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return checkpoint(self.second, x, use_reentrant=False) if self.recompute else self.second(x)


def run(model: Block, probe_of: torch.nn.Linear, schedule: str) -> list[tuple[int, str]]:
    """Train one step; `schedule` is a word of f and b, a forward and a backward each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = SimpleNamespace(
        name="w",
        module=probe_of,
        full_numel=16,
        current=lambda: probe_of.weight,
        master=lambda: ("param", probe_of.weight),
    )
    probe = MemoryProbe("t", [1], optimizer=(optimizer, "step"), weight=weight)
    losses: list[torch.Tensor] = []
    with probe.step(1):
        for letter in schedule:
            if letter == "f":
                losses.append(model(torch.ones(2, 4)).sum())
            else:
                losses.pop(0).backward()
        optimizer.step()
    assert probe.lifeline is not None
    assert {e["state"] for e in probe.lifeline["events"]} == {"full"}
    assert all(e["master"]["same_storage"] for e in probe.lifeline["events"])
    return [(e["micro_batch"], e["event"]) for e in probe.lifeline["events"]]


def expected(*parts: tuple[int, list[str]]) -> list[tuple[int, str]]:
    return [(-1, "step_begin"), *((i, event) for i, events in parts for event in events), *((-1, e) for e in STEP)]


@pytest.mark.parametrize("recompute", [False, True])
def test_one_micro_batch(recompute: bool) -> None:
    model = Block(recompute)
    assert run(model, model.second, "fb") == expected((0, FORWARD), (0, BACKWARD))


def test_accumulation_and_one_forward_one_backward() -> None:
    model = Block(True)
    assert run(model, model.second, "fbfb") == expected((0, FORWARD), (0, BACKWARD), (1, FORWARD), (1, BACKWARD))
    assert run(model, model.first, "ffbb") == expected((0, FORWARD), (1, FORWARD), (0, BACKWARD), (1, BACKWARD))


def test_a_backward_that_does_not_reach_the_weight_is_no_event() -> None:
    model = Block(False)
    other = torch.nn.Linear(4, 4)
    weight = SimpleNamespace(
        name="w", module=model.first, full_numel=16, current=lambda: model.first.weight, master=lambda: None
    )
    probe = MemoryProbe("t", [1], weight=weight)
    with probe.step(1):
        other(torch.ones(1, 4)).sum().backward()
    assert probe.lifeline is not None
    assert [e["event"] for e in probe.lifeline["events"]] == ["step_begin", "step_end"]
    assert probe.lifeline["events"][0]["master"] is None


def test_everything_is_put_back() -> None:
    model = Block(False)
    call, engine = torch.nn.Module.__call__, Variable._execution_engine
    run(model, model.first, "fb")
    assert torch.nn.Module.__call__ is call
    assert Variable._execution_engine is engine
    assert "forward" not in vars(model.first)
    assert not recomputing()


def test_everything_is_put_back_after_an_error() -> None:
    model = Block(False)
    call, engine = torch.nn.Module.__call__, Variable._execution_engine
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run_wrong(model)
    assert torch.nn.Module.__call__ is call
    assert Variable._execution_engine is engine
    assert "forward" not in vars(model.first)


def run_wrong(model: Block) -> None:
    weight = SimpleNamespace(
        name="w", module=model.first, full_numel=16, current=lambda: model.first.weight, master=lambda: None
    )
    with MemoryProbe("t", [1], weight=weight).step(1):
        model(torch.ones(2, 5))


def test_gradients_are_the_same_with_and_without() -> None:
    torch.manual_seed(0)
    model = Block(True)
    model(torch.ones(2, 4)).sum().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    weight = SimpleNamespace(
        name="w", module=model.second, full_numel=16, current=lambda: model.second.weight, master=lambda: None
    )
    with MemoryProbe("t", [1], weight=weight).step(1):
        model(torch.ones(2, 4)).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True) if p.grad is not None)
