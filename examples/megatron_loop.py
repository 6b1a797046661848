"""A training script of your own on Megatron Core, with a probe around each step.

    torchrun --nproc-per-node 2 examples/megatron_loop.py --out probe.json

writes probe.rank0.json and probe.rank1.json: memory at every step boundary (on CUDA), and the collectives of step 2.
"""

import argparse
import os

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from train_ledger.launch.frameworks import megatron_shim
from train_ledger.probe import MemoryProbe

VOCAB, SEQUENCE, MICRO_BATCHES = 128, 16, 2


def build(device: torch.device) -> tuple[torch.nn.Module, object]:
    """Data parallel over all ranks, with the distributed optimizer."""
    on_gpu = device.type == "cuda"
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        bf16=True,
        params_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not on_gpu,
        masked_softmax_fusion=on_gpu,
    )
    spec = get_gpt_layer_local_spec()
    model = GPTModel(config, transformer_layer_spec=spec, vocab_size=VOCAB, max_sequence_length=SEQUENCE).to(device)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True)
    model = DistributedDataParallel(config, ddp, Float16Module(config, model))
    config.finalize_model_grads_func, config.no_sync_func = finalize_model_grads, model.no_sync
    settings = OptimizerConfig(optimizer="adam", lr=3e-4, bf16=True, use_distributed_optimizer=True)
    return model, get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)


def main() -> None:
    """Four steps of a small GPT."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="probe.json")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    megatron_shim.install(device)  # what Megatron Core takes from CUDA, where there is none; nothing on a GPU
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=not on_gpu)
    model, optimizer = build(device)

    def forward(data: object, model: torch.nn.Module) -> tuple[torch.Tensor, object]:
        tokens = torch.randint(0, VOCAB, (1, SEQUENCE + 1), device=device)
        positions = torch.arange(SEQUENCE, device=device)[None]
        losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        return losses, lambda losses: (losses.float().mean(), {})

    probe = MemoryProbe("megatron", profile_steps=[2], optimizer=(optimizer, "step"))
    for step in range(4):
        with probe.step(step):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=None,
                model=[model],
                num_microbatches=MICRO_BATCHES,
                seq_length=SEQUENCE,
                micro_batch_size=1,
                forward_only=False,
            )
            optimizer.step()
    print("wrote", probe.dump(args.out))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
