"""How long predictions take, in one process and from a cold start. Prints seconds and the ratio to the project's goal.

python benchmarks/predict_speed.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train_ledger.predict import framework, predict
from train_ledger.predict.distinct import predict_distinct
from train_ledger.predict.first_order import Layout, place, precision_of, state_bytes
from train_ledger.predict.sweep import DEGREES, grid, sweep
from train_ledger.spec.config import load_model, load_run, override
from train_ledger.spec.run import Run

ROOT = Path(__file__).resolve().parents[1]
RUNS = {"megatron": "megatron-tp2-pp2-dp2", "deepspeed": "deepspeed-zero3-dp8", "torchtitan": "torchtitan-fsdp4-tp2"}

#: 405B on 16,384 ranks, one layout a framework.
LARGE = {
    "megatron": "parallel.tensor_parallel=8 parallel.pipeline_parallel=2 parallel.data_parallel=1024 global_batch=2048",
    "deepspeed": "parallel.data_parallel=16384 global_batch=16384",
    "torchtitan": "parallel.tensor_parallel=8 parallel.data_parallel_shard=2048 global_batch=4096",
}


def seconds(function: Callable[[], Any], at_least_s: float = 0.2) -> float:
    """Seconds a call, the best of three rounds of calls that last `at_least_s` together."""
    start = time.perf_counter()
    function()
    count = max(int(at_least_s / max(time.perf_counter() - start, 1e-7)), 1)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(count):
            function()
        best = min(best, (time.perf_counter() - start) / count)
    return best


def once(function: Callable[[], Any]) -> float:
    """Seconds of one call, nothing warm."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def show(what: str, took_s: float, goal_s: float) -> None:
    """One line: seconds, the goal, and their ratio (below 1 is within it)."""
    print(f"{what:72} {took_s:12.6f} s   goal {goal_s:8.6g} s   ratio {took_s / goal_s:7.3f}", flush=True)


def paper(name: str, more: str = "") -> Run:
    """A run file of the paper, with assignments on top."""
    return load_run(ROOT / "config/runs" / f"{name}.yaml", overrides=override(more.split()))


def main() -> None:
    """Everything, line by line."""
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; wall-clock times")
    for name, stem in RUNS.items():
        run = paper(stem)
        st, layout = state_bytes(run.model, precision_of(run)), Layout.of(run)
        show(f"{name}: place(), first order", seconds(lambda a=(run.model, st, layout): place(*a)), 50e-6)
    for name, stem in RUNS.items():
        run = paper(stem)
        framework(run)  # its module's import is not the prediction
        show(f"{name}: one rank, exact, 1B, first call", once(lambda r=run: predict(r, [0])), 20e-3)
        rank = seconds(lambda r=run: framework(r).rank_ledger(r, 5))
        show(f"{name}: one rank, exact, 1B, again", rank, 20e-3)
    for name, more in LARGE.items():
        run = paper(RUNS[name], f"model=llama3-405b world_size=16384 {more}")
        found: list[Any] = []
        took = once(lambda r=run, f=found: f.extend(predict_distinct(r)))
        show(f"{name}: 405B on 16,384 ranks, all {len(found[1])} distinct ranks and groups", took, 1.0)
    model = load_model("llama3-405b", ROOT / "config")
    state = state_bytes(model, "bf16-fp32-grad")
    worlds = [64 * k for k in range(1, 513)]
    degrees = {"pipeline_parallel": (1, 2, 3, 6, 7, 9, 14, 18, 21, 42, 63, 126), "micro_batch": (1, 2, 4, 8, 16)}

    def many() -> int:
        layouts = grid(model, worlds, 2**14 * 315, degrees={**DEGREES, **degrees})
        return len(sweep(state, layouts, 141 * 10**9, keep_free_bytes=40 * 10**9).order)

    count = many()
    took = once(many)
    show(f"sweep of {count:,} layouts that can be (goal: 100,000 in 10 s)", took, 10 * count / 1e5)
    program = str(Path(sys.executable).parent / "train-ledger")
    for name, stem in RUNS.items():
        argv = [program, "predict", str(ROOT / "config/runs" / f"{stem}.yaml")]
        took = min(once(lambda a=argv: subprocess.run(a, check=True, capture_output=True)) for _ in range(5))
        show(f"{name}: `train-ledger predict RUN.yaml`, a clean process", took, 0.4)


if __name__ == "__main__":
    main()
