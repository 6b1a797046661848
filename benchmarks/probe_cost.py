"""What the probes cost: step time and device bytes with and without each, interleaved in one process.

    torchrun --standalone --nproc-per-node 1 benchmarks/probe_cost.py config/runs/megatron-1gpu.yaml --rounds 12
    python benchmarks/probe_cost.py config/runs/megatron-1gpu.yaml --model laptop       (on the CPU)

Every round runs one step without a probe and one with each mode. Orders alternate so that within rounds each mode comes
after each other one equally often: a step that keeps the host busy leaves the GPU rested for the step that follows it.
Printed: the median of each mode, its ratio to the bare step in the same round (median of the ratios and their
quartiles), and the difference of allocated device bytes after the step. The run must have a world of one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train_ledger.launch.cuda import cuda_device
from train_ledger.launch.loop import program
from train_ledger.launch.session import Rank
from train_ledger.launch.worlds.cpu import set_environment
from train_ledger.probe import MemoryProbe
from train_ledger.spec.config import load_run

MODES = ("bare", "memory", "collectives", "lifeline")
#: Positions in MODES, a row a round: a Latin square where each ordered pair of neighbours occurs once (Williams 1949).
ORDERS = ((0, 1, 3, 2), (1, 2, 0, 3), (2, 3, 1, 0), (3, 0, 2, 1))


def main() -> None:
    """Measure and print; --json keeps every step time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=12, help="a multiple of 4 balances the orders")
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    run = load_run(args.run, overrides={"model": args.model} if args.model else None)
    assert run.world_size == 1, "a world of one rank is measured"
    steps = args.warm_up + args.rounds * len(MODES)
    torch.set_num_threads(1)
    run = replace(run, steps=steps, world="nccl" if torch.cuda.is_available() else "cpu")
    module = program(run.framework)

    session = module.build(run, _rank(run.world))
    took: dict[str, list[float]] = {mode: [] for mode in MODES}
    held: dict[str, set[int]] = {mode: set() for mode in MODES}
    step = 0
    for _ in range(args.warm_up):
        step += 1
        session.step(step)
    for i in range(args.rounds):
        for mode in (MODES[at] for at in ORDERS[i % len(ORDERS)]):
            step += 1
            took[mode].append(_time(session, run, step, mode))
            held[mode].add(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
    session.close()
    bare = took["bare"]
    rows = []
    for mode in MODES:
        low, ratio, high = statistics.quantiles((t / b for t, b in zip(took[mode], bare, strict=True)), n=4)
        median = statistics.median(took[mode])
        extra = max(held[mode]) - max(held["bare"])
        rows.append({"mode": mode, "median_s": median, "ratio": ratio, "ratio_quartiles": [low, high]})
        rows[-1]["device_bytes"] = extra
        print(
            f"{run.name:20} {mode:12} {median * 1e3:10.3f} ms  x {ratio:.4f} ({low:.4f} to {high:.4f})  "
            f"{extra:+d} B on the device"
        )
    if args.json:
        record = {"run": run.name, "model": run.model.name, "rounds": args.rounds, "modes": rows, "times_s": took}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def _rank(world: str) -> Rank:
    set_environment(0, 1, 0, int(os.environ.get("MASTER_PORT", "29533")))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    device = cuda_device(0) if world == "nccl" else torch.device("cpu")
    backend = "nccl" if world == "nccl" else "gloo"

    def init(timeout: timedelta) -> None:
        dist.init_process_group(backend, timeout=timeout)

    return Rank(0, 0, 1, world, device, init)


def _time(session: Any, run: Any, step: int, mode: str) -> float:
    """Seconds from an idle device to an idle device, the probe's own reading included."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    if mode == "bare":
        session.step(step)
    else:
        probe = MemoryProbe(
            run.name,
            profile_steps=() if mode == "memory" else (step,),
            device=device,
            rank=0,
            optimizer=session.optimizer_steps(),
            weight=session.weight(run.probe.lifeline_weight) if mode == "lifeline" else None,
            kernels=False,
        )
        with probe.step(step):
            session.step(step)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
