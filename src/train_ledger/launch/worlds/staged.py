"""The `staged` backend: collectives over host memory by gloo, for ranks that share one GPU.

NCCL refuses two ranks on one GPU, and gloo on CUDA tensors fails for point-to-point calls and crashes for coalesced
ones.
Each call here copies its tensors to host memory (pinned for CUDA), lets gloo move them, and copies the result back.
It is a
`torch.distributed.Backend` like any other: calls reach it through the c10d dispatcher, so probes see them as they see
NCCL's. Its times mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as C10dBackend
from torch.futures import Future

NAME = "staged"


class _Done(dist._Work):
    """A call that is finished when it returns: its result is already in place."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._future: Future[list[torch.Tensor]] = Future()
        self._future.set_result(result)
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Future[list[torch.Tensor]]:
        return self._future

    def result(self) -> list[torch.Tensor]:
        return self._result


class _Pending(dist._Work):
    """A send or recv: finished when waited for. Holds the host copy that gloo reads or writes until then."""

    def __init__(self, work: dist.Work, host: torch.Tensor, finish: Callable[[], None] | None) -> None:
        super().__init__()
        self._work, self._host, self._finish = work, host, finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait() if timeout is None or timeout == timedelta(0) else self._work.wait(timeout)
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()


def _empty_host(like: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
    # Pinned memory makes the copies several times faster; without CUDA there is nothing to pin for. The operator itself
    # is called: inside deepspeed.zero.Init torch.empty makes bf16 tensors on the GPU (partition_parameters.py).
    shape = like.shape if shape is None else shape
    return torch.ops.aten.empty.memory_format(shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return _empty_host(tensor).copy_(tensor.detach())


def _write(target: torch.Tensor, value: torch.Tensor) -> None:
    # detach: pipeline stages receive into tensors that require grad, and an in-place write to a leaf would be refused.
    target.detach().copy_(value.view(target.shape))


class StagedBackend(C10dBackend):
    """One group's backend. `rank` and `size` are the group's; `store` is the group's own."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._rank, self._size = rank, size

    def getBackendName(self) -> str:
        return NAME

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Megatron Core and torchtitan shorten the timeout after the first step.

        Gloo's is fixed at creation, which is longer.
        """

    # -- reductions ------------------------------------------------------------------------------------------------

    def _reduce_host(self, host: torch.Tensor, reduce_op: Any) -> torch.Tensor:
        """All-reduce of a host tensor. gloo has neither AVG nor a scaled sum: sum, then scale."""
        scale = None
        if reduce_op == dist.ReduceOp.AVG:
            reduce_op, scale = dist.ReduceOp.SUM, 1.0 / self._size
        options = dist.AllreduceOptions()
        options.reduceOp = reduce_op
        self._gloo.allreduce([host], options).wait()
        return host if scale is None else host.mul_(scale)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        for tensor in tensors:
            _write(tensor, self._reduce_host(_to_host(tensor), options.reduceOp))
        return _Done(tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        return self.allreduce(tensors, options)

    def reduce(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        for tensor in tensors:
            total = self._reduce_host(_to_host(tensor), options.reduceOp)
            if self._rank == options.rootRank:
                _write(tensor, total)
        return _Done(tensors)

    def _reduce_scatter(self, output: torch.Tensor, parts: torch.Tensor, reduce_op: Any) -> None:
        """`parts`: host tensor of size x numel(output). Sums go over an all-to-all.

        Half the traffic of an all-reduce.
        """
        if reduce_op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            received = _empty_host(output, parts.shape)
            self._gloo.alltoall_base(received, parts, [], [], dist.AllToAllOptions()).wait()
            total = received.sum(0, dtype=output.dtype)
            _write(output, total if reduce_op == dist.ReduceOp.SUM else total.mul_(1.0 / self._size))
        else:
            _write(output, self._reduce_host(parts, reduce_op)[self._rank])

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> dist.Work:
        self._reduce_scatter(output, _to_host(input).view(self._size, -1), options.reduceOp)
        return _Done([output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, tensor, options)
        return _Done(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], options: Any) -> dist.Work:
        for output, parts in zip(outputs, inputs, strict=True):
            host = _to_host(torch.stack([p.detach().reshape(-1) for p in parts]))
            self._reduce_scatter(output, host, options.reduceOp)
        return _Done(outputs)

    # -- gathers ---------------------------------------------------------------------------------------------------

    def _gather_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors in host memory, size x numel."""
        host = _to_host(tensor).view(-1)
        gathered = _empty_host(tensor, (self._size, host.numel()))
        self._gloo._allgather_base(gathered.view(-1), host).wait()
        return gathered

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> dist.Work:
        _write(output, self._gather_host(input))
        return _Done([output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor, options)
        return _Done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> dist.Work:
        for parts, tensor in zip(outputs, inputs, strict=True):
            for part, value in zip(parts, self._gather_host(tensor), strict=True):
                _write(part, value)
        return _Done([part for parts in outputs for part in parts])

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> dist.Work:
        for i, tensor in enumerate(inputs):
            gathered = self._gather_host(tensor)
            if self._rank == options.rootRank:
                for part, value in zip(outputs[i], gathered, strict=True):
                    _write(part, value)
        return _Done(inputs)

    # -- the rest --------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        for tensor in tensors:
            host = _to_host(tensor)
            forwarded = dist.BroadcastOptions()
            forwarded.rootRank = options.rootRank
            self._gloo.broadcast([host], forwarded).wait()
            if self._rank != options.rootRank:
                _write(tensor, host)
        return _Done(tensors)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], options: Any) -> dist.Work:
        for i, output in enumerate(outputs):
            host = _empty_host(output)
            forwarded = dist.ScatterOptions()
            forwarded.rootRank = options.rootRank
            parts = [[_to_host(p) for p in inputs[i]]] if self._rank == options.rootRank else []
            self._gloo.scatter([host], parts, forwarded).wait()
            _write(output, host)
        return _Done(outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        options: Any,
    ) -> dist.Work:
        host = _empty_host(output)
        forwarded = dist.AllToAllOptions()
        self._gloo.alltoall_base(host, _to_host(input), output_sizes, input_sizes, forwarded).wait()
        _write(output, host)
        return _Done([output])

    alltoall_base = all_to_all_single

    def barrier(self, options: Any) -> dist.Work:
        self._gloo.barrier().wait()
        return _Done([])

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        host = _to_host(tensors[0])
        return _Pending(self._gloo.send([host], dst, tag), host, None)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> dist.Work:
        target = tensors[0]
        host = _empty_host(target)
        return _Pending(self._gloo.recv([host], src, tag), host, lambda: _write(target, host))


def install() -> None:
    """Makes the backend known to torch.distributed, once a process, for CPU and CUDA tensors."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, StagedBackend, devices=["cpu", "cuda"])
