"""World `cpu`: every rank a process on this machine, gloo over the loopback, no GPU."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from train_ledger.launch.processes import run_forked
from train_ledger.launch.rendezvous import Rendezvous
from train_ledger.launch.session import Rank

from . import Job


def run_ranks(job: Job) -> None:
    """Starts all ranks; see `worlds`."""
    store = rendezvous(job.run.world_size)
    port = store.port
    try:
        run_forked(job, lambda rank: make_rank(job, rank, port))
    finally:
        store.close()


def rendezvous(world_size: int) -> Rendezvous:
    """The store at which ranks meet; it ends when it is closed or forgotten."""
    return Rendezvous(world_size)


def make_rank(job: Job, rank: int, port: int) -> Rank:
    """In the child: the environment that torch.distributed and the frameworks read, one thread, gloo."""
    set_environment(rank, job.run.world_size, rank, port)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)

    def init(timeout: timedelta) -> None:
        dist.init_process_group("gloo", timeout=timeout)

    return Rank(rank, rank, job.run.world_size, "cpu", torch.device("cpu"), init)


def set_environment(rank: int, world_size: int, local_rank: int, port: int) -> None:
    """What torchrun would set. The store is served by the launcher, as torchrun's agent serves its own."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
        OMP_NUM_THREADS="1",
    )
