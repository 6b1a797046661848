"""The `staged` backend against gloo on CPU tensors, four real processes: every call gives the same."""

from __future__ import annotations

import gc
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from train_ledger.launch.worlds import staged

WORLD_SIZE = 4
pytestmark = pytest.mark.launch


def _calls(rank: int) -> list[torch.Tensor]:
    """Every kind of call once, on small integers in several types, so that any order of summation is exact."""
    out: list[torch.Tensor] = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float64):
        a = torch.arange(24).remainder(7).add(rank).to(dtype)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            t = a.clone()
            dist.all_reduce(t, op)
            out.append(t)
            r = torch.empty(6, dtype=dtype)
            dist.reduce_scatter_tensor(r, a.clone(), op)
            out.append(r)
        g = torch.empty(24 * WORLD_SIZE, dtype=dtype)
        dist.all_gather_into_tensor(g, a)
        parts = [torch.empty_like(a) for _ in range(WORLD_SIZE)]
        dist.all_gather(parts, a)
        b = a.clone()
        dist.broadcast(b, 2)
        x = torch.empty_like(a)
        dist.all_to_all_single(x, a)
        send = [rank + 1] * WORLD_SIZE
        recv = [r + 1 for r in range(WORLD_SIZE)]
        z = torch.empty(sum(recv), dtype=dtype)
        dist.all_to_all_single(z, a[: sum(send)].clone(), recv, send)
        s = torch.empty(6, dtype=dtype)
        dist.scatter(s, list(a.clone().chunk(WORLD_SIZE)) if rank == 1 else None, 1)
        gathered = [torch.empty_like(a) for _ in range(WORLD_SIZE)] if rank == 3 else None
        dist.gather(a, gathered, 3)
        m = a.clone()
        dist.reduce(m, 1)
        out += [g, *parts, b, x, z, s, *(gathered or []), *([m] if rank == 1 else [])]
    return out


def _point_to_point(rank: int) -> list[torch.Tensor]:
    right, left = (rank + 1) % WORLD_SIZE, (rank - 1) % WORLD_SIZE
    got = torch.zeros(5, requires_grad=True)  # pipeline stages receive into leaves that require grad
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.full((5,), float(rank)), right), dist.P2POp(dist.irecv, got, left)]
    )
    gc.collect()  # the pending work must outlive every Python name but its own
    for work in works:
        work.wait()
    return [got.detach()]


def _staged_only(rank: int) -> None:
    """What gloo lacks or crashes on: AVG, the coalescing manager, coalesced functional calls, sub-groups, FSDP2."""
    from torch.distributed._functional_collectives import all_gather_into_tensor_coalesced

    avg = torch.full((4,), float(rank))
    dist.all_reduce(avg, dist.ReduceOp.AVG)
    assert torch.equal(avg, torch.full((4,), 1.5))
    scattered = torch.empty(1)
    dist.reduce_scatter_tensor(scattered, torch.full((4,), float(rank)), dist.ReduceOp.AVG)
    assert scattered.item() == 1.5
    ins = [torch.full((2,), float(rank)), torch.full((3,), float(10 + rank))]
    outs = [torch.empty(8), torch.empty(12)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for o, i in zip(outs, ins, strict=True):
            dist.all_gather_into_tensor(o, i)
    manager.wait()
    assert outs[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    reduced = [torch.empty(1), torch.empty(1)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for o in reduced:
            dist.reduce_scatter_tensor(o, torch.arange(4.0))
    manager.wait()
    assert reduced[1].item() == 4 * rank
    functional = all_gather_into_tensor_coalesced(ins, dist.group.WORLD)
    assert torch.equal(functional[1], outs[1])
    pair = dist.new_group([0, 2])
    if rank in (0, 2):
        t = torch.tensor([float(rank)])
        dist.all_reduce(t, group=pair)
        assert t.item() == 2


def _train(rank: int) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses = []
    for _ in range(3):
        loss = model(torch.full((2, 5), float(rank + 1))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _rank(rank: int, ports: dict[str, int], out: str) -> None:
    torch.set_num_threads(1)
    staged.install()
    for backend, port in ports.items():
        dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD_SIZE)
        results = _calls(rank) + _point_to_point(rank)
        training = _train(rank)
        if backend == "staged":
            _staged_only(rank)
        dist.barrier()
        torch.save((results, training), f"{out}/{backend}{rank}.pt")
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_staged_equals_gloo(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ports = {backend: _free_port() for backend in ("gloo", "staged")}
    mp.start_processes(_rank, (ports, str(tmp_path)), nprocs=WORLD_SIZE, start_method="spawn")
    for rank in range(WORLD_SIZE):
        gloo, through_host = (torch.load(tmp_path / f"{b}{rank}.pt") for b in ("gloo", "staged"))
        assert len(gloo[0]) == len(through_host[0]) > 50
        for a, b in zip(gloo[0], through_host[0], strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        for a, b in zip(gloo[1], through_host[1], strict=True):
            torch.testing.assert_close(a, b)
