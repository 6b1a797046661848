"""Census of the storages that are alive at a step boundary: who owns them, how many bytes each."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors inside a wrapper (DTensor, AsyncCollectiveTensor and the like); a plain one gives itself."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inner = (getattr(tensor, name) for name in names)  # a DTensor's mesh is among them
    return [leaf for value in inner if isinstance(value, torch.Tensor) for leaf in parts(value)]


def storage_key(tensor: torch.Tensor) -> tuple[str, int] | None:
    """Identity of a tensor's storage; None for one without memory (meta tensors, sparse ones, freed storages).

    A FakeTensor counts as what it stands for: it names the device and has a storage of the true size, without memory.
    """
    if tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()
        return (tensor.device.type, storage._cdata) if storage.nbytes() else None
    except (RuntimeError, NotImplementedError):
        return None


def census(owners: Iterable[tuple[str, str, torch.Tensor]]) -> dict[str, Any]:
    """Every living storage, once, by owner.

    Args:
        owners: (container, owner, tensor) for everything that is claimed. The first claim of a storage names it; what
            later tensors cover of the same storage is added to that container's `numel` (views of one buffer).

    Returns:
        `containers` and `other` as in spec/schemas/rank.yaml, census. Nothing is kept alive or allocated on a device.
    """
    claimed: dict[tuple[str, int], dict[str, Any]] = {}
    for name, owner, tensor in owners:
        for leaf in parts(tensor):
            key = storage_key(leaf)
            if key is None:
                continue
            storage = leaf.untyped_storage()
            entry = claimed.setdefault(
                key,
                {
                    "name": name,
                    "owner": owner,
                    "dtype": str(leaf.dtype)[6:],
                    "device": key[0],
                    "bytes": storage.nbytes(),
                    "spans": set(),
                },
            )
            entry["spans"].add((leaf.storage_offset(), leaf.numel()))
    return {"containers": _containers(claimed.values()), "other": _other(set(claimed))}


def _containers(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    out: dict[tuple[str, ...], dict[str, Any]] = {}
    blocks: dict[tuple[str, ...], Counter[int]] = {}
    for e in entries:
        key = (e["name"], e["owner"], e["dtype"], e["device"])
        row = out.setdefault(
            key,
            {"name": key[0], "owner": key[1], "dtype": key[2], "numel": 0, "bytes": 0, "storages": 0, "device": key[3]},
        )
        row["numel"] += _covered(e["spans"])
        row["bytes"] += e["bytes"]
        row["storages"] += 1
        blocks.setdefault(key, Counter())[e["bytes"]] += 1
    for key, row in out.items():
        row["blocks"] = [[size, n] for size, n in sorted(blocks[key].items(), reverse=True)]
    return [out[key] for key in sorted(out)]


def _covered(spans: set[tuple[int, int]]) -> int:
    """Elements of a storage that are covered by (offset, length) spans, overlaps once."""
    total = end = 0
    for start, length in sorted(spans):
        stop = start + length
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def _other(claimed: set[tuple[str, int]]) -> list[dict[str, Any]]:
    """Storages that the garbage collector sees and nobody claims, by dtype and shape of the largest tensor on them."""
    seen: dict[tuple[str, int], tuple[int, str, tuple[int, ...], int]] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):  # isinstance would ask lazy proxies for their class
            _note(thing, claimed, seen)
    rows = Counter((dtype, shape, size, key[0]) for key, (_, dtype, shape, size) in seen.items())
    return [
        {"dtype": dtype, "shape": list(shape), "bytes": size * n, "count": n, "device": device}
        for (dtype, shape, size, device), n in sorted(rows.items(), key=lambda kv: (-kv[0][2], kv[0]))
    ]


def _note(tensor: torch.Tensor, claimed: set[tuple[str, int]], seen: dict[Any, Any]) -> None:
    for leaf in parts(tensor):
        key = storage_key(leaf)
        if key is not None and key not in claimed and leaf.numel() >= seen.get(key, (-1,))[0]:
            seen[key] = (leaf.numel(), str(leaf.dtype)[6:], tuple(leaf.shape), leaf.untyped_storage().nbytes())
        # A gradient may be seen through its parameter only: a C++ tensor without a Python object is unknown to gc.
        if leaf.is_leaf and leaf.grad is not None and leaf.grad is not leaf:
            _note(leaf.grad, claimed, seen)
