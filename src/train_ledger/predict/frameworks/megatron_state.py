"""What one rank of Megatron Core keeps between steps: containers with their sizes, padding and single allocations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

from train_ledger.spec.dtypes import element_bytes
from train_ledger.spec.ledger import Container

from .megatron_layout import buffer, chunk_params, owned
from .megatron_plan import Plan, chunks

_CORE = "megatron/core"


def containers(plan: Plan, stage: int, shard: int) -> tuple[Container, ...]:
    """Containers of a rank of pipeline stage `stage` that is number `shard` among the ranks that share its optimizer
    state.

    The state is that after a step: gradients stay allocated (`zero_grad_buffer` zeroes and does not free), moments
    exist.
    """
    return (
        *_buffers(plan, stage),
        *_optimizer(plan, stage, shard if plan.distributed_optimizer else 0),
        *_rest(plan, stage),
    )


def _container(
    name: str, owner: str, dtype: str, blocks: Mapping[int, int], rule: str, pad: int = 0, device: str = "cuda"
) -> Container:
    """A container from its single allocations, {elements: how many}; `pad` of all elements only fill up."""
    size = element_bytes(dtype)
    numel = sum(n * count for n, count in blocks.items())
    return Container(
        name=name,
        owner=owner,
        dtype=dtype,
        numel=numel - pad,
        pad_numel=pad,
        device=device,
        rule=rule,
        blocks=tuple((n * size, count) for n, count in sorted(blocks.items(), reverse=True)),
    )


@lru_cache(maxsize=4096)
def _buffers(plan: Plan, stage: int) -> tuple[Container, ...]:
    """bf16 parameters and gradients, both whole on every data-parallel rank.

    Without the distributed optimizer the parameters are not moved into a flat buffer: each keeps a storage of its own.
    """
    layouts = [buffer(plan, chunk) for chunk in chunks(plan, stage)]
    pad = sum(b.numel - b.real_numel for b in layouts)
    flat = Counter(b.numel for b in layouts)
    rule = f"{_CORE}/distributed/param_and_grad_buffer.py:_ParamAndGradBuffer.__init__"
    if plan.distributed_optimizer:
        param = _container("param", "framework", "bfloat16", flat, rule, pad)
    else:
        single = Counter(p.numel for chunk in chunks(plan, stage) for p in chunk_params(plan, chunk))
        param = _container(
            "param", "framework", "bfloat16", single, f"{_CORE}/transformer/module.py:Float16Module.__init__"
        )
    return (param, _container("grad", "framework", plan.grad_dtype, flat, rule, pad))


@lru_cache(maxsize=65536)
def _optimizer(plan: Plan, stage: int, shard: int) -> tuple[Container, ...]:
    """fp32 master, both moments and torch's step counters, one allocation a piece of a parameter."""
    pieces: Counter[int] = Counter()
    for chunk in chunks(plan, stage):
        pieces.update(owned(plan, chunk, shard))
    main = (
        f"{_CORE}/optimizer/distrib_optimizer.py:_build_model_and_main_param_groups"
        if plan.distributed_optimizer
        else f"{_CORE}/optimizer/optimizer.py:Float16OptimizerWithFloat16Params.__init__"
    )
    out = [
        _container("main_param", "framework", "float32", pieces, main),
        _container("exp_avg", "optimizer", "float32", pieces, "torch/optim/adam.py:Adam._init_group"),
        _container("exp_avg_sq", "optimizer", "float32", pieces, "torch/optim/adam.py:Adam._init_group"),
        _container(
            "step",
            "optimizer",
            "float32",
            {1: pieces.total()} if pieces else {},
            "torch/optim/adam.py:Adam._init_group",
            device="cpu",
        ),
    ]
    if plan.grad_dtype != "float32":
        # `.float()` of an fp32 gradient is the gradient itself; of a bf16 one it is a copy that lives until the next
        # zero_grad.
        copy = (
            f"{_CORE}/optimizer/distrib_optimizer.py"
            if plan.distributed_optimizer
            else f"{_CORE}/optimizer/optimizer.py"
        )
        out.append(_container("main_grad", "framework", "float32", pieces, f"{copy}:_copy_model_grads_to_main_grads"))
    return tuple(out)


@lru_cache(maxsize=4096)
def _rest(plan: Plan, stage: int) -> tuple[Container, ...]:
    """Scratch buffers, tensors that the pipeline still holds, and constants of the model."""
    held = chunks(plan, stage)
    out = [
        _container(
            "loss_scale",
            "framework",
            "float32",
            {1: 1},
            f"{_CORE}/optimizer/optimizer.py:MixedPrecisionOptimizer.__init__",
        )
    ]
    # A constant of a class, made when Megatron Core is imported.
    mtp = f"{_CORE}/transformer/multi_token_prediction.py:MTPLossAutoScaler"
    out.append(_container("mtp_loss_scale", "framework", "float32", {1: 1}, mtp, device="cpu"))
    scratch = _scratch_numel(plan)
    if scratch:
        out.append(
            _container(
                "global_memory_buffer",
                "framework",
                "bfloat16",
                {scratch: 1},
                f"{_CORE}/utils.py:GlobalMemoryBuffer.get_tensor",
            )
        )
    receiving = sum(not chunk.pre for chunk in held)
    if receiving:
        # `decoder.input_tensor` keeps the last input that came in, and its `.grad` the gradient that was sent back.
        out.append(
            _container(
                "received_activation",
                "framework",
                "bfloat16",
                {plan.boundary: 2 * receiving},
                f"{_CORE}/transformer/transformer_block.py:set_input_tensor",
            )
        )
    if plan.rope:
        cache = f"{_CORE}/models/common/embeddings/rotary_pos_embedding.py:RotaryEmbedding"
        out.append(
            _container("rope_cache", "model", "float32", {plan.seq * plan.head_dim: len(held)}, f"{cache}.forward")
        )
        out.append(
            _container("rope_frequencies", "model", "float32", {plan.head_dim // 2: len(held)}, f"{cache}.__init__")
        )
    return tuple(out)


def _scratch_numel(plan: Plan) -> int:
    """Elements of the scratch buffer "mpu", the largest request made of it.

    Requests: the gathered input of a column-parallel layer under sequence parallelism
    (tensor_parallel/layers.py:LinearWithGradAccumulationAndAsyncCommunication), and the scores of Megatron's own
    attention (transformer/dot_product_attention.py).
    """
    gathered = plan.activation if plan.sp else 0
    scores = plan.micro_batch * (plan.heads // plan.tp) * plan.seq * plan.seq if plan.local_attention else 0
    return max(gathered, scores)
