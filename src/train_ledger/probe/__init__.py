"""The probe: what is read from a running rank. Needs nothing but torch; `MemoryProbe` serves anybody's script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .memory import MemoryProbe

__all__ = ["MemoryProbe"]


def __getattr__(name: str) -> Any:
    """Import torch only when the probe is used."""
    if name == "MemoryProbe":
        from .memory import MemoryProbe

        return MemoryProbe
    raise AttributeError(name)
