"""What a framework's training program must offer, so that one loop and one set of probes serve all three in
every world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch

from train_ledger.spec.run import Run


@dataclass(frozen=True)
class Rank:
    """Where this process stands. `device` is chosen by the world; the training program never decides it.

    `init_process_group` starts torch.distributed for this world (gloo, fake, staged or nccl); the framework's program
    calls it at the point where its framework would.
    """

    rank: int
    local_rank: int
    world_size: int
    world: str
    device: torch.device
    init_process_group: Callable[[timedelta], None]


@dataclass(frozen=True)
class StepResult:
    """`loss` is the mean loss a token over the whole global batch, on every rank that can know it (else None)."""

    loss: float | None
    grad_norm: float | None


@dataclass(frozen=True)
class Owned:
    """A tensor and the container of the ledger that it belongs to (`spec.ledger.Container`'s name and owner)."""

    container: str
    owner: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class Weight:
    """The weight whose life is followed.

    `module` is the module that uses it. `current()` is the local tensor that the module would compute with right now
    (a shard, an empty shell, the whole). `master()` is the fp32 master on this rank with the name of its container,
    or None.
    `full_numel`: elements of the weight on this tensor-parallel rank, whole over data parallel.
    """

    name: str
    module: torch.nn.Module
    full_numel: int
    current: Callable[[], torch.Tensor]
    master: Callable[[], tuple[str, torch.Tensor] | None]


class Session(Protocol):
    """One rank of a framework, built and ready to step."""

    coords: dict[str, int]
    groups: list[tuple[str, Sequence[int]]]

    def step(self, step: int) -> StepResult:
        """One optimizer step, `step` from 1. Nothing of it may stay alive afterwards but what the framework keeps."""
        ...

    def owners(self) -> Iterator[Owned]:
        """Every tensor that the framework, its optimizer, the model or this program keeps between steps."""
        ...

    def optimizer_steps(self) -> tuple[object, str]:
        """The object and the name of its method that is the optimizer step, so that the probe can tell the phase."""
        ...

    def weight(self, name: str) -> Weight | None:
        """The weight of that Hugging Face Llama name.

        None where this rank does not hold it (another pipeline stage).
        """
        ...

    def load_weights(self, read: Callable[[str], torch.Tensor]) -> None:
        """Puts canonical weights into this rank's containers, fp32 master included.

        All ranks call it, before the first step.

        Args:
            read: the whole fp32 CPU tensor of a canonical name (`spec.model.canonical_tensors`), shape as stated there.

        Raises:
            DataError: a tensor that is missing or of another shape; names it. (Raised by `read`.)
        """
        ...

    def export_weights(self) -> dict[str, torch.Tensor]:
        """The fp32 master weights under canonical names, whole, on CPU. All ranks call it.

        Each name is on exactly one rank.
        """
        ...

    def close(self) -> None:
        """Ends the process group and whatever the framework started."""
        ...


class Program(Protocol):
    """A module in launch/frameworks."""

    def warm_up(self) -> None:
        """The heavy imports, before ranks are forked. Must not touch CUDA."""
        ...

    def build(self, run: Run, rank: Rank) -> Session:
        """Model, optimizer and data of one rank.

        Raises:
            ConfigError: a setting that this framework refuses.
        """
        ...
