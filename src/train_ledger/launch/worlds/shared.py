"""World `shared`: all ranks on one GPU, collectives over host memory (`staged`).

Numerics, containers, calls and the CUDA allocator are real; times are not. Ranks are forked before CUDA is touched.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from train_ledger.launch.cuda import cuda_device
from train_ledger.launch.processes import run_forked
from train_ledger.launch.session import Rank

from . import Job, staged
from .cpu import rendezvous, set_environment


def run_ranks(job: Job) -> None:
    """Starts all ranks on GPU 0; see `worlds`."""
    store = rendezvous(job.run.world_size)  # held until all ranks ended
    port = store.port
    run_forked(job, lambda rank: make_rank(job, rank, port))


def make_rank(job: Job, rank: int, port: int) -> Rank:
    """In the child: every rank is local rank 0, so that each framework takes the one GPU.

    Raises:
        LaunchError: there is no GPU that can be used.
    """
    set_environment(rank, job.run.world_size, 0, port)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    device = cuda_device(0)
    staged.install()

    def init(timeout: timedelta) -> None:
        dist.init_process_group(staged.NAME, timeout=timeout)

    return Rank(rank, 0, job.run.world_size, "shared", device, init)
