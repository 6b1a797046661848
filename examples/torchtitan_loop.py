"""torchtitan's Trainer, with a probe around each step.

    torchrun --nproc-per-node 2 examples/torchtitan_loop.py --out probe.json

writes probe.rank0.json and probe.rank1.json: memory at every step boundary (on CUDA), and the collectives of step 2.
The Trainer.Config here is the one of config/runs/torchtitan-fsdp4-tp2.yaml on a small model; take your own instead.
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from train_ledger.launch.frameworks.torchtitan_device import import_torchtitan, use_device
from train_ledger.probe import MemoryProbe
from train_ledger.spec.config import load_run

import_torchtitan()

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from train_ledger.launch.frameworks.torchtitan_config import trainer_config  # noqa: E402

ROOT = Path(__file__).parents[1]


def config(ranks: int) -> Trainer.Config:
    """FSDP over all ranks."""
    overrides = {
        "model": "laptop",
        "world_size": ranks,
        "steps": 4,
        "micro_batch": 1,
        "global_batch": 2 * ranks,
        "parallel": {"tensor_parallel": 1, "sequence_parallel": False, "data_parallel_shard": ranks},
    }
    return trainer_config(load_run(ROOT / "config/runs/torchtitan-fsdp4-tp2.yaml", overrides=overrides))


def probed(trainer: Any, probe: MemoryProbe) -> Any:
    """The same trainer, its `train_step` inside of the probe."""
    inner = trainer.train_step

    def train_step(batches: Any) -> None:
        with probe.step(trainer.step):
            inner(batches)

    trainer.train_step = train_step
    return trainer


def main() -> None:
    """Four steps of a small Llama."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="probe.json")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    use_device(device)
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan's own init_distributed does
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=5))
    trainer = config(torch.distributed.get_world_size()).build()
    if not on_gpu:  # FSDP2 divides by an operation that NCCL has and gloo lacks
        for module in trainer.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    probe = MemoryProbe("torchtitan", profile_steps=[2], optimizer=(trainer.optimizers, "step"))
    probed(trainer, probe).train()
    print("wrote", probe.dump(args.out))
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
