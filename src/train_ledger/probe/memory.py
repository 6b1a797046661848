"""`MemoryProbe`: memory at step boundaries; of chosen steps the collectives, one weight's life and the NCCL kernels.

Needs nothing but torch, so that it serves any training script:

    probe = MemoryProbe("my-run", profile_steps=[20])
    for i in range(50):
        with probe.step(i):
            ...                    # forward, backward, optimizer step
    probe.dump("probe.json")       # writes probe.rank<r>.json
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from . import nccl
from .census import census
from .collectives import CollectiveProbe
from .lifeline import Lifeline
from .peak import PeakOwners
from .watch import EngineRuns, ModuleCalls, OptimizerStep
from .within import MemoryWithin

#: Keys of torch.cuda.memory_stats that are kept at a step boundary. `requested` is what tensors asked for, `allocated`
#: the same rounded to blocks of 512 bytes, `reserved` what the allocator holds from the driver.
MEMORY_KEYS = (
    "requested_bytes.all.current",
    "requested_bytes.all.peak",
    "allocated_bytes.all.current",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.current",
    "reserved_bytes.all.peak",
    "active_bytes.all.peak",
    "allocation.all.current",
    "num_alloc_retries",
    "num_ooms",
)


def _profiler() -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities, record_shapes=True)


class MemoryProbe:
    """Reads one rank. Outside of `profile_steps` it costs two reads of allocator counters a step.

    Args:
        tag: a name for the file.
        profile_steps: steps of which the collectives (and, if asked for, lifeline and kernels) are recorded.
        device: where the training runs; the current CUDA device if there is one, else the CPU.
        rank: number of this rank; by default the environment's RANK.
        optimizer: (object, method name) of the optimizer step, so that calls in it are told apart.
        weight: the weight to follow (`train_ledger.launch.session.Weight` or anything with its attributes).
        kernels: read NCCL kernels and their records with torch.profiler, in the last of `profile_steps`; by default
            where the device is CUDA. If there are several such steps, nothing else is recorded in the last, so that its
            times are true.
        settle_steps: steps after which Python's garbage is collected before memory is read, so that the reading is of
            what a census would find.
    """

    def __init__(
        self,
        tag: str,
        profile_steps: Iterable[int] = (),
        *,
        device: torch.device | None = None,
        rank: int | None = None,
        optimizer: tuple[object, str] | None = None,
        weight: Any = None,
        kernels: bool | None = None,
        settle_steps: Iterable[int] = (),
    ) -> None:
        self.tag = tag
        self.profile_steps = frozenset(profile_steps)
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.optimizer, self.weight = optimizer, weight
        self.kernels = self.device.type == "cuda" if kernels is None else kernels
        self.settle_steps = frozenset(settle_steps)
        self.records: list[dict[str, Any]] = []
        self.collectives: list[dict[str, Any]] = []
        self.lifeline: dict[str, Any] | None = None
        self.nccl_kernels: list[dict[str, Any]] = []
        self.nccl_records: list[dict[str, Any]] = []
        self.timeline: list[dict[str, Any]] = []
        self.memory_events: list[dict[str, Any]] = []
        self.last_census: dict[str, Any] | None = None
        self._peak: PeakOwners | None = None

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around one optimizer step. Appends to `records`: step, time in seconds, memory before and after in bytes."""
        before = self._memory(reset=True)
        with contextlib.ExitStack() as probes:
            if step in self.profile_steps:
                self._record(step, probes)
            began = time.perf_counter()
            yield
            self._wait()
            took = time.perf_counter() - began
        if step in self.settle_steps:
            gc.collect()
        self.records.append({"step": step, "time_s": took, "memory": self._memory(), "memory_before": before})

    def _record(self, step: int, probes: contextlib.ExitStack) -> None:
        """Enters what watches a recorded step. What is entered later ends earlier."""
        if self.kernels and step == max(self.profile_steps):
            profiler = _profiler()
            probes.callback(self._read_kernels, step, profiler)
            probes.enter_context(profiler)
            if len(self.profile_steps) > 1:
                return  # the other probes slow the host down, and with it the GPU: times are read from a step without
        optimizer = probes.enter_context(OptimizerStep(self.optimizer))
        modules = probes.enter_context(ModuleCalls())
        engine = probes.enter_context(EngineRuns())
        if self.weight is not None:
            lifeline = Lifeline(self.weight, modules, engine, optimizer)
            probes.callback(self._keep_lifeline, lifeline)
            lifeline.begin(step)
            probes.callback(lifeline.end)
        # One step is enough to draw, and the first of them is as good as any.
        if self.device.type == "cuda" and not self.memory_events:
            within = MemoryWithin(self.device, modules, engine, optimizer)
            within.begin()
            probes.callback(lambda: self.memory_events.extend({"step": step, **e} for e in within.events))
            probes.callback(within.end)
            self._peak = probes.enter_context(PeakOwners(self.device))
        calls = probes.enter_context(CollectiveProbe(step, optimizer))
        probes.callback(lambda: self.collectives.extend(calls.rows()))

    def _keep_lifeline(self, lifeline: Lifeline) -> None:
        found = lifeline.to_dict()
        if self.lifeline is None:
            self.lifeline = found
        else:
            self.lifeline["events"] += found["events"]

    def _read_kernels(self, step: int, profiler: torch.profiler.profile) -> None:
        events = nccl.read_trace(profiler)
        self.nccl_kernels += nccl.kernels(events, step)
        self.nccl_records += nccl.records(events, step)
        self.timeline.append(nccl.timeline(events, step))

    def extra(self) -> dict[str, Any]:
        """Those optional parts of a rank file that this probe has read.

        They are kernels, records, timeline, memory_events, peak.
        """
        parts = {
            "kernels": self.nccl_kernels,
            "records": self.nccl_records,
            "timeline": {"steps": self.timeline} if self.timeline else {},
            "memory_events": self.memory_events,
            "peak": self._peak.peak if self._peak else {},
        }
        return {name: part for name, part in parts.items() if part}

    def census(self, **owners: Iterable[torch.Tensor]) -> dict[str, Any]:
        """Every storage that is alive now, by who owns it; what nobody is named for, by shape. Kept for `dump`.

        Args:
            owners: tensors by the name of their container, as in `census(param=model.parameters())`.
        """
        claims = ((name, "script", tensor) for name, tensors in owners.items() for tensor in tensors)
        self.last_census = census(claims)
        return self.last_census

    def dump(self, path: str | os.PathLike[str]) -> Path:
        """Writes `<path without suffix>.rank<r>.json`, under a temporary name first, and returns where."""
        path = Path(path)
        target = path.with_name(f"{path.stem}.rank{self.rank}{path.suffix or '.json'}")
        target.parent.mkdir(parents=True, exist_ok=True)
        data = {"tag": self.tag, "rank": self.rank, "records": self.records, "collectives": self.collectives}
        data |= {"census": self.last_census, "lifeline": self.lifeline, **self.extra()}
        partial = target.with_name(f".{target.name}.tmp")
        partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        partial.replace(target)
        return target

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _memory(self, reset: bool = False) -> dict[str, int] | None:
        if self.device.type != "cuda":
            return None
        self._wait()
        stats = torch.cuda.memory_stats(self.device)
        if reset:
            torch.cuda.reset_peak_memory_stats(self.device)
        return {key: int(stats.get(key, 0)) for key in MEMORY_KEYS}
