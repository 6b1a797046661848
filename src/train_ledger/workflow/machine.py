"""What a world needs of the machine that launches, asked before anything is moved for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable

from train_ledger.spec.errors import LaunchError
from train_ledger.spec.run import Run

from . import slurm
from .plan import Plan


def gpus() -> int | None:
    """GPUs that torch shows here; None where this Python has no torch that could tell."""
    # A process of its own: torch takes seconds to load, and CUDA must not be touched in a process that forks.
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stdout.split()[-1:]
    return int(last[0]) if not done.returncode and last and last[0].isdecimal() else None


def gpus_needed(plan: Plan, run: Run) -> int:
    """GPUs that a launch takes on this machine: one a rank in world `nccl`, one in `shared`, else none."""
    if run.world == "shared":
        return 1
    if run.world != "nccl":
        return 0
    hosts = plan.nodes(run)
    across = hosts > 1 and slurm.nodes_of_this_job() == hosts  # workflow/scripts/launch.py:train
    return plan.ranks_per_node(run) if across else run.world_size


def check(plan: Plan, runs: Iterable[Run], count: Callable[[], int | None] | None = None) -> None:
    """Refuses launches for which this machine has too few GPUs.

    Args:
        count: how many there are; None for `gpus`, which is not called where no run needs one.

    Raises:
        LaunchError: names the run that needs most.
    """
    most = max(runs, key=lambda run: gpus_needed(plan, run), default=None)
    needed = gpus_needed(plan, most) if most else 0
    found = (count or gpus)() if needed else None
    if most and found is not None and found < needed:
        raise LaunchError(
            f"{most.name}: world {most.world} needs {needed} GPU{'s'[: needed > 1]}, this machine shows {found}; "
            "nothing was started or moved"
        )
