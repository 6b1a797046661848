"""Every collective and point-to-point call of a step, at the dispatcher: the same on gloo, fake, staged and NCCL.

`torch.distributed` and the functional collectives both end in operators of the namespaces c10d and _c10d_functional. A
dispatch mode sees each once, also in backward and from C++ (DDP's reducer). It does not see what a backend does inside:
gloo's reduce-scatter is an all-reduce, which is not the framework's doing.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .stack import call_site
from .watch import OptimizerStep

#: Operators of cplib call others inside, which a mode does not see since it is left while one of them runs.
NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "cplib")
#: Operator -> the ledger's word. Suffixes (`_`, `_coalesced`, `_out`) are taken off first, see `_word`.
WORDS = {
    "all_reduce": "all_reduce",
    "flex_cp_allgather": "all_gather",
    "flex_cp_allgather_backward": "reduce_scatter",
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "all_gather_into_tensor": "all_gather",
    "allgather_into_tensor": "all_gather",
    "_allgather_base": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "alltoall_base": "all_to_all",
    "alltoall": "all_to_all",
    "gather": "gather",
    "gather_into_tensor": "gather",
    "scatter": "scatter",
    "send": "send",
    "isend": "send",
    "recv": "recv",
    "recv_any_source": "recv",
    "irecv": "recv",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
}
#: Those of c10d whose first argument is the output and second the input; the rest work in place on one list.
TWO_SIDED = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


class CollectiveProbe(TorchDispatchMode):
    """Counts calls while it is entered.

    Args:
        step: number that goes into the rows.
        optimizer: tells whether the optimizer's step is running.
    """

    def __init__(self, step: int, optimizer: OptimizerStep | None = None) -> None:
        super().__init__()
        self.step, self._optimizer = step, optimizer or OptimizerStep(None)
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self._groups: dict[str, tuple[tuple[int, ...], str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a communication operator, then run it."""
        # Left to themselves first, DTensor and AsyncCollectiveTensor come back with the calls that they make.
        if any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func.namespace in NAMESPACES:
            self._note(func, args, kwargs or {}, out)
        return out

    def rows(self) -> list[dict[str, Any]]:
        """As in spec/schemas/rank.yaml, collectives: in the order of their first call."""
        keys = ("op", "ranks", "group", "dtype", "in_numel", "out_numel", "phase", "site")
        return [
            {"step": self.step, **dict(zip(keys, key, strict=True)), "ranks": list(key[1]), "count": n}
            for key, n in self._counts.items()
        ]

    def _note(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        name = func._schema.name.split("::")[1]
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        group = next((named[key] for key in ("process_group", "group_name", "pg_name") if key in named), None)
        if group is None:  # wait_tensor, check_for_nan and the like send nothing
            return
        ranks, group = self._group(group)
        site, phase = call_site(sys._getframe(2), _word(name))
        phase = "optimizer" if self._optimizer.running else phase
        for op, dtype, in_numel, out_numel in _transfers(func.namespace, name, named, out):
            self._counts[op, ranks, group, dtype, in_numel, out_numel, phase, site] += 1

    def _group(self, group: Any) -> tuple[tuple[int, ...], str]:
        """Global ranks of a group and its description, from the group or from its name (functional operators)."""
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        name = group if isinstance(group, str) else group.group_name
        if name not in self._groups:
            if isinstance(group, str):
                group = dist.distributed_c10d._resolve_process_group(group)
            described = group.group_desc
            said = "" if described in (None, "undefined") else described
            self._groups[name] = tuple(dist.get_process_group_ranks(group)), said
        return self._groups[name]


def _word(name: str) -> str:
    """The ledger's word for an operator; the operator's own name if there is none, so that nothing is lost silently."""
    for suffix in ("", "_", "_coalesced", "_coalesced_", "_out"):
        stem = name.removesuffix(suffix) if suffix else name
        if stem in WORDS:
            return WORDS[stem]
    return name


def _transfers(space: str, name: str, named: dict[str, Any], out: Any) -> Iterator[tuple[str, str, int, int]]:
    """(op, dtype, in_numel, out_numel) of each payload of an operator; a coalesced call has one for each tensor.

    c10d writes into its arguments; the others return their output.
    """
    op = _word(name)
    if name == "batch_p2p_ops":
        for kind, tensor in zip(named["op_list"], named["tensors"], strict=True):
            yield _one_sided("send" if "send" in kind else "recv", tensor)
    elif space == "c10d":
        first, second, *_ = named.values()
        if op == "barrier":
            yield op, _dtype(first), 0, 0
        elif op in TWO_SIDED:
            if name == "allgather_coalesced_":  # a list a rank, each with a tensor for every input
                first = list(zip(*first, strict=True))
            # alltoall_ has one tensor a peer on both sides and is one call; the others pair their lists up.
            pairs = [(first, second)] if isinstance(first, torch.Tensor) or op == "all_to_all" else _pair(first, second)
            for output, source in pairs:
                yield op, _dtype(source) or _dtype(output), _numel(source), _numel(output)
        else:
            for tensor in first:
                yield _one_sided(op, tensor)
    else:
        first, second, *_ = (*named.values(), None)
        # Keys and values, one call each (torch's _context_parallel/_cp_custom_ops.py:flex_cp_allgather).
        sources = [first, second] if space == "cplib" else first
        if op in ("send", "recv"):
            yield _one_sided(op, sources)
        else:
            for source, output in _pair(_listed(sources), _listed(out)):
                yield op, _dtype(source), _numel(source), _numel(output)


def _one_sided(op: str, tensor: torch.Tensor) -> tuple[str, str, int, int]:
    n = tensor.numel()
    return op, _dtype(tensor), 0 if op == "recv" else n, 0 if op == "send" else n


def _pair(first: Sequence[Any], second: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Pairs of two lists; the shorter is filled up with nothing (a gather has no output but on its root)."""
    for i in range(max(len(first), len(second))):
        yield (first[i] if i < len(first) else []), (second[i] if i < len(second) else [])


def _listed(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, torch.Tensor) else value


def _numel(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else sum(map(_numel, value))


def _dtype(value: Any) -> str:
    while not isinstance(value, torch.Tensor):
        if not value:
            return ""
        value = value[0]
    return str(value.dtype)[6:]
