"""Every kind of call, on two real gloo ranks, against what was called."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

sys.path.insert(0, str(Path(__file__).parent.parent))

from ranks import on_ranks

from train_ledger.probe.collectives import CollectiveProbe
from train_ledger.probe.watch import OptimizerStep


def seen(probe: CollectiveProbe) -> Counter:
    """Rows as op, dtype, in, out -> count."""
    out: Counter = Counter()
    for row in probe.rows():
        out[row["op"], row["dtype"], row["in_numel"], row["out_numel"]] += row["count"]
    return out


def c10d_calls(rank: int) -> tuple[Counter, list]:
    other = 1 - rank
    with CollectiveProbe(1) as probe:
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(4, dtype=torch.bfloat16), src=0)
        dist.reduce(torch.ones(5), dst=0)
        dist.all_gather_into_tensor(torch.empty(12), torch.ones(6))
        dist.all_gather([torch.empty(7), torch.empty(7)], torch.ones(7))
        dist.reduce_scatter_tensor(torch.empty(8), torch.ones(16))
        dist.reduce_scatter(torch.empty(9), [torch.ones(9), torch.ones(9)])
        dist.all_to_all_single(torch.empty(10), torch.ones(10))
        dist.gather(torch.ones(11), [torch.empty(11), torch.empty(11)] if rank == 0 else None, dst=0)
        dist.scatter(torch.empty(13), [torch.ones(13), torch.ones(13)] if rank == 0 else None, src=0)
        if rank == 0:
            dist.send(torch.ones(14), 1)
            dist.recv(torch.ones(15), 1)
        else:
            dist.recv(torch.ones(14), 0)
            dist.send(torch.ones(15), 0)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, torch.ones(17), other), dist.P2POp(dist.irecv, torch.ones(17), other)]
        )
        for work in works:
            work.wait()
        dist.barrier()
    return seen(probe), probe.rows()


def test_c10d_calls_are_counted_once_with_their_sizes() -> None:
    both = on_ranks(2, c10d_calls)
    f = "float32"
    for rank, (counts, rows) in enumerate(both):
        root = rank == 0
        assert counts == Counter(
            {
                ("all_reduce", f, 3, 3): 1,
                ("broadcast", "bfloat16", 4, 4): 1,
                ("reduce", f, 5, 5): 1,
                ("all_gather", f, 6, 12): 1,
                ("all_gather", f, 7, 14): 1,
                ("reduce_scatter", f, 16, 8): 1,
                ("reduce_scatter", f, 18, 9): 1,
                ("all_to_all", f, 10, 10): 1,
                ("gather", f, 11, 22 if root else 0): 1,
                ("scatter", f, 26 if root else 0, 13): 1,
                ("send", f, 14 if root else 15, 0): 1,
                ("recv", f, 0, 15 if root else 14): 1,
                ("send", f, 17, 0): 1,
                ("recv", f, 0, 17): 1,
                ("barrier", "uint8", 0, 0): 1,
            }
        )
        assert {tuple(r["ranks"]) for r in rows} == {(0, 1)}
        assert {r["site"] for r in rows} == {"test_probe_collectives.py:c10d_calls"}
        assert {r["phase"] for r in rows} == {"step"}


def keys_and_values(rank: int) -> tuple[Counter, list]:
    from torch.distributed.tensor.experimental._context_parallel._attention import flex_cp_allgather

    group = dist.new_group([0, 1], group_desc="cp")
    k, v = (torch.ones(1, 4, heads, 3, requires_grad=True) for heads in (1, 2))
    with CollectiveProbe(1) as probe:
        for whole in flex_cp_allgather(k, v, 1, group.group_name):
            whole.sum().backward(retain_graph=True)
    return seen(probe), probe.rows()


def test_calls_inside_of_an_operator_of_torch_s_context_parallelism_are_counted() -> None:
    """One operator gathers keys and values, another scatters both gradients; each is two calls."""
    f = "float32"
    for counts, rows in on_ranks(2, keys_and_values):
        assert counts == Counter(
            {
                ("all_gather", f, 12, 24): 1,
                ("all_gather", f, 24, 48): 1,
                ("reduce_scatter", f, 24, 12): 2,
                ("reduce_scatter", f, 48, 24): 2,
            }
        )
        assert {(r["group"], tuple(r["ranks"])) for r in rows} == {("cp", (0, 1))}


def functional_calls(rank: int) -> tuple[Counter, list]:
    group = dist.new_group([0, 1], group_desc="pair")
    single = [dist.new_group([r]) for r in range(2)][rank]
    with CollectiveProbe(1) as probe:
        funcol.all_reduce(torch.ones(3), "sum", group).wait()
        funcol.all_gather_tensor(torch.ones(4), 0, group).wait()
        funcol.reduce_scatter_tensor(torch.ones(6), "sum", 0, group).wait()
        funcol.all_to_all_single(torch.ones(8), None, None, group).wait()
        funcol.broadcast(torch.ones(9), 0, group).wait()
        for t in funcol.all_reduce_coalesced([torch.ones(10), torch.ones(11)], "sum", group):
            t.wait()
        for t in funcol.all_gather_into_tensor_coalesced([torch.ones(12), torch.ones(13)], group):
            t.wait()
        for t in funcol.reduce_scatter_tensor_coalesced([torch.ones(14), torch.ones(16)], "sum", [0, 0], group):
            t.wait()
        x = torch.ones(5, requires_grad=True)
        y = funcol.all_gather_tensor_autograd(x, 0, group)
        (y * y).sum().backward()
        funcol.all_reduce(torch.ones(18), "sum", single).wait()
    return seen(probe), probe.rows()


def test_functional_calls_and_their_backward_are_counted_once() -> None:
    f = "float32"
    for rank, (counts, rows) in enumerate(on_ranks(2, functional_calls)):
        assert counts == Counter(
            {
                ("all_reduce", f, 3, 3): 1,
                ("all_gather", f, 4, 8): 1,
                ("reduce_scatter", f, 6, 3): 1,
                ("all_to_all", f, 8, 8): 1,
                ("broadcast", f, 9, 9): 1,
                ("all_reduce", f, 10, 10): 1,
                ("all_reduce", f, 11, 11): 1,
                ("all_gather", f, 12, 24): 1,
                ("all_gather", f, 13, 26): 1,
                ("reduce_scatter", f, 14, 7): 1,
                ("reduce_scatter", f, 16, 8): 1,
                ("all_gather", f, 5, 10): 1,
                ("reduce_scatter", f, 10, 5): 1,
                ("all_reduce", f, 18, 18): 1,
            }
        )
        by_size = {r["in_numel"]: r for r in rows if r["op"] in ("all_reduce", "all_gather")}
        assert by_size[3]["ranks"] == [0, 1]
        assert by_size[3]["group"] == "pair"
        assert by_size[18]["ranks"] == [rank]
        assert by_size[18]["group"] == ""
        assert [r["phase"] for r in rows if r["op"] == "reduce_scatter" and r["in_numel"] == 10] == ["backward"]


def fake_group(rank: int, world_size: int) -> None:
    """In place of gloo, which has no coalescing manager."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def coalesced_calls(rank: int) -> Counter:
    fake_group(1, 2)
    with CollectiveProbe(1) as probe:
        with dist._coalescing_manager(device=torch.device("cpu")):
            dist.all_reduce(torch.ones(3))
            dist.all_reduce(torch.ones(4))
        with dist._coalescing_manager(device=torch.device("cpu")):
            dist.all_gather_into_tensor(torch.empty(10), torch.ones(5))
            dist.all_gather_into_tensor(torch.empty(12), torch.ones(6))
        with dist._coalescing_manager(device=torch.device("cpu")):
            dist.reduce_scatter_tensor(torch.empty(7), torch.ones(14))
            dist.reduce_scatter_tensor(torch.empty(8), torch.ones(16))
    return seen(probe)


def test_coalesced_calls_have_one_row_a_tensor() -> None:
    f = "float32"
    for counts in on_ranks(1, coalesced_calls):
        assert counts == Counter(
            {
                ("all_reduce", f, 3, 3): 1,
                ("all_reduce", f, 4, 4): 1,
                ("all_gather", f, 5, 10): 1,
                ("all_gather", f, 6, 12): 1,
                ("reduce_scatter", f, 14, 7): 1,
                ("reduce_scatter", f, 16, 8): 1,
            }
        )


def dtensor_calls(rank: int) -> Counter:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with CollectiveProbe(1) as probe:
        x = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)])  # a scatter
        full = x.redistribute(mesh, [Replicate()])
        full.to_local()
        partial = x.sum()  # Partial: to_local of the whole is an all-reduce
        assert isinstance(partial.placements[0], Partial)
        partial.full_tensor()
        torch.nn.utils.get_total_norm([x]).full_tensor()
    return seen(probe)


def test_calls_that_dtensor_makes_are_seen() -> None:
    for counts in on_ranks(2, dtensor_calls):
        kinds = Counter()
        for (op, _, _, _), n in counts.items():
            kinds[op] += n
        assert counts["all_gather", "float32", 8, 16] == 1
        assert counts["all_reduce", "float32", 1, 1] == 2
        assert set(kinds) == {"scatter", "all_gather", "all_reduce"}


def fsdp_step(rank: int) -> list[dict]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 6, bias=False))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
        layer.set_force_sum_reduction_for_comms(True)
    fully_shard(model, mp_policy=policy)
    model.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in (1, 2):
        with OptimizerStep((optimizer, "step")) as watch, CollectiveProbe(step, watch) as probe:
            model(torch.ones(2, 8)).sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norm.full_tensor()
            optimizer.step()
            optimizer.zero_grad()
    return probe.rows()


def test_fsdp2_step() -> None:
    for rows in on_ranks(2, fsdp_step):
        table = {(r["op"], r["dtype"], r["in_numel"], r["phase"]): r["count"] for r in rows}
        assert table == {
            ("all_gather", "bfloat16", 32, "forward"): 1,
            ("all_gather", "bfloat16", 24, "forward"): 1,
            ("all_gather", "bfloat16", 32, "backward"): 1,
            ("all_gather", "bfloat16", 24, "backward"): 1,
            ("reduce_scatter", "float32", 64, "backward"): 1,
            ("reduce_scatter", "float32", 48, "backward"): 1,
            ("all_reduce", "float32", 2, "step"): 1,  # the norms of both parameters, stacked
        }
        gathers = {r["site"] for r in rows if r["op"] == "all_gather"}
        assert gathers == {"torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:foreach_all_gather"}


def ddp_step(rank: int) -> list[dict]:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4, bias=False))
    for step in (1, 2):
        with CollectiveProbe(step) as probe:
            model(torch.ones(2, 4)).sum().backward()
    return probe.rows()


def test_calls_from_cpp_in_backward_are_seen() -> None:
    for rows in on_ranks(2, ddp_step):
        assert [(r["in_numel"], r["phase"]) for r in rows if r["op"] == "all_reduce"] == [(16, "backward")]


class Communicating:
    """An optimizer that communicates, to tell the phase."""

    def step(self) -> None:
        """All-reduce."""
        dist.all_reduce(torch.ones(2))


def phases(rank: int) -> dict[int, str]:
    class Talks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(torch.ones(1))
            return x

    optimizer = Communicating()
    with OptimizerStep((optimizer, "step")) as watch, CollectiveProbe(1, watch) as probe:
        Talks()(torch.ones(1))
        optimizer.step()
        dist.all_reduce(torch.ones(3))
    return {r["in_numel"]: r["phase"] for r in probe.rows()}


def pipeline(rank: int) -> list[tuple[str, str]]:
    def send_forward_recv_backward() -> None:
        one, other = torch.ones(1), torch.ones(1)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, one, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
        ):
            work.wait()

    with CollectiveProbe(1) as probe:
        send_forward_recv_backward()
    return [(r["op"], r["phase"]) for r in probe.rows()]


def test_phases_of_a_pipeline() -> None:
    assert on_ranks(2, pipeline) == [[("send", "forward"), ("recv", "backward")]] * 2


def test_phases() -> None:
    assert on_ranks(2, phases) == [{1: "forward", 2: "optimizer", 3: "step"}] * 2


@pytest.mark.parametrize("world_size", [8, 1000])
def test_fake_group_of_any_size(world_size: int) -> None:
    def alone(rank: int) -> list[dict]:
        fake_group(3, world_size)
        part = dist.new_group(range(0, world_size, 2), group_desc="even")
        mine = dist.new_group(range(1, world_size, 2), group_desc="odd")
        with CollectiveProbe(1) as probe:
            dist.all_reduce(torch.ones(3))
            dist.all_gather_into_tensor(torch.empty(4 * mine.size()), torch.ones(4), group=mine)
        assert part is not None
        return probe.rows()

    rows = on_ranks(1, alone)[0]
    assert rows[0]["ranks"] == list(range(world_size))
    assert rows[1]["ranks"] == list(range(1, world_size, 2))
    assert (rows[1]["op"], rows[1]["in_numel"], rows[1]["out_numel"]) == ("all_gather", 4, 4 * (world_size // 2))
