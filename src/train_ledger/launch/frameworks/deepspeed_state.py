"""Where DeepSpeed's optimizers keep their tensors: owners of the census, fp32 masters, and how weights get in and out.

One optimizer class a case (runtime/engine.py:_do_optimizer_sanity_check):
stage 3 `DeepSpeedZeroOptimizer_Stage3`; stages 1 and 2 `DeepSpeedZeroOptimizer`; stage 1 with fp32 gradients
`BF16_Optimizer`; stage 0 `FP16_UnfusedOptimizer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Claim = tuple[str, str, Tensor]  # container, owner, tensor


def kind(engine: Any) -> str:
    """`zero3`, `zero12`, `bf16` or `ddp`, by what the optimizer has."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "lp_param_buffer"):
        return "zero3"
    if hasattr(optimizer, "bit16_groups_flat"):
        return "zero12"
    return "bf16" if hasattr(optimizer, "bf16_groups_flat") else "ddp"


def owners(engine: Any) -> Iterator[Claim]:
    """Every tensor that is kept between steps."""
    optimizer = engine.optimizer
    yield from {"zero3": _zero3, "zero12": _zero12, "bf16": _bf16, "ddp": _ddp}[kind(engine)](engine)
    for entries in optimizer.optimizer.state.values():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                yield name, "optimizer", value
    if isinstance(optimizer._global_grad_norm, Tensor):
        yield "global_grad_norm", "framework", optimizer._global_grad_norm


def _zero3(engine: Any) -> Iterator[Claim]:
    o = engine.optimizer
    yield "param", "framework", o.lp_param_buffer
    for flat in o.fp32_partitioned_groups_flat:
        yield "main_param", "framework", flat
    yield "grad", "framework", o.grad_partitions_flat_buffer
    for bucket in o.ipg_buckets.values():
        if bucket.buffer is not None:
            yield "reduce_bucket", "framework", bucket.buffer
    yield "inf_or_nan_tracker", "framework", o.inf_or_nan_tracker
    for param in engine.module.parameters():
        yield "persisted_param" if param.ds_persist else "gathered_param", "framework", param.data


def _zero12(engine: Any) -> Iterator[Claim]:
    o = engine.optimizer
    for flat in o.bit16_groups_flat:
        yield "param", "framework", flat
    for flat in o.single_partition_of_fp32_groups:
        yield "main_param", "framework", flat
    for param in engine.module.parameters():
        if param.grad is not None:
            yield "grad", "framework", param.grad
    for bucket in o.ipg_buckets.values():
        for buffer in bucket.buffer:
            yield "reduce_bucket", "framework", buffer


def _bf16(engine: Any) -> Iterator[Claim]:
    from deepspeed.runtime.utils import graph_cache

    o = engine.optimizer
    for flat in o.bf16_groups_flat:
        yield "param", "framework", flat
    for flat in o.fp32_groups_flat_partition:
        yield "main_param", "framework", flat
    for flat in o.fp32_groups_gradients_flat:
        yield "grad", "framework", flat
    for tensors in graph_cache.values():
        for tensor in tensors if isinstance(tensors, list) else [tensors]:
            if isinstance(tensor, Tensor):
                yield "norm_buffer", "framework", tensor


def _ddp(engine: Any) -> Iterator[Claim]:
    for param in engine.module.parameters():
        yield "param", "framework", param.data
        if param.grad is not None:
            yield "grad", "framework", param.grad
    for group in engine.optimizer.fp32_groups:
        for param in group:
            yield "main_param", "framework", param


def master_piece(engine: Any, param: nn.Parameter) -> tuple[int, Tensor]:
    """This rank's part of a parameter's fp32 master: first element's index in the whole, and the part as a 1-D
    tensor (may be empty).
    """
    o = engine.optimizer
    if kind(engine) == "zero3":
        group, offset, numel = o.grad_position[o.get_param_id(param)]
        start = numel * dist.get_rank()
        own = min(max(param.ds_numel - start, 0), numel)  # the last ranks' parts are padding, in part or whole
        return start, o.fp32_partitioned_groups_flat[group].detach().narrow(0, offset, own)
    if kind(engine) == "ddp":
        for low, high in zip(o.fp16_groups, o.fp32_groups, strict=True):
            for candidate, fp32 in zip(low, high, strict=True):
                if candidate is param:
                    return 0, fp32.detach().view(-1)
    mapping = param._hp_mapping
    if mapping is None:
        return 0, torch.empty(0, device=param.device)
    return mapping.lp_fragment_address.start, mapping.hp_fragment.detach()


def master(engine: Any, param: nn.Parameter) -> tuple[str, Tensor] | None:
    """Container and tensor of this rank's part of the fp32 master; None where the rank holds none of it."""
    _, piece = master_piece(engine, param)
    return ("main_param", piece) if piece.numel() else None


def load(engine: Any, param: nn.Parameter, value: Tensor) -> None:
    """Puts a whole fp32 tensor into the master and its rounding into the model's copy. Before the first step only."""
    start, piece = master_piece(engine, param)
    flat = value.reshape(-1)
    piece.copy_(flat[start : start + piece.numel()])
    if kind(engine) == "zero3":
        param.ds_tensor.narrow(0, 0, piece.numel()).copy_(piece)
    else:
        param.copy_(value)
    if kind(engine) == "ddp":
        # Stage 0's optimizer steps once, on zero gradients, when it is made (unfused_optimizer.py:
        # initialize_optimizer_states): AdamW would count one step more than was trained, and correct its bias for that.
        for entry in engine.optimizer.optimizer.state.values():
            entry["step"].zero_()


def gather_master(engine: Any, param: nn.Parameter, owner: int) -> Tensor:
    """The whole fp32 master as a 1-D tensor, right on rank `owner`. All ranks call it."""
    start, piece = master_piece(engine, param)
    whole = torch.zeros(getattr(param, "ds_numel", param.numel()), device=piece.device)
    whole.narrow(0, start, piece.numel()).copy_(piece) if piece.numel() else None
    if kind(engine) != "ddp":  # without ZeRO every rank holds it whole
        dist.reduce(whole, owner)
    return whole
