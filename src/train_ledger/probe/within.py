"""Memory within a step: allocated bytes on the CUDA device at the boundaries of modules, forward and backward."""

from __future__ import annotations

import time
from typing import Any

import torch

from .watch import EngineRuns, ModuleCalls, OptimizerStep, before_backward


class MemoryWithin:
    """Samples while it is watched. The allocator's counter is the host's: it says what is held when work is enqueued.

    Modules that hold other modules are sampled, not single layers. A sample that reads as the one before is left out.

    Args:
        device: a CUDA device.
        modules, engine, optimizer: watchers, entered by the caller.
    """

    def __init__(
        self, device: torch.device, modules: ModuleCalls, engine: EngineRuns, optimizer: OptimizerStep
    ) -> None:
        self.device = device
        self.events: list[dict[str, Any]] = []
        self._names: dict[int, str] = {}
        self._began = 0.0
        modules.enter.append(self._enter)
        modules.leave.append(self._leave)
        engine.before.append(lambda: self._sample("backward_begin", ""))
        engine.after.append(lambda: self._sample("backward_end", ""))
        optimizer.before.append(lambda: self._sample("optimizer_begin", ""))
        optimizer.after.append(lambda: self._sample("optimizer_end", ""))

    def begin(self) -> None:
        """The step begins."""
        self._began = time.perf_counter()
        self._sample("step_begin", "")

    def end(self) -> None:
        """The step has ended."""
        self._sample("step_end", "")

    def _enter(self, module: torch.nn.Module, depth: int) -> None:
        if depth == 0 and id(module) not in self._names:
            self._names.update({id(m): name for name, m in module.named_modules()})
        if module._modules:
            self._sample("forward_begin", self._name(module))

    def _leave(self, module: torch.nn.Module, depth: int, output: Any) -> None:
        if not module._modules:
            return
        name = self._name(module)
        self._sample("forward_end", name)
        before_backward(output, lambda: self._sample("backward", name))

    def _name(self, module: torch.nn.Module) -> str:
        return self._names.get(id(module)) or type(module).__name__

    def _sample(self, event: str, module: str) -> None:
        now = time.perf_counter() - self._began
        allocated = torch.cuda.memory_allocated(self.device)
        if self.events and self.events[-1]["allocated_bytes"] == allocated and not event.startswith("step"):
            return
        row = {"event": event, "module": module, "time_s": round(now, 6), "allocated_bytes": allocated}
        self.events.append(row)
