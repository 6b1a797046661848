"""Which ranks hold which part of the followed weight, and which of them keep which elements of its fp32 master."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import pandas as pd

from train_ledger.reconcile.compare import rank_ranges
from train_ledger.spec.model import ModelShape, canonical_tensors

from .data import Results
from .runs import config_of
from .text import plural

#: What an equal part of a matrix is called.
PARTS = {2: "half", 4: "quarter"}


def share(numel: float, full_numel: int) -> str:
    """`1/8` or `whole`; a share that is no simple fraction (padding) with `≈`."""
    if not full_numel or pd.isna(numel):
        return "none"
    exact = Fraction(int(numel), full_numel)
    if exact >= 1:
        return "whole"
    simple = exact.limit_denominator(64)
    return f"{simple.numerator}/{simple.denominator}" if simple == exact else f"≈ {float(exact):.3f}"


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


@dataclass(frozen=True)
class Kept:
    """Elements of the master that a rank keeps: `numel` of them, from `first` of its slice on; None if not known.

    Ranks of one `copy` keep a whole slice together.
    """

    rank: int
    numel: int
    first: int | None
    copy: tuple[int, int]


@dataclass(frozen=True)
class Slice:
    """What one tensor-parallel rank computes with. `count` is 1 where tensor parallelism does not split the weight."""

    index: int
    count: int
    numel: int
    ranks: tuple[int, ...]
    kept: tuple[Kept, ...]

    @property
    def name(self) -> str:
        """`half 1`, `slice 3 of 8`, `the matrix`."""
        if self.count == 1:
            return "the matrix"
        word = PARTS.get(self.count)
        return f"{word} {self.index + 1}" if word else f"slice {self.index + 1} of {self.count}"


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


def masters(results: Results, run: str) -> str:
    """Which ranks keep which part of the fp32 master, slice by slice, at the end of the recorded step."""
    found = slices(results, run)
    named = results.of("lifeline", run)
    named = named[named["master_name"] != ""]
    if named.empty:
        return "on no rank that followed the weight" if found else "not recorded"
    told = [_kept_words(s) for s in found if s.kept]
    none = sorted({r for s in found for r in s.ranks} - {k.rank for s in found for k in s.kept})
    told += [f"none on {rank_words(none)}"] if none else []
    one = named.iloc[-1]
    itself = ", the weight itself" if one["master_same_storage"] == "True" else ""
    return f"{'; '.join(told)} ({one['master_name']}, {one['master_dtype']}{itself})"


def _kept_words(s: Slice) -> str:
    sizes = {k.numel for k in s.kept}
    ranks = [k.rank for k in s.kept]
    each = " each" if len(ranks) > 1 else ""
    if sizes == {s.numel}:
        return f"all of {s.name}{each} on {rank_words(ranks)}"
    if len(sizes) == 1:
        told = f"{share(sizes.pop(), s.numel)} of {s.name}{each} on "
        if not each or any(k.first is None for k in s.kept):
            return told + rank_words(ranks)
        copies = dict.fromkeys(k.copy for k in s.kept)
        whole = [rank_words([k.rank for k in s.kept if k.copy == copy]) for copy in copies]
        return f"{told}{' and again on '.join(whole)}, in that order"
    return f"of {s.name} " + ", ".join(f"{_elements(k, s.numel)} on rank {k.rank}" for k in s.kept)


def _elements(kept: Kept, full: int) -> str:
    if kept.first is None:
        return f"{kept.numel:,} elements"
    return f"elements {kept.first:,} to {min(full, kept.first + kept.numel) - 1:,}"


def copies(results: Results, run: str) -> str:
    """`half 1 on ranks 0, 2, half 2 on ranks 1, 3`; the ranks alone where the weight is not split."""
    found = slices(results, run)
    if len(found) == 1 and found[0].count == 1:
        return f"on {rank_words(found[0].ranks)}"
    return ", ".join(f"{s.name} on {rank_words(s.ranks)}" for s in found)


def rank_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-1, 4`."""
    return f"{plural(len(ranks), 'rank').split()[1]} {rank_ranges(ranks)}"
