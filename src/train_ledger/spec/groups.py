"""Process groups as rank lists, and the two ways frameworks lay ranks out on a grid of parallel dimensions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """One process group: the name the framework uses and its global ranks in group order. Many groups share a name."""

    name: str
    ranks: tuple[int, ...]


def coordinates(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Coordinates of `rank` on a grid whose first dimension in `sizes` varies fastest.

    Megatron's order `tp-cp-ep-dp-pp` is fastest-first (`core/parallel_state.py:RankGenerator`); a torch DeviceMesh is
    slowest-first, so pass its dimensions reversed.
    """
    out = {}
    for name, size in sizes.items():
        out[name] = rank % size
        rank //= size
    return out


def groups_along(sizes: Mapping[str, int], dims: Sequence[str]) -> list[tuple[int, ...]]:
    """All rank lists that vary along `dims` and are fixed elsewhere; first dimension of `sizes` fastest.

    Returns:
        `prod(sizes) / prod(sizes[dims])` tuples, ranks ascending in each, ordered by their first rank.
    """
    stride, at = {}, 1
    for name, size in sizes.items():
        stride[name] = at
        at *= size
    inside = [n for n in sizes if n in dims]
    outside = [n for n in sizes if n not in dims]
    offsets = sorted(
        sum(c * stride[n] for n, c in zip(inside, combo, strict=True))
        for combo in itertools.product(*(range(sizes[n]) for n in inside))
    )
    bases = sorted(
        sum(c * stride[n] for n, c in zip(outside, combo, strict=True))
        for combo in itertools.product(*(range(sizes[n]) for n in outside))
    )
    return [tuple(base + off for off in offsets) for base in bases]


def group_of(rank: int, sizes: Mapping[str, int], dims: Sequence[str]) -> tuple[int, ...]:
    """The one list of `groups_along(sizes, dims)` that holds `rank`, without building the others."""
    stride, at = {}, 1
    for name, size in sizes.items():
        stride[name] = at
        at *= size
    if not 0 <= rank < math.prod(sizes.values()):
        raise ValueError(f"rank {rank} is not on a grid of {math.prod(sizes.values())}")
    inside = [n for n in sizes if n in dims]
    base = rank - sum(rank // stride[n] % sizes[n] * stride[n] for n in inside)
    return tuple(
        sorted(
            base + sum(c * stride[n] for n, c in zip(inside, combo, strict=True))
            for combo in itertools.product(*(range(sizes[n]) for n in inside))
        )
    )


def rank_ranges(ranks: Iterable[int]) -> str:
    """Ranks for a person: `0-3, 6`."""
    out: list[list[int]] = []
    for r in sorted(set(ranks)):
        if out and r == out[-1][1] + 1:
            out[-1][1] = r
        else:
            out.append([r, r])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in out)
