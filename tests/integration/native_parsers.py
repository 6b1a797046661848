"""Reads exported files with a framework's own parser and prints what it understood, as JSON. For test_export_native.py.

python native_parsers.py megatron  WORLD:run.sh ...
python native_parsers.py deepspeed WORLD:ds_config.json ...
python native_parsers.py torchtitan WORLD:FOLDER/MODULE ...
python native_parsers.py flags
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

MEGATRON_NAMES = """
data_parallel_size tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
sequence_parallel global_batch_size micro_batch_size num_layers hidden_size ffn_hidden_size kv_channels num_query_groups
vocab_size make_vocab_size_divisible_by seq_length swiglu add_bias_linear untie_embeddings_and_output_weights
rotary_base use_distributed_optimizer overlap_grad_reduce overlap_param_gather
accumulate_allreduce_grads_in_fp32 clip_grad lr bf16
ddp_bucket_size
"""


def megatron(items: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """parse_args and validate_args of megatron.training, on the flags of each script."""
    from megatron.training import arguments

    from train_ledger.interop.shell import read_flags

    # validate_args asks the GPU for its architecture; here is none, so it is told what the H200 would say.
    arguments.get_device_arch_version = lambda: 9
    out = []
    for world, path in items:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world), CUDA_DEVICE_MAX_CONNECTIONS="1")
        words = [w for flag, values in read_flags(path).items() for w in (f"--{flag}", *values)]
        sys.argv = ["pretrain_gpt.py", *words]
        args = arguments.validate_args(arguments.parse_args())
        out.append({name: getattr(args, name) for name in MEGATRON_NAMES.split()})
    return out


def flags() -> dict[str, Any]:
    """Every flag of Megatron's parser, and every key of DeepSpeed's configuration classes."""
    import argparse

    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from megatron.training.arguments import add_megatron_arguments

    def keys(model: Any) -> list[str]:
        return sorted({name for key, field in model.model_fields.items() for name in (key, field.alias) if name})

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {
        "megatron": sorted({o[2:] for a in parser._actions for o in a.option_strings if o.startswith("--")}),
        "zero_optimization": keys(DeepSpeedZeroConfig),
        "bf16": keys(DeepSpeedBF16Config),
        "fp16": keys(DeepSpeedFP16Config),
    }


def deepspeed(items: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """DeepSpeedConfig of each file. It takes the world size from the process group, here PyTorch's fake one."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False)

    class Grid:
        """The data-parallel size of one run, as a Megatron-like `mpu` gives it."""

        def __init__(self, world: int) -> None:
            self.get_data_parallel_world_size = lambda: world

    out = []
    for world, path in items:
        config = DeepSpeedConfig(path, mpu=Grid(world))
        zero = config.zero_config
        out.append(
            {
                "stage": int(zero.stage),
                "train_batch_size": config.train_batch_size,
                "micro_batch": config.train_micro_batch_size_per_gpu,
                "gradient_accumulation_steps": config.gradient_accumulation_steps,
                "gradient_clipping": config.gradient_clipping,
                "bf16": config.bfloat16_config.enabled,
                "reduce_bucket_size": zero.reduce_bucket_size,
                "stage3_prefetch_bucket_size": zero.prefetch_bucket_size,
                "stage3_param_persistence_threshold": zero.param_persistence_threshold,
                "sub_group_size": zero.sub_group_size,
                "overlap_comm": zero.overlap_comm,
                "optimizer": [config.optimizer_name, config.optimizer_params],
            }
        )
    return out


def torchtitan(items: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """The Trainer.Config of each module, checked by torchtitan itself, and the run that the ledger reads from it."""
    from torchtitan.trainer import Trainer

    from train_ledger.interop import read

    out = []
    for world, path in items:
        folder, name = Path(path).parent, Path(path).name
        os.chdir(folder)
        found = read("torchtitan", f"{name}:{name}", world_size=str(world))
        config = getattr(sys.modules.pop(name), name)()
        assert isinstance(config, Trainer.Config)
        # trainer.py:Trainer.__init__ does this first: sizes, rope and sharding are checked against the parallelism.
        config.model_spec.model.update_from_config(config=config)
        out.append({"run": found.run.to_dict(), "ignored": found.ignored, "notes": found.notes})
    return out


if __name__ == "__main__":
    which, *rest = sys.argv[1:]
    pairs = [(int(w), p) for w, _, p in (item.partition(":") for item in rest)]
    answer = (
        flags()
        if which == "flags"
        else {"megatron": megatron, "deepspeed": deepspeed, "torchtitan": torchtitan}[which](pairs)
    )
    print("\nANSWER " + json.dumps(answer, default=str))
