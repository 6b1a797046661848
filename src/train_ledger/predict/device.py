"""What PyTorch's CUDA allocator will read for a rank at a step boundary, and what lies on the GPU beside it.

Activations are not in it: at a step boundary they are gone, and the memory they leave behind stays in `reserved`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from train_ledger.predict.distinct import ranges
from train_ledger.predict.table import columns
from train_ledger.spec.errors import ConfigError
from train_ledger.spec.ledger import RankLedger
from train_ledger.spec.run import Run
from train_ledger.spec.units import fmt

MIB = 1 << 20
#: The allocator's constants, c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h.
BLOCK_BYTES = 512
SMALL_UP_TO_BYTES = 1 * MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_FROM_BYTES = 10 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
ROUND_LARGE_BYTES = 2 * MIB


@dataclass(frozen=True)
class Device:
    """A GPU: its name, compute capability (major, minor) and memory in bytes.

    The memory is what CUDA reports where that was measured (H200, reference/); else the datasheet's figure in decimal
    GB, some percent less than what CUDA reports.
    """

    title: str
    capability: tuple[int, int]
    memory_bytes: int


DEVICES: dict[str, Device] = {
    "v100": Device("NVIDIA V100 32GB", (7, 0), 32 * 10**9),
    "a100": Device("NVIDIA A100 80GB", (8, 0), 80 * 10**9),
    "a100-40gb": Device("NVIDIA A100 40GB", (8, 0), 40 * 10**9),
    "l40s": Device("NVIDIA L40S", (8, 9), 48 * 10**9),
    "h100": Device("NVIDIA H100 SXM", (9, 0), 80 * 10**9),
    "h200": Device("NVIDIA H200", (9, 0), 150_109_880_320),
    "b200": Device("NVIDIA B200", (10, 0), 180 * 10**9),
    "b300": Device("NVIDIA B300", (10, 3), 288 * 10**9),
}


@dataclass(frozen=True)
class Line:
    """A named part. `bytes` is None where it is not predicted; `in_allocator`: PyTorch's numbers hold it."""

    name: str
    bytes: int | None
    in_allocator: bool
    rule: str


@dataclass(frozen=True)
class Reading:
    """The allocator's numbers for one rank at a step boundary, bytes, and the lines that they are made of.

    `requested_bytes` is exact. `allocated_bytes` adds the rounding of blocks; the allocator may read up to
    `slack_bytes` more, since a block above 1 MiB keeps what is left of the free block that it was cut from when that is
    1 MiB or less (`should_split`), which depends on what was freed before. `reserved_bytes` is the least that holds
    these blocks; real training reserves more, for activations. `blocks_known` is False where a container does not say
    how it is split into allocations; it then counts as one.
    """

    rank: int
    device: Device
    requested_bytes: int
    allocated_bytes: int
    slack_bytes: int
    reserved_bytes: int
    lines: tuple[Line, ...]
    blocks_known: bool = True

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
        return {
            "rank": self.rank,
            "requested_bytes": self.requested_bytes,
            "allocated_bytes_at_least": self.allocated_bytes,
            "allocated_bytes_at_most": self.allocated_bytes + self.slack_bytes,
            "reserved_bytes_at_least": self.reserved_bytes,
            "blocks_known": self.blocks_known,
            "lines": [vars(line) for line in self.lines],
        }


def find_device(name: str) -> Device:
    """The device of that name.

    Raises:
        ConfigError: it is not in `DEVICES`.
    """
    if name.lower() not in DEVICES:
        raise ConfigError(f"there is no device {name[:50]!r}; known: {', '.join(DEVICES)}", key="--device")
    return DEVICES[name.lower()]


def cublas_workspace_bytes(device: Device) -> int:
    """One workspace: 32 MiB on Hopper and Blackwell, else `:4096:2:16:8`, 8.125 MiB.

    Source: aten/src/ATen/cuda/CublasHandlePool.cpp:parseChosenWorkspaceSize, without CUBLAS_WORKSPACE_CONFIG. cuBLASLt
    shares it (unified_cublas_and_lt_workspaces).
    """
    return 32 * MIB if device.capability[0] in (9, 10, 12) else 2 * 4096 * 1024 + 8 * 16 * 1024


def workspaces(run: Run, device: Device) -> list[Line]:
    """Library workspaces that stay in the allocator."""
    one = cublas_workspace_bytes(device)
    # A handle belongs to a thread. Backward runs in autograd's own thread unless that is off, as it is in torchtitan.
    threads = 1 if run.framework == "torchtitan" else 2
    why = "one a (handle, stream); " + (
        "torchtitan/distributed/utils.py:init_distributed runs backward in the main thread"
        if threads == 1
        else "the main thread and autograd's have a handle each"
    )
    rule = f"aten/src/ATen/cuda/CublasHandlePool.cpp:getNewWorkspace, {one / MIB:g} MiB, {why}"
    return [Line(f"cublas_workspace x {threads}", threads * one, True, rule)]


def beside(run: Run) -> list[Line]:
    """What is on the GPU but in no number of PyTorch's."""
    lines = [
        Line(
            "cuda_context",
            None,
            False,
            "driver and kernels of the loaded libraries; some hundred MiB by driver and GPU; nvidia-smi less reserved",
        )
    ]
    if run.world_size > 1:
        lines.append(
            Line(
                "nccl_buffers",
                None,
                False,
                "cudaMalloc by NCCL itself, a set a communicator (NCCL_BUFFSIZE 4 MiB a channel and peer by default)",
            )
        )
    return lines


def rounded(n_bytes: int) -> int:
    """A block as the allocator hands it out: whole 512 bytes (`round_size`)."""
    return max(-(-n_bytes // BLOCK_BYTES) * BLOCK_BYTES, BLOCK_BYTES)


def reserved_at_least(blocks: Iterable[tuple[int, int]]) -> int:
    """Segments that hold `blocks` ((rounded bytes, how many)) if nothing else is ever allocated.

    Blocks up to 1 MiB share segments of 2 MiB, larger ones below 10 MiB share segments of 20 MiB, and from 10 MiB on
    each has a segment of its own, rounded to 2 MiB (`get_allocation_size`). Sharing is taken as perfect: a floor.
    """
    small = middle = large = 0
    for n_bytes, count in blocks:
        if n_bytes <= SMALL_UP_TO_BYTES:
            small += n_bytes * count
        elif n_bytes < LARGE_FROM_BYTES:
            middle += n_bytes * count
        else:
            large += -(-n_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES * count
    shared = -(-small // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES
    return shared + -(-middle // LARGE_SEGMENT_BYTES) * LARGE_SEGMENT_BYTES + large


def on_device(run: Run, ledger: RankLedger, device_name: str) -> Reading:
    """What the allocator reads on that device for this rank at a step boundary.

    Raises:
        ConfigError: no such device.
    """
    device = find_device(device_name)
    held = [c for c in ledger.containers if c.device == "cuda" and c.bytes]
    blocks: list[tuple[int, int]] = []
    known = True
    for c in held:
        if sum(n_bytes * count for n_bytes, count in c.blocks) == c.bytes:
            blocks += c.blocks
        else:
            blocks.append((c.bytes, 1))
            known = False
    libraries = workspaces(run, device)
    for line in libraries:
        count = int(line.name.rpartition(" x ")[2])
        blocks.append(((line.bytes or 0) // count, count))
    requested = sum(n_bytes * count for n_bytes, count in blocks)
    handed_out = [(rounded(n_bytes), count) for n_bytes, count in blocks]
    allocated = sum(n_bytes * count for n_bytes, count in handed_out)
    how_many = sum(count for _, count in blocks)
    large = sum(count for n_bytes, count in handed_out if n_bytes > SMALL_UP_TO_BYTES)
    slack = large * SMALL_UP_TO_BYTES
    lines = (
        Line("containers", sum(c.bytes for c in held), True, "the ledger's containers on the GPU"),
        *libraries,
        Line(
            "allocator_rounding",
            allocated - requested,
            True,
            f"c10/cuda/CUDACachingAllocator.cpp:round_size, {how_many:,} blocks to {BLOCK_BYTES} B each",
        ),
        Line(
            "unsplit_remainders",
            None,
            True,
            f"c10/cuda/CUDACachingAllocator.cpp:should_split, {large:,} blocks of over 1 MiB keep up to 1 MiB each",
        ),
        *beside(run),
    )
    return Reading(ledger.rank, device, requested, allocated, slack, reserved_at_least(handed_out), lines, known)


def device_table(readings: Sequence[Reading], classes: Sequence[tuple[int, ...]]) -> str:
    """The readings of ranks whose numbers are equal, once."""
    alike: dict[tuple[int, int, int], tuple[list[int], Reading]] = {}
    for reading, ranks in zip(readings, classes, strict=True):
        key = (reading.requested_bytes, reading.allocated_bytes, reading.reserved_bytes)
        alike.setdefault(key, ([], reading))[0].extend(ranks)
    device = readings[0].device
    head = f"{device.title}, {fmt(device.memory_bytes)} ({fmt(device.memory_bytes, 'GiB')}), at a step boundary"
    rows = [["ranks", "requested, bytes", "allocated, at least", "reserved, at least", "GiB", "of memory"]]
    for members, r in alike.values():
        label = ranges(tuple(sorted(members)))
        label = label if len(label) <= 14 else f"{min(members)} (+{len(members) - 1:,})"
        share = f"{r.allocated_bytes / device.memory_bytes:.1%}"
        numbers = [f"{n:,}" for n in (r.requested_bytes, r.allocated_bytes, r.reserved_bytes)]
        rows.append([label, *numbers, f"{r.allocated_bytes / 2**30:.3f}", share])
    parts = [head, columns(rows, "<>>>>>")]
    largest = max((r for _, r in alike.values()), key=lambda r: r.allocated_bytes)
    parts.append(f"Of this, rank {largest.rank}; activations are on top while a step runs")
    listed = [[x.name, "not predicted" if x.bytes is None else f"{x.bytes:,}", x.rule] for x in largest.lines]
    parts.append(columns(listed, "<><", last_is_prose=True))
    if not all(r.blocks_known for _, r in alike.values()):
        parts.append("  (a container's split into blocks is not known: rounding is a floor)")
    if largest.allocated_bytes > device.memory_bytes:
        parts.append("  It does not fit: resident alone is more than the device has.")
    return "\n".join(parts)
