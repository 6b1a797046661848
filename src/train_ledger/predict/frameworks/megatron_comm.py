"""What one rank of Megatron Core sends in a step: every collective and point-to-point call, by size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from train_ledger.spec.ledger import Collective, merge_collectives

from .megatron_layout import buffer, chunk_params
from .megatron_plan import Chunk, Plan, chunks

_CORE = "megatron/core"

BF16, FP32 = "bfloat16", "float32"


@lru_cache(maxsize=4096)
def collectives(plan: Plan, stage: int, first: bool = False) -> tuple[Collective, ...]:
    """Calls of one step on a rank of pipeline stage `stage`.

    `first`: the first step of a run, in which gradients are reduced after backward because the number of gradients a
    bucket waits for is not known yet (distributed/param_and_grad_buffer.py:finish_grad_sync, `is_first_batch`).
    """
    held = chunks(plan, stage)
    rows: list[Collective] = []
    for chunk in held:
        rows.extend(_tensor_parallel(plan, chunk))
        rows.extend(_context_parallel(plan, chunk))
        rows.extend(_data_parallel(plan, chunk, stage, first))
    rows.extend(_pipeline(plan, held, stage))
    rows.extend(_finalize(plan, held, stage))
    return merge_collectives(rows)


def _tensor_parallel(plan: Plan, chunk: Chunk) -> Iterator[Collective]:
    """Activations and their gradients, each micro-batch.

    With sequence parallelism every column-parallel layer gathers its input, in backward once more for the weight
    gradient, and reduce-scatters the input's gradient; every row-parallel layer reduce-scatters its output and
    gathers the output's gradient. Without it one all-reduce stands for each pair. On one rank Megatron calls nothing,
    but for the loss.
    """
    m, whole = plan.micro_batches, plan.activation
    part = whole // plan.tp
    column = f"{_CORE}/tensor_parallel/layers.py:LinearWithGradAccumulationAndAsyncCommunication"
    row = f"{_CORE}/tensor_parallel/mappings.py"

    def gather(count: int, component: str, phase: str, rule: str) -> Collective:
        return Collective("all_gather", "tp", BF16, part, whole, m * count, component, phase, rule)

    def scatter(count: int, component: str, phase: str, rule: str) -> Collective:
        return Collective("reduce_scatter", "tp", BF16, whole, part, m * count, component, phase, rule)

    def reduce(count: int, component: str, phase: str, rule: str) -> Collective:
        return Collective("all_reduce", "tp", BF16, whole, whole, m * count, component, phase, rule)

    again, mlp_again = recomputed_layers(plan, chunk)
    if plan.sp:
        for layer in ("attention", "mlp"):
            extra = again + (mlp_again if layer == "mlp" else 0)
            yield gather(chunk.layers, layer, "forward", f"{column}.forward")
            yield scatter(chunk.layers, layer, "forward", f"{row}:_ReduceScatterToSequenceParallelRegion.forward")
            yield gather(extra, layer, "backward", f"{column}.forward")
            yield scatter(extra, layer, "backward", f"{row}:_ReduceScatterToSequenceParallelRegion.forward")
            yield gather(chunk.layers, layer, "backward", f"{row}:_ReduceScatterToSequenceParallelRegion.backward")
            yield gather(chunk.layers, layer, "backward", f"{column}.backward")
            yield scatter(chunk.layers, layer, "backward", f"{column}.backward")
        if chunk.pre:
            if plan.learned_positions:
                # Positions are added to the whole sequence, so the embedding is reduced whole and then split.
                yield reduce(1, "embedding", "forward", f"{row}:_ReduceFromModelParallelRegion.forward")
                yield gather(1, "embedding", "backward", f"{row}:_ScatterToSequenceParallelRegion.backward")
            else:
                yield scatter(1, "embedding", "forward", f"{row}:_ReduceScatterToSequenceParallelRegion.forward")
                yield gather(1, "embedding", "backward", f"{row}:_ReduceScatterToSequenceParallelRegion.backward")
        if chunk.post:
            yield gather(1, "output_layer", "forward", f"{column}.forward")
            yield gather(1, "output_layer", "backward", f"{column}.backward")
            yield scatter(1, "output_layer", "backward", f"{column}.backward")
    elif plan.tp > 1:
        for layer in ("attention", "mlp"):
            extra = again + (mlp_again if layer == "mlp" else 0)
            yield reduce(chunk.layers, layer, "forward", f"{row}:_ReduceFromModelParallelRegion.forward")
            yield reduce(extra, layer, "backward", f"{row}:_ReduceFromModelParallelRegion.forward")
            yield reduce(chunk.layers, layer, "backward", f"{column}.backward")
        if chunk.pre:
            yield reduce(1, "embedding", "forward", f"{row}:_ReduceFromModelParallelRegion.forward")
        if chunk.post:
            yield reduce(1, "output_layer", "backward", f"{column}.backward")
    if plan.query_groups < plan.tp:
        # Fewer key and value heads than ranks: QKV is gathered whole
        # (transformer/attention.py:get_query_key_value_tensors).
        qkv = plan.seq * plan.micro_batch * plan.qkv_rows
        rule = f"{row}:_AllGatherFromTensorParallelRegion"
        forward = (chunk.layers * m, "forward"), (again * m, "backward")
        for count, phase in forward:
            yield Collective(
                "all_gather", "tp", BF16, qkv // plan.tp, qkv, count, "attention", phase, f"{rule}.forward"
            )
        yield Collective(
            "reduce_scatter",
            "tp",
            BF16,
            qkv,
            qkv // plan.tp,
            chunk.layers * m,
            "attention",
            "backward",
            f"{rule}.backward",
        )
    if chunk.post:
        # Maximum, predicted logit and sum of exponentials, also where the group is one rank.
        tokens = plan.seq * plan.micro_batch
        rule = f"{_CORE}/tensor_parallel/cross_entropy.py:_VocabParallelCrossEntropy.forward"
        yield Collective("all_reduce", "tp", FP32, tokens, tokens, 3 * m, "loss", "forward", rule)


def recomputed_layers(plan: Plan, chunk: Chunk) -> tuple[int, int]:
    """Layers of a chunk whose forward runs again in backward, and those of which only the MLP does (recompute.py)."""
    if plan.recompute == "full":
        return (chunk.layers if plan.recompute_method == "uniform" else min(chunk.layers, plan.recompute_layers)), 0
    if plan.recompute == "selective" and "mlp" in plan.recompute_modules:
        return 0, chunk.layers
    return 0, 0


def _context_parallel(plan: Plan, chunk: Chunk) -> Iterator[Collective]:
    """Keys and values of every layer, gathered in forward and their gradients scattered in backward.

    The attention core of this program does as Transformer Engine does with `cp_comm_type="all_gather"`.
    """
    if plan.cp == 1:
        return
    heads = max(plan.query_groups // plan.tp, 1)
    part = plan.seq * plan.micro_batch * heads * plan.head_dim
    again, _ = recomputed_layers(plan, chunk)
    if plan.recompute == "selective" and "core_attn" in plan.recompute_modules:
        again = chunk.layers
    rule = f"{_CORE}/tensor_parallel/mappings.py:_GatherFromSequenceParallelRegion"
    for layers, phase in ((chunk.layers, "forward"), (again, "backward")):
        count = 2 * layers * plan.micro_batches
        yield Collective("all_gather", "cp", BF16, part, part * plan.cp, count, "attention", phase, f"{rule}.forward")
    count = 2 * chunk.layers * plan.micro_batches
    yield Collective(
        "reduce_scatter", "cp", BF16, part * plan.cp, part, count, "attention", "backward", f"{rule}.backward"
    )


def _data_parallel(plan: Plan, chunk: Chunk, stage: int, first: bool) -> Iterator[Collective]:
    """One reduction of gradients and, with the distributed optimizer, one gathering of parameters a bucket."""
    where = f"{_CORE}/distributed/param_and_grad_buffer.py:_ParamAndGradBucketGroup"
    # Later stages and interleaved chunks reduce all at once after their backward (megatron/training,
    # align_grad_reduce).
    overlapped = plan.overlap_grad_reduce and not first and stage == 0 and plan.vp == 1
    for size, count in Counter(end - start for start, end in buffer(plan, chunk).buckets).items():
        share = size // plan.shards
        phase = "backward" if overlapped else "step"
        if not plan.distributed_optimizer:
            yield Collective(
                "all_reduce",
                "dp_cp",
                plan.grad_dtype,
                size,
                size,
                count,
                "grad_sync",
                phase,
                f"{where}.start_grad_sync",
            )
            continue
        yield Collective(
            "reduce_scatter",
            "dp_cp",
            plan.grad_dtype,
            size,
            share,
            count,
            "grad_sync",
            phase,
            f"{where}.start_grad_sync",
        )
        phase = "forward" if plan.overlap_param_gather else "optimizer"
        yield Collective(
            "all_gather", "dp_cp", BF16, share, size, count, "param_sync", phase, f"{where}.start_param_sync"
        )


def _pipeline(plan: Plan, held: tuple[Chunk, ...], stage: int) -> Iterator[Collective]:
    """Activations to the next chunk and gradients to the previous one, each micro-batch.

    Interleaved schedules overlap these calls, and between two stages they use the world's group for one direction, so
    that both run at once (pipeline_parallel/p2p_communication.py:_p2p_ops).
    """
    if plan.pp == 1:
        return
    onward = plan.micro_batches * sum(not chunk.post for chunk in held)
    back = plan.micro_batches * sum(not chunk.pre for chunk in held)
    batched = f"{_CORE}/pipeline_parallel/p2p_communication.py:_batched_p2p_ops"
    single = f"{_CORE}/pipeline_parallel/p2p_communication.py:_p2p_ops"
    sending = receiving = "pp"
    if plan.vp > 1 and plan.pp == 2:
        sending, receiving = ("pp", "world") if stage == 0 else ("world", "pp")
    rule, size = (single if plan.vp > 1 else batched), plan.boundary
    for count, send_phase, recv_phase in ((onward, "forward", "backward"), (back, "backward", "forward")):
        yield Collective("send", sending, BF16, size, 0, count, "pipeline", send_phase, rule)
        yield Collective("recv", receiving, BF16, 0, size, count, "pipeline", recv_phase, rule)


def _finalize(plan: Plan, held: tuple[Chunk, ...], stage: int) -> Iterator[Collective]:
    """What happens once between backward and the optimizer."""
    where = f"{_CORE}/distributed/finalize_model_grads.py"
    if plan.tp > 1:
        numel = sum(p.numel for chunk in held for p in chunk_params(plan, chunk) if p.tp_reduced)
        if numel:
            rule = f"{where}:_allreduce_non_tensor_model_parallel_grads"
            yield Collective("all_reduce", "tp", plan.grad_dtype, numel, numel, 1, "finalize_model_grads", "step", rule)
    if plan.tied and plan.pp > 1 and stage in (0, plan.pp - 1):
        numel = plan.vocab_rows * plan.hidden
        yield Collective(
            "all_reduce",
            "embd",
            plan.grad_dtype,
            numel,
            numel,
            1,
            "finalize_model_grads",
            "step",
            f"{where}:_allreduce_word_embedding_grads",
        )
    # With clipping turned off too: the chained optimizer always asks for the norm.
    group = "intra_dist_opt" if plan.distributed_optimizer else "mp"
    rule = f"{_CORE}/optimizer/optimizer.py:ChainedOptimizer.get_grad_norm"
    yield Collective("all_reduce", group, FP32, 1, 1, 1, "grad_norm", "optimizer", rule)
