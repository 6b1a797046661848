"""Watching a step from outside: module calls, runs of the autograd engine, the optimizer's step.

Each watcher puts a wrapper in place while it is entered and takes it away again. The wrappers stand outside of all
hooks of a framework: they see the state before the first hook ran and after the last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable


def recomputing() -> bool:
    """Whether this thread is inside of the autograd engine: a module that is called there recomputes activations."""
    return torch._C._current_graph_task_id() != -1


class OptimizerStep:
    """Says whether the optimizer's step is running, and calls back before and after it.

    The wrapper is put on the one object, not on its class. (Code objects in the stack would not tell: DeepSpeed wraps
    most of its methods in one and the same function.)

    Args:
        method: (object, method name); None means that nothing is watched.
    """

    def __init__(self, method: tuple[object, str] | None) -> None:
        self.method = method
        self.running = 0
        self.before: list[Callable[[], None]] = []
        self.after: list[Callable[[], None]] = []

    def __enter__(self) -> OptimizerStep:
        if self.method is not None:
            original = getattr(*self.method)

            @functools.wraps(original)
            def step(*args: Any, **kwargs: Any) -> Any:
                if self.running:
                    return original(*args, **kwargs)
                for call in self.before:
                    call()
                self.running += 1
                try:
                    out = original(*args, **kwargs)
                finally:
                    self.running -= 1
                for call in self.after:
                    call()
                return out

            self._patch = Patch(*self.method, step)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.method is not None:
            self._patch.undo()


class Patch:
    """An attribute of one object, replaced until `undo`."""

    def __init__(self, thing: Any, name: str, value: Any) -> None:
        self.thing, self.name = thing, name
        self.had = vars(thing).get(name)
        setattr(thing, name, value)

    def undo(self) -> None:
        """What was there before, or nothing."""
        if self.had is None:
            delattr(self.thing, self.name)
        else:
            setattr(self.thing, self.name, self.had)


class ModuleCalls:
    """Calls back around every call of a module in the forward pass; recomputation inside of the engine is passed over.

    `enter(module, depth)` runs before all forward pre-hooks, `leave(module, depth, output)` after all forward hooks;
    depth 0 is a call that no other module's call encloses.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.enter: list[Callable[[torch.nn.Module, int], None]] = []
        self.leave: list[Callable[[torch.nn.Module, int, Any], None]] = []

    def __enter__(self) -> ModuleCalls:
        original = torch.nn.Module.__call__

        @functools.wraps(original)
        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if recomputing() or not (self.enter or self.leave):
                return original(module, *args, **kwargs)
            depth = self.depth
            for enter in self.enter:
                enter(module, depth)
            self.depth += 1
            try:
                output = original(module, *args, **kwargs)
            finally:
                self.depth = depth
            for leave in self.leave:
                leave(module, depth, output)
            return output

        self._patch = Patch(torch.nn.Module, "__call__", call)
        return self

    def __exit__(self, *exc: object) -> None:
        self._patch.undo()


class EngineRuns:
    """Calls back around each outermost run of the autograd engine, its final callbacks included.

    All ways lead through `Variable._execution_engine.run_backward`: torch.autograd.backward, and Megatron Core's own
    `pipeline_parallel/schedules.py:custom_backward`.
    """

    def __init__(self) -> None:
        self.running = 0
        self.before: list[Callable[[], None]] = []
        self.after: list[Callable[[], None]] = []

    def __enter__(self) -> EngineRuns:
        self._patch = Patch(Variable, "_execution_engine", _Engine(Variable._execution_engine, self))
        return self

    def __exit__(self, *exc: object) -> None:
        self._patch.undo()


class _Engine:
    """The engine with a watched `run_backward`; all else is the engine's own."""

    def __init__(self, engine: Any, watch: EngineRuns) -> None:
        self._engine, self._watch = engine, watch

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's."""
        watch = self._watch
        if watch.running:
            return self._engine.run_backward(*args, **kwargs)
        for call in watch.before:
            call()
        watch.running += 1
        try:
            out = self._engine.run_backward(*args, **kwargs)
        finally:
            watch.running -= 1
        for call in watch.after:
            call()
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def before_backward(output: Any, call: Callable[[], None]) -> None:
    """Calls back when the backward of a module's output is about to compute: its gradient has arrived.

    What a framework hangs on the tensor (FSDP2 gathers there) has then been done: the engine runs the hooks of a tensor
    before those of a node.
    """
    tensor = _first_with_gradient(output)
    if tensor is None:
        return
    if tensor.grad_fn is not None:
        tensor.grad_fn.register_prehook(lambda grads: call())
    else:
        tensor.register_hook(lambda grad: call())


def _first_with_gradient(output: Any) -> torch.Tensor | None:
    """The first tensor of a module's output (tensor, tuple, list, mapping, nested) that a gradient will come to."""
    if isinstance(output, torch.Tensor):
        return output if output.requires_grad else None
    values = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    for value in values:
        found = _first_with_gradient(value)
        if found is not None:
            return found
    return None
