"""FSDP2 under torch's pipeline schedules, replayed: when a stage's units are gathered and their gradients reduced.

A schedule turns off, before every backward, both the reduction of gradients and resharding; after a stage's last
backward it reduces all and reshards (torch/distributed/pipelining/stage.py:backward_maybe_with_nosync,
perform_reduce_grad). What is gathered therefore depends on the order of forwards and backwards.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .torchtitan_schedule import Action

#: The unit of final norm and head, and the two parts of it that can be reduced apart.
END = "last"
NORM, HEAD = "norm", "lm_head"


@dataclass
class Replay:
    """What one step of one stage does. Every layer does what `layers` does.

    `gathers`: all-gathers by unit and phase. `reductions`: by unit and by what of it is reduced at once: the unit's
    name for all of it, or some of `norm` and `lm_head`. `kept`: those that made the buffers in which gradients stay;
    later ones are added to them.
    """

    gathers: Counter[tuple[str, str]] = field(default_factory=Counter)
    reductions: Counter[tuple[str, tuple[str, ...]]] = field(default_factory=Counter)
    kept: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)


class _Unit:
    """One FSDP unit: whole or sharded, and which of its gradients wait to be reduced."""

    def __init__(self, name: str, reshards: bool, replay: Replay) -> None:
        self.name, self.reshards, self.replay = name, reshards, replay
        self.whole = False
        self.waiting: list[str] = []
        self.has_gradient: set[str] = set()

    def gather(self, phase: str) -> None:
        """`_fsdp_param_group.py:FSDPParamGroup.unshard` does nothing where the unit is whole."""
        if not self.whole:
            self.replay.gathers[self.name, phase] += 1
        self.whole = True

    def forward(self) -> None:
        self.gather("forward")
        self.whole = not self.reshards

    def backward(self, parts: Sequence[str]) -> None:
        self.gather("backward")
        self.waiting = [part for part in (NORM, HEAD, self.name) if part in {*self.waiting, *parts}]

    def reduce(self) -> None:
        """`FSDPParamGroup.post_backward` reduces what there is, in the order of the unit's parameters."""
        if self.waiting:
            call = self.name, tuple(self.waiting)
            self.replay.reductions[call] += 1
            if not self.has_gradient.issuperset(self.waiting):
                self.replay.kept.append(call)
            self.has_gradient.update(self.waiting)
        self.waiting = []
        self.whole = False


class _Stage:
    def __init__(self, names: Sequence[str], policy: str, chunked: bool, first: bool, replay: Replay) -> None:
        # fsdp.py:get_fsdp_reshard_after_forward_policy: by default not with pipelines. A chunked loss turns it on for
        # the unit of the head, for good (components/loss.py:ChunkedLossWrapper.__call__).
        after = policy == "always"
        self.units = [_Unit(name, after or (name == END and chunked and not first), replay) for name in names]
        self.end = next((unit for unit in self.units if unit.name == END), None) if chunked else None
        self.chunked = chunked

    def forward(self) -> None:
        for unit in self.units:
            unit.forward()
        if self.end is None:
            return
        # The loss runs the head by itself, and its backward with it; what waits of the norm's gradients goes along.
        self.end.gather("step")
        self.end.waiting.append(HEAD)
        self.end.reduce()
        self.end.reshards = True

    def backward(self) -> None:
        for unit in self.units:
            unit.backward(((NORM,) if self.chunked else (NORM, HEAD)) if unit.name == END else (unit.name,))

    def infer(self, backward: bool) -> None:
        """Before the first micro-batch a stage runs one to learn the shapes (stage.py:_forward_metadata_inference,
        _backward_metadata_inference). It asks for the gradients of its inputs alone, the first stage for none; only the
        chunked loss makes one of a weight, which is dropped.
        """
        self.forward()
        if backward:
            for unit in self.units:
                unit.gather("backward")
        for unit in self.units:
            unit.whole = False
            unit.has_gradient.clear()


@functools.lru_cache(maxsize=4096)
def replay(
    names: tuple[str, ...],
    actions: tuple[Action, ...],
    passes: int,
    policy: str,
    chunked: bool,
    first: bool,
    backward_inference: bool,
) -> Replay:
    """One step of a stage.

    Args:
        names: its units: `tok_embeddings`, `layers`, `last`, those that it has.
        actions: of this stage in one pass (`torchtitan_schedule.order`).
        passes: of a step.
        policy: `fsdp_reshard_after_forward`.
        chunked: whether the loss is chunked.
        first: step 1.
        backward_inference: whether the stage also learns the shapes of gradients: it is not the first.
    """
    out = Replay()
    stage = _Stage(names, policy, chunked, first, out)
    if first:
        stage.infer(backward_inference)
        out.kept.clear()
    for action in actions * passes:
        if action.kind == "forward":
            stage.forward()
        elif action.kind == "backward":
            stage.backward()
        else:
            for unit in stage.units:
                if action.kind == "reduce":
                    unit.reduce()
                elif action.kind == "unshard":
                    unit.gather("step")
                else:
                    unit.whole = False
    return out
