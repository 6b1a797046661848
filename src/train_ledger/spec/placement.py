"""Which ranks hold which part of one weight, and which of them keep which elements of its fp32 master, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from .groups import rank_ranges

#: What an equal part of a matrix is called.
PARTS = {2: "half", 4: "quarter"}


@dataclass(frozen=True)
class Kept:
    """Elements of the master that a rank keeps: `numel` of them, from `first` of its slice on; None if not known.

    Ranks of one `copy` keep a whole slice together.
    """

    rank: int
    numel: int
    first: int | None
    copy: tuple[int, ...] = ()


@dataclass(frozen=True)
class Slice:
    """What one tensor-parallel rank computes with. `count` is 1 where tensor parallelism does not split the weight.

    `ranks` compute with it, `kept` are those that keep some of its master.
    """

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


def share(numel: float, full_numel: int) -> str:
    """`1/8` or `whole`; a share that is no simple fraction (padding) with `≈`."""
    if not full_numel or numel != numel:  # NaN: not measured
        return "none"
    exact = Fraction(int(numel), full_numel)
    if exact >= 1:
        return "whole"
    simple = exact.limit_denominator(64)
    return f"{simple.numerator}/{simple.denominator}" if simple == exact else f"≈ {float(exact):.3f}"


def copies(slices: Sequence[Slice]) -> str:
    """`half 1 on ranks 0, 2, half 2 on ranks 1, 3`; the ranks alone where the weight is not split."""
    if len(slices) == 1 and slices[0].count == 1:
        return f"on {rank_words(slices[0].ranks)}"
    return ", ".join(f"{s.name} on {rank_words(s.ranks)}" for s in slices)


def equal_copies(slices: Sequence[Slice]) -> str:
    """Who holds the same, as a sentence; empty where each rank holds a part of its own."""
    if not any(len(s.ranks) > 1 for s in slices):
        return ""
    return (
        f"The ranks of a {PARTS.get(slices[0].count, 'slice')} hold equal copies."
        if slices[0].count > 1
        else ("They hold equal copies.")
    )


def masters(slices: Sequence[Slice]) -> str:
    """Which ranks keep which part of the master, slice by slice, and which ranks with the weight keep none."""
    told = [_kept_words(s) for s in slices if s.kept]
    none = sorted({r for s in slices for r in s.ranks} - {k.rank for s in slices for k in s.kept})
    return "; ".join([*told, f"none on {rank_words(none)}"] if none else told)


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
        whole = [
            rank_words([k.rank for k in s.kept if k.copy == copy]) for copy in dict.fromkeys(k.copy for k in s.kept)
        ]
        return f"{told}{' and again on '.join(whole)}, in that order"
    return f"of {s.name} " + ", ".join(f"{_elements(k, s.numel)} on rank {k.rank}" for k in s.kept)


def _elements(kept: Kept, full: int) -> str:
    if kept.first is None:
        return f"{kept.numel:,} elements"
    return f"elements {kept.first:,} to {min(full, kept.first + kept.numel) - 1:,}"


def rank_words(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-1, 4`."""
    each = set(ranks)
    return f"rank{'' if len(each) == 1 else 's'} {rank_ranges(each)}"
