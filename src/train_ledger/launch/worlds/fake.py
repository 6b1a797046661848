"""World `fake`: any rank of any world alone in a process. PyTorch's `fake` group sends nothing, receives garbage.

Containers, calls and their bytes are the framework's own; losses are not reported. On a GPU the allocator is real too.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from train_ledger.launch.cuda import cuda_device
from train_ledger.launch.processes import run_forked
from train_ledger.launch.session import Rank

from . import Job
from .cpu import set_environment

#: Above so many parameters one rank at a time: a rank of the 1B shape takes 7 GiB.
SMALL_PARAMETERS = 50_000_000


def run_ranks(job: Job) -> None:
    """Starts each rank of `job.ranks` by itself, a few at a time when the model is small; see `worlds`."""
    small = job.run.model.num_parameters < SMALL_PARAMETERS and job.device == "cpu"
    run_forked(job, lambda rank: make_rank(job, rank), at_once=job.at_once or (os.cpu_count() if small else 1))


def make_rank(job: Job, rank: int) -> Rank:
    """In the child: the environment of one rank of a world that is not there."""
    # Nobody listens at this port: FakeStore needs no address, frameworks only want to read one.
    set_environment(rank, job.run.world_size, 0 if job.device == "cuda" else rank, port=29500)
    torch.set_num_threads(1 if job.run.model.num_parameters < SMALL_PARAMETERS else os.cpu_count() or 1)
    device = cuda_device(0) if job.device == "cuda" else torch.device("cpu")

    def init(timeout: timedelta) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=job.run.world_size, timeout=timeout)

    return Rank(rank, 0 if device.type == "cuda" else rank, job.run.world_size, "fake", device, init)
