"""The life of one weight through a step: empty, a shard, full, or a view of a buffer, and where its fp32 master is.

`before_*` and `after_*` are taken outside of all hooks: at the outermost module call that uses the weight, and around
the run of the autograd engine that reaches it. That shows what a framework keeps between the passes: FSDP2 hangs hooks
on the layer above, DeepSpeed prefetches. `forward` and `backward` are taken where the weight's module computes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from .census import parts, storage_key
from .watch import EngineRuns, ModuleCalls, OptimizerStep, Patch, before_backward, recomputing


class Lifeline:
    """Follows a weight while it is entered. It sends nothing and allocates nothing on a device.

    Args:
        weight: `train_ledger.launch.session.Weight`, or anything with its attributes.
        modules, engine, optimizer: watchers, entered by the caller.
    """

    def __init__(self, weight: Any, modules: ModuleCalls, engine: EngineRuns, optimizer: OptimizerStep) -> None:
        self.weight = weight
        self.events: list[dict[str, Any]] = []
        self._step = 0
        self._micro_batch = -1
        self._before: dict[str, Any] | None = None  # state where the outermost call, or the engine's run, began
        self._used: list[int] = []  # micro-batches that the weight worked for since then
        modules.enter.append(self._enter)
        modules.leave.append(self._leave)
        engine.before.append(self._backward_begins)
        engine.after.append(self._backward_ends)
        optimizer.before.append(lambda: self._note("before_optimizer"))
        optimizer.after.append(lambda: self._note("after_optimizer"))

    def begin(self, step: int) -> None:
        """A step begins: wraps the module's `forward`, which runs inside of all forward hooks."""
        self._step, self._micro_batch = step, -1
        module = self.weight.module
        original = module.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            again = recomputing()
            if not again:
                self._micro_batch += 1
                self._used_in_forward()
            output = original(*args, **kwargs)
            before_backward(output, functools.partial(self._used_in_backward, self._micro_batch))
            return output

        self._patch = Patch(module, "forward", forward)
        self._note("step_begin")

    def end(self) -> None:
        """The step has ended."""
        self._patch.undo()
        self._note("step_end")

    def to_dict(self) -> dict[str, Any]:
        """As in spec/schemas/rank.yaml, lifeline."""
        return {
            "weight": self.weight.name,
            "module": type(self.weight.module).__name__,
            "full_numel": self.weight.full_numel,
            "events": self.events,
        }

    def _enter(self, module: torch.nn.Module, depth: int) -> None:
        if depth == 0:
            self._before, self._used = self._state(), []

    def _leave(self, module: torch.nn.Module, depth: int, output: Any) -> None:
        if depth == 0 and self._used:
            self._note("after_forward", self._used[-1])
            self._used = []

    def _used_in_forward(self) -> None:
        if not self._used and self._before is not None:
            self._note("before_forward", self._micro_batch, self._before)
        self._used.append(self._micro_batch)
        self._note("forward", self._micro_batch)

    def _backward_begins(self) -> None:
        self._before_backward, self._reached = self._state(), list[int]()

    def _used_in_backward(self, micro_batch: int) -> None:
        if micro_batch in self._reached:  # checkpointing: the recomputed output has its gradient too
            return
        if not self._reached:
            self._note("before_backward", micro_batch, self._before_backward)
        self._reached.append(micro_batch)
        self._note("backward", micro_batch)

    def _backward_ends(self) -> None:
        if self._reached:
            self._note("after_backward", self._reached[-1])

    def _note(self, event: str, micro_batch: int = -1, state: dict[str, Any] | None = None) -> None:
        row = {"step": self._step, "micro_batch": micro_batch, "event": event, **(state or self._state())}
        self.events.append(row)

    def _state(self) -> dict[str, Any]:
        with torch.no_grad():
            tensor = parts(self.weight.current())[0]
            master = self.weight.master()
        key = storage_key(tensor)
        held = tensor.untyped_storage().nbytes() if key else 0
        return {
            "state": state_word(tensor.numel(), tuple(tensor.shape), self.weight.full_numel, _elements(tensor, held)),
            "dtype": str(tensor.dtype)[6:],
            "numel": tensor.numel(),
            "storage_bytes": held,
            "master": _master(master, key),
        }


def _elements(tensor: torch.Tensor, storage_bytes: int) -> int:
    return storage_bytes // tensor.element_size()


def _master(master: tuple[str, torch.Tensor] | None, key: tuple[str, int] | None) -> dict[str, Any] | None:
    if master is None:
        return None
    name, tensor = master
    tensor = parts(tensor)[0]
    return {
        "name": name,
        "dtype": str(tensor.dtype)[6:],
        "numel": tensor.numel(),
        "device": tensor.device.type,
        "same_storage": key is not None and storage_key(tensor) == key,
    }


def state_word(
    numel: int, shape: tuple[int, ...], full_numel: int, storage_numel: int, ranks: int | None = None
) -> str:
    """`empty`, `shard`, `full` or `view`.

    Args:
        numel, shape: of the tensor that the module would compute with.
        full_numel: elements of the whole weight.
        storage_numel: elements that the tensor's storage has room for.
        ranks: ranks that shards are padded for; the world's size by default.

    A whole weight in a storage with more room than padding explains is a view of a buffer. Padding is fewer rows than
    there are ranks (FSDP2 pads rows, DeepSpeed elements). One element in place of a matrix stands for nothing.
    """
    if storage_numel == 0 or numel == 0 or (numel == 1 and full_numel > 1 and shape in ((), (1,))):
        return "empty"
    if numel < full_numel:
        return "shard"
    if ranks is None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
    row = numel // shape[0] if shape else 1
    return "view" if storage_numel - numel > (ranks - 1) * row else "full"
