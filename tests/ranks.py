"""Two or more real ranks for a test: forked processes on gloo, results sent back, errors raised in the test."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from train_ledger.launch.rendezvous import Rendezvous


def on_ranks(world_size: int, function: Callable[[int], Any], timeout_s: float = 60) -> list[Any]:
    """`function(rank)` in each of `world_size` gloo ranks; what they return, by rank (must pickle)."""
    store = Rendezvous(world_size)
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(world_size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, world_size, store.port, function, there))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        results = [_receive(pipe, rank, timeout_s) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
            process.join()
        store.close()
    return results


def _receive(pipe: Any, rank: int, timeout_s: float) -> Any:
    if not pipe.poll(timeout_s):
        raise TimeoutError(f"rank {rank} sent nothing in {timeout_s} s")
    ok, value = pipe.recv()
    if not ok:
        raise AssertionError(f"rank {rank}:\n{value}")
    return value


def _rank(rank: int, world_size: int, port: int, function: Callable[[int], Any], pipe: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        pipe.send((True, function(rank)))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    os._exit(0)
