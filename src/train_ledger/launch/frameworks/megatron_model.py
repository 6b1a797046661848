"""A run as Megatron Core's own objects: configuration, layer specification, model chunks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from train_ledger.spec.run import Run

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu}
NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
POSITIONS = {"rope": "rope", "learned": "learned_absolute", "none": "none"}


def padded_vocab(run: Run) -> int:
    """Rows of the embedding over all tensor-parallel ranks, as megatron/training pads them."""
    multiple = run.settings["make_vocab_size_divisible_by"] * run.parallel.tensor_parallel
    return -(-run.model.vocab_size // multiple) * multiple


def transformer_config(run: Run, device: torch.device, random_weights: bool) -> TransformerConfig:
    """Megatron's configuration of the model and its schedule.

    Fused kernels come from Apex or Transformer Engine, which this environment has not, so they are off on every device.
    """
    m, p, s = run.model, run.parallel, run.settings
    cuda = device.type == "cuda"
    interleaved = p.virtual_pipeline_parallel > 1
    return TransformerConfig(
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        num_attention_heads=m.num_attention_heads,
        num_query_groups=m.num_query_groups,
        kv_channels=m.head_dim,
        ffn_hidden_size=m.ffn_hidden_size,
        normalization=NORMS[m.normalization],
        layernorm_epsilon=m.norm_eps,
        gated_linear_unit=m.gated_mlp,
        activation_func=ACTIVATIONS[m.activation],
        add_bias_linear=m.mlp_bias,
        add_qkv_bias=m.qkv_bias,
        qk_layernorm=m.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=p.tensor_parallel,
        sequence_parallel=p.sequence_parallel,
        pipeline_model_parallel_size=p.pipeline_parallel,
        virtual_pipeline_model_parallel_size=p.virtual_pipeline_parallel if interleaved else None,
        context_parallel_size=p.context_parallel,
        num_layers_in_first_pipeline_stage=s["num_layers_in_first_pipeline_stage"],
        num_layers_in_last_pipeline_stage=s["num_layers_in_last_pipeline_stage"],
        recompute_granularity=s["recompute_granularity"],
        recompute_method=s["recompute_method"],
        recompute_num_layers=s["recompute_num_layers"],
        recompute_modules=list(s["recompute_modules"]),
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        # Megatron's arguments overlap point-to-point calls in interleaved schedules and batch them in others.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        batch_p2p_sync=cuda,
        deallocate_pipeline_outputs=True,
        use_cpu_initialization=not cuda,
        perform_initialization=random_weights,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def ddp_config(run: Run) -> DistributedDataParallelConfig:
    """Buffers, buckets and their overlap. Megatron fills in and changes the bucket size, so every run makes its own."""
    s = run.settings
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=s["grad_reduce_in_fp32"],
        overlap_grad_reduce=s["overlap_grad_reduce"],
        overlap_param_gather=s["overlap_param_gather"],
        use_distributed_optimizer=s["use_distributed_optimizer"],
        bucket_size=s["bucket_size"],
        pad_buckets_for_high_nccl_busbw=s["pad_buckets_for_high_nccl_busbw"],
    )


def optimizer_config(run: Run) -> OptimizerConfig:
    """AdamW in fp32 over bf16 parameters. The learning rate is set anew each step."""
    o, s = run.optimizer, run.settings
    return OptimizerConfig(
        optimizer="adam",
        lr=o.lr,
        min_lr=o.min_lr,
        weight_decay=o.weight_decay,
        adam_beta1=o.beta1,
        adam_beta2=o.beta2,
        adam_eps=o.eps,
        clip_grad=o.clip_grad,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=s["use_distributed_optimizer"],
        overlap_param_gather=s["overlap_param_gather"],
    )


def torch_norm(config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    """PyTorch's norm, marked for sequence parallelism as Megatron's fused norms mark theirs.

    Megatron's own wrapper refuses sequence parallelism (transformer/torch_norm.py:WrappedTorchNorm), and without Apex
    or Transformer Engine it has no other norm.
    """
    kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    module = kind(hidden_size, eps=eps)
    for param in module.parameters():
        param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return module


def own_positions(seq_length: int, ranks: int, rank: int, device: torch.device) -> torch.Tensor:
    """Positions of the tokens that one context-parallel rank holds.

    The sequence is cut into 2 x `ranks` pieces, and rank r takes piece r from the front and piece r from the back, so
    that causal attention costs all the same (megatron/core/utils.py:get_batch_on_this_cp_rank).
    """
    every = torch.arange(seq_length, device=device)
    if ranks == 1:
        return every  # a sequence of one token has no second piece
    pieces = every.chunk(2 * ranks)
    return torch.cat((pieces[rank], pieces[-1 - rank]))


class SdpaAttention(torch.nn.Module):
    """Causal attention by PyTorch's kernel, in the place of Megatron's own, whose scores take sequence^2 elements.

    Under context parallelism each rank gathers all keys and values and reduce-scatters their gradients, as Transformer
    Engine does with `cp_comm_type="all_gather"`. Megatron's own attention has no context parallelism.
    """

    def __init__(self, config: TransformerConfig, *, pg_collection: ProcessGroupCollection, **_: Any) -> None:
        super().__init__()
        self.cp_group = pg_collection.cp

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Sequence, batch, heads, head width for all three; gives sequence, batch, heads x width."""
        mask, ranks = None, self.cp_group.size()
        if ranks > 1:
            key, value = (gather_from_sequence_parallel_region(x, group=self.cp_group) for x in (key, value))
            held = [own_positions(key.shape[0], ranks, r, key.device) for r in range(ranks)]
            mask = held[self.cp_group.rank()][:, None] >= torch.cat(held)[None, :]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
        return out.permute(2, 0, 1, 3).flatten(2)


def layer_spec(run: Run) -> ModuleSpec:
    """Megatron's layer of its own modules ("local"), with norms that take sequence parallelism, and the chosen
    attention.
    """
    m = run.model
    spec = get_gpt_layer_local_spec(normalization=NORMS[m.normalization], qk_layernorm=m.qk_norm)
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = torch_norm
    attention = parts.self_attention.submodules
    if m.qk_norm:
        attention.q_layernorm = attention.k_layernorm = torch_norm
    if run.settings["core_attention"] == "sdpa":
        attention.core_attention = SdpaAttention
    return spec


def build_chunk(run: Run, config: TransformerConfig, device: torch.device, vp_stage: int | None) -> Float16Module:
    """One model chunk in bf16: the whole stage, or virtual stage `vp_stage` of it."""
    m = run.model
    scaling = m.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    spec = layer_spec(run)
    ends = {"ignore_virtual": False, "vp_stage": vp_stage}
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[spec] * get_num_layers_to_build(config, vp_stage=vp_stage), layer_norm=torch_norm
        ),
        vocab_size=padded_vocab(run),
        max_sequence_length=m.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        share_embeddings_and_output_weights=m.tie_embeddings,
        position_embedding_type=POSITIONS[m.position_embedding],
        rotary_base=m.rope_theta,
        rope_scaling=kind == "llama3",
        rope_scaling_factor=scaling.get("factor", 8.0),
        seq_len_interpolation_factor=scaling["factor"] if kind == "linear" else None,
        vp_stage=vp_stage,
    )
    for param in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    return Float16Module(config, model.to(device))


def build_model(run: Run, device: torch.device, random_weights: bool) -> list[DistributedDataParallel]:
    """All chunks of this pipeline rank, each in Megatron's DistributedDataParallel
    (megatron/training/training.py:get_model).
    """
    config = transformer_config(run, device, random_weights)
    virtual = run.parallel.virtual_pipeline_parallel
    chunks = [build_chunk(run, config, device, v if virtual > 1 else None) for v in range(virtual)]
    ddp = ddp_config(run)
    return [DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
