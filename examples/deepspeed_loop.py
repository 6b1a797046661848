"""A training script of your own on DeepSpeed, with a probe around each step.

    torchrun --nproc-per-node 2 examples/deepspeed_loop.py --out probe.json

writes probe.rank0.json and probe.rank1.json: memory at every step boundary (on CUDA), and the collectives of step 2.
"""

import argparse
import os

import torch

ON_GPU = torch.cuda.is_available()
os.environ.setdefault("DS_ACCELERATOR", "cuda" if ON_GPU else "cpu")

import deepspeed  # noqa: E402

from train_ledger.probe import MemoryProbe  # noqa: E402

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    # torch_adam: without it DeepSpeed compiles its own Adam when the engine is made.
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100, "reduce_bucket_size": 20000},
}


def main() -> None:
    """Four steps of a small model under ZeRO-3."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="probe.json")
    args = parser.parse_args()
    if not ON_GPU:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it compiles an all-reduce for the CPU
    deepspeed.init_distributed("nccl" if ON_GPU else "gloo")
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)

    probe = MemoryProbe("deepspeed", profile_steps=[2], optimizer=(engine.optimizer, "step"))
    for step in range(4):
        with probe.step(step):
            for _ in range(engine.gradient_accumulation_steps()):
                x = torch.randn(8, 64, device=engine.device, dtype=torch.bfloat16)
                loss = engine(x).float().square().mean()
                engine.backward(loss)
                engine.step()  # takes an optimizer step at the end of an accumulation only
    print("wrote", probe.dump(args.out))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
