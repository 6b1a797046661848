"""Printing of bytes. Data never holds anything but integers of bytes.

GB and GiB exist only in print, always labelled.
"""

from __future__ import annotations


def fmt(n_bytes: float, unit: str = "GB") -> str:
    """Bytes for a person: `4.496 GB`.

    Args:
        n_bytes: bytes.
        unit: `GB` (10^9), `GiB` (2^30), `MB`, `MiB`, or `B` (exact, with thousands separators).
    """
    scale = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20, "kB": 10**3, "KiB": 2**10}
    if unit == "B":
        return f"{int(n_bytes):,} B"
    return f"{n_bytes / scale[unit]:.3f} {unit}"


def fmt_auto(n_bytes: int) -> str:
    """Bytes in the largest decimal unit that keeps at least one digit before the point."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(n_bytes) >= scale:
            return f"{n_bytes / scale:.3f} {unit}"
    return f"{n_bytes} B"
