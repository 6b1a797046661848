"""The bf16 matrix rate of the device that trained: what a run's own rate is compared with beside the datasheet's."""

from __future__ import annotations

import statistics
import time

import torch

#: Edge of the square matrices. From about here on an H100's or H200's rate no longer grows with the size.
EDGE = 8192
WARM_UP, TIMED = 10, 30


def matrix_rate(device: torch.device, edge: int = EDGE, timed: int = TIMED) -> float | None:
    """Multiply-adds counted as two: operations a second of `edge` x `edge` bf16 products, median of `timed` products.

    The matrices hold normally distributed numbers: a GPU multiplies zeros at less power, and so faster.

    Args:
        device: CUDA: timed by events on the device; else by the host's clock.
        edge: rows and columns of each of the three matrices (6 edge^2 bytes on the device while it runs).
        timed: how many products after `WARM_UP` of them.

    Returns:
        None where the device has no memory left for the matrices.
    """
    try:
        a, b = (torch.randn(edge, edge, device=device, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        took = [_seconds(device, a, b, out) for _ in range(WARM_UP + timed)]
    except torch.OutOfMemoryError:
        return None
    return 2 * edge**3 / statistics.median(took[WARM_UP:])


def _seconds(device: torch.device, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
    with torch.no_grad():
        if device.type != "cuda":
            began = time.perf_counter()
            torch.mm(a, b, out=out)
            return time.perf_counter() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.mm(a, b, out=out)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
