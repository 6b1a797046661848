"""Which ranks hold which part of the followed weight, and which of them keep which elements of its fp32 master."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from train_ledger.spec.model import ModelShape, canonical_tensors
from train_ledger.spec.placement import PARTS, Kept, Slice, masters, share

from .data import Results
from .runs import config_of


def matrix_numel(results: Results, run: str) -> int:
    """Elements of the whole followed weight, before tensor parallelism splits it.

    The canonical tensor of that name says so, if the rank's slice is that tensor or its equal part. What a framework
    fuses or pads is another tensor: its slice times the tensor-parallel size.
    """
    first = results.of("lifeline", run).iloc[0]
    full, config = int(first["full_numel"]), config_of(results, run)
    tensor_parallel = int(config.get("parallel", {}).get("tensor_parallel", 1))
    fields = {name: value for name, value in config.get("model", {}).items() if name in ModelShape.__dataclass_fields__}
    known = None
    if fields:
        known = {t.name: t.numel for t in canonical_tensors(ModelShape(**fields))}.get(str(first["weight"]))
    return known if known in (full, full * tensor_parallel) else full * tensor_parallel


def part_of_matrix(numel: float, full_numel: int, matrix: int) -> str:
    """`1/8 of the matrix (1/4 of its tensor-parallel half)`: one whole for every framework, then the rank's own."""
    of_all, of_slice = share(numel, matrix), share(numel, full_numel)
    if of_all in {"none", "whole"}:
        return "whole matrix" if of_all == "whole" else "none"
    if not 0 < full_numel < matrix:
        return f"{of_all} of the matrix"
    name = PARTS.get(matrix // full_numel, "slice")
    if of_slice == "whole":
        return f"whole tensor-parallel {name} ({of_all} of the matrix)"
    return f"{of_all} of the matrix ({of_slice} of its tensor-parallel {name})"


def slices(results: Results, run: str) -> list[Slice]:
    """The slices of the followed weight by tensor-parallel coordinate, from the last event of each rank's lifeline.

    Ranks of a slice take consecutive elements of it in the order of their numbers: Megatron's distributed optimizer
    cuts each bucket in equal ranges by data-parallel rank (megatron `core/optimizer/distrib_optimizer.py:
    _build_model_gbuf_range`), DeepSpeed each parameter (`runtime/zero/partition_parameters.py:_partition_param`), FSDP2
    its rows (torch `distributed/tensor/placement_types.py:Shard`). Where what they keep does not add up to whole
    copies of the slice, elements are counted and not placed.
    """
    frame = results.of("lifeline", run)
    if frame.empty:
        return []
    coords: Mapping[int, Mapping[str, int]] = {
        r["rank"]: r["coords"] for found in results.runs if found["run"] == run for r in found["ranks"]
    }
    last = {int(rank): part.sort_values(["step", "order"]).iloc[-1] for rank, part in frame.groupby("rank", sort=True)}
    full = int(frame.iloc[0]["full_numel"])
    count = max(1, matrix_numel(results, run) // full) if full else 1
    by_slice: dict[int, list[int]] = {}
    copy_of: dict[int, tuple[int, int]] = {}
    for rank in last:
        at = coords.get(rank, {})
        by_slice.setdefault(at.get("tp", 0) if count > 1 else 0, []).append(rank)
        copy_of[rank] = (at.get("tp", 0), at.get("dp_replicate", 0))
    held = {r: int(e["master_numel"]) if e["master_name"] else 0 for r, e in last.items()}
    first: dict[int, int] = {}
    for copy in dict.fromkeys(copy_of.values()):
        first |= _firsts([r for r in last if copy_of[r] == copy], held, full)
    return [
        Slice(
            *(index, count, full, tuple(ranks)),
            tuple(Kept(r, held[r], first.get(r), copy_of[r]) for r in ranks if held[r]),
        )
        for index, ranks in sorted(by_slice.items())
    ]


def _firsts(ranks: Sequence[int], held: Mapping[int, int], full: int) -> dict[int, int]:
    """First element that each rank keeps; empty where the parts do not add up to one copy, or to a copy a rank."""
    parts = [held[r] for r in ranks]
    if parts and all(p == full for p in parts):
        return dict.fromkeys(ranks, 0)
    # The last part of a padded weight is shorter than the others, or has padding behind it.
    if not full <= sum(parts) < full + max(parts, default=0):
        return {}
    out, at = {}, 0
    for rank in ranks:
        out[rank], at = at, at + held[rank]
    return out


def master_words(results: Results, run: str) -> str:
    """Which ranks keep which part of the fp32 master, slice by slice, at the end of the recorded step."""
    found = slices(results, run)
    named = results.of("lifeline", run)
    named = named[named["master_name"] != ""]
    if named.empty:
        return "on no rank that followed the weight" if found else "not recorded"
    one = named.iloc[-1]
    itself = ", the weight itself" if one["master_same_storage"] == "True" else ""
    return f"{masters(found)} ({one['master_name']}, {one['master_dtype']}{itself})"
