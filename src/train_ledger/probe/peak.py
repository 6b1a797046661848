"""What is alive when a step needs most memory: the CUDA allocator's history, with each block's Python stack."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from .stack import site_of

#: Events of one step that the allocator keeps. A step of the 1B shape makes some 30,000.
MAX_EVENTS = 400_000
RESIDENT = "resident before the step"
NO_PYTHON = "autograd engine, no Python frame"


class PeakOwners:
    """Around one step: afterwards `peak` holds the peak and its largest owners.

    Args:
        device: a CUDA device.
        top: how many owners are kept; the rest is added up.
    """

    def __init__(self, device: torch.device, top: int = 12) -> None:
        self.device, self.top = device, top
        self.peak: dict[str, Any] = {}

    def __enter__(self) -> PeakOwners:
        self._before = torch.cuda.memory_stats(self.device)["allocated_bytes.all.current"]
        torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=MAX_EVENTS)
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize(self.device)
        traces = torch.cuda.memory._snapshot(self.device)["device_traces"]
        torch.cuda.memory._record_memory_history(None)
        index = self.device.index or 0
        if index < len(traces) and len(traces[index]) < MAX_EVENTS:
            self.peak = peak_owners(traces[index], self._before, self.top)


def peak_owners(trace: Iterable[Mapping[str, Any]], before_bytes: int, top: int = 12) -> dict[str, Any]:
    """The largest sum of live blocks in an allocator's history, and whose they are.

    Args:
        trace: events of `torch.cuda.memory._snapshot()["device_traces"][i]`: action, addr, size (bytes), frames.
        before_bytes: allocated when the history began; those blocks have no frames.
        top: see `PeakOwners`.

    Returns:
        `peak_bytes` (as requested; the allocator rounds blocks up to 512) and `owners`: site, bytes, blocks; largest
        first. Blocks that were there before and are freed on the way are taken off `RESIDENT`.
    """
    live: dict[int, tuple[int, str]] = {}
    now = peak = before_bytes
    resident = before_bytes
    at_peak: list[tuple[int, str]] = []
    peak_resident = resident
    dirty = True
    for event in trace:
        if event["action"] == "alloc":
            live[event["addr"]] = (event["size"], _site(event.get("frames") or ()))
            now += event["size"]
            dirty = True
        elif event["action"] == "free_completed":
            if dirty and now > peak:
                peak, at_peak, peak_resident = now, list(live.values()), resident
            dirty = False
            block = live.pop(event["addr"], None)
            now -= event["size"]
            if block is None:
                resident -= event["size"]
    if now > peak:
        peak, at_peak, peak_resident = now, list(live.values()), resident
    by_site: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for size, site in at_peak:
        by_site[site][0] += size
        by_site[site][1] += 1
    rows = [{"site": site, "bytes": size, "blocks": n} for site, (size, n) in by_site.items()]
    rows.append({"site": RESIDENT, "bytes": peak_resident, "blocks": 0})
    rows.sort(key=lambda row: (-row["bytes"], row["site"]))
    rest = rows[top:]
    if rest:
        rows = [
            *rows[:top],
            {"site": "the rest", "bytes": sum(r["bytes"] for r in rest), "blocks": sum(r["blocks"] for r in rest)},
        ]
    return {"peak_bytes": peak, "owners": rows}


def _site(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost frame that does not only pass the call on, as for collectives (`stack.site_of`)."""
    return next((site for f in frames if (site := site_of(f["filename"], f["name"]))), NO_PYTHON)
