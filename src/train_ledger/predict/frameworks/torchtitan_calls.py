"""The collectives of one torchtitan step, each with the rule that makes it. What differs with pipeline stages is in
torchtitan_pipeline.py.

Symbols: L layers, M micro-batches, B sequences of a micro-batch, S tokens of a sequence on a context-parallel rank, d
hidden size, T tensor-parallel ranks, D ranks that FSDP shards over, R replicas (HSDP), C chunks of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from train_ledger.spec.ledger import Collective
from train_ledger.spec.run import Run

from . import torchtitan_dtensor, torchtitan_pipeline
from .torchtitan_layout import Layout, Unit, local_tokens, shard_axis, shards
from .torchtitan_pipeline import Work

_GROUP = "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py"
_REDUCE = "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:foreach_reduce"
_REDISTRIBUTE = "torchtitan/protocols/module.py"


@dataclass(frozen=True)
class Step:
    """What kind of step: `first` is step 1, `logs` a step that logs."""

    first: bool
    logs: bool


def kind_of(run: Run, step: str) -> Step:
    """`first` logs (components/metrics.py:should_log), and `steady` does when every step logs."""
    return Step(first=step == "first", logs=step in ("first", "log") or run.settings["log_freq"] == 1)


def collectives(run: Run, layout: Layout, rank: int, step: str) -> Iterator[Collective]:
    """All calls of one step of a rank with that layout."""
    kind = kind_of(run, step)
    p = run.parallel
    pipelined = p.pipeline_parallel > 1
    if p.data_parallel > 1:
        yield _all_reduce("batch", "int64", 1, 1, "token count", "step", "torchtitan/trainer.py:train_step")
    if pipelined:
        yield from torchtitan_pipeline.sharded(run, layout, rank, kind.first)
        yield from torchtitan_pipeline.transfers(run, rank, kind.first)
    else:
        if shards(run) > 1:
            yield from _gathers(run, layout, kind)
        yield from _reductions(run, layout)
    held = torchtitan_pipeline.work(run, rank, kind.first)
    if p.context_parallel > 1:
        for work in held:
            yield from _keys_and_values(run, work)
    if p.tensor_parallel > 1:
        for work in held:
            yield from _activations(run, work)
        if not pipelined:
            yield from _norm_gradients(run)
        for work in held:
            if work.end:
                yield from _loss(run, work.forwards)
    yield from _gradient_norm(run, layout)
    if kind.logs and p.data_parallel * p.context_parallel > 1:
        rule = "torchtitan/trainer.py:train_step"
        yield _all_reduce("loss", "float32", 1, 2, "logging", "step", rule)
        yield _all_reduce("loss", "int64", 1, 1, "logging", "step", rule)
    if kind.first:
        yield Collective(
            "barrier", "world", "uint8", 0, 0, 1, "timeouts", "step", "torchtitan/distributed/utils.py:set_pg_timeouts"
        )


def _all_reduce(group: str, dtype: str, numel: int, count: int, component: str, phase: str, rule: str) -> Collective:
    return Collective("all_reduce", group, dtype, numel, numel, count, component, phase, rule)


# --- FSDP2 -----------------------------------------------------------------------------------------------------------


def _gathers(run: Run, layout: Layout, kind: Step) -> Iterator[Collective]:
    """All-gathers of parameters in `mixed_precision_param`, before the forward and again before the backward of a unit.

    The last unit, [norm, lm_head], is not resharded after its forward unless asked to
    (`fsdp.py:apply_fsdp_to_decoder`). But `components/loss.py:ChunkedLossWrapper.__call__` unshards the head before its
    chunks, reshards it after them, and turns resharding on for good: the unit is gathered twice in the first
    micro-batch of all, three times in every later one. The loss stands between the model's forward and the backward.
    """
    s, micro_batches = run.settings, run.num_micro_batches
    policy = s["fsdp_reshard_after_forward"]
    for unit in layout.units:
        between = 0
        if unit.name != "last":
            backward = 0 if policy == "never" else micro_batches
        elif s["chunked_loss"]:
            between = micro_batches - (1 if kind.first and policy != "always" else 0)
            backward = micro_batches
        else:
            backward = micro_batches if policy == "always" else 0
        for phase, count in (("forward", micro_batches), ("step", between), ("backward", backward)):
            if count:
                yield Collective(
                    "all_gather",
                    shard_axis(run),
                    s["mixed_precision_param"],
                    unit.gathered_numel,
                    unit.gathered_numel * shards(run),
                    count * unit.count,
                    f"FSDP {unit.name}",
                    phase,
                    f"{_GROUP}:FSDPParamGroup.unshard",
                )


def _reductions(run: Run, layout: Layout) -> Iterator[Collective]:
    """Reduce-scatters of gradients over the shards, then HSDP's all-reduces over the replicas."""
    p, s = run.parallel, run.settings
    for name, count, numel in _reduce_buffers(run, layout):
        common = (count * run.num_micro_batches, f"FSDP {name}", "backward", _REDUCE)
        if shards(run) > 1:
            yield Collective(
                "reduce_scatter",
                shard_axis(run),
                s["mixed_precision_reduce"],
                numel * shards(run),
                numel,
                *common,
            )
        if p.data_parallel_replicate > 1:
            yield Collective("all_reduce", "dp_replicate", s["mixed_precision_reduce"], numel, numel, *common)


def _reduce_buffers(run: Run, layout: Layout) -> list[tuple[str, int, int]]:
    """(unit, how many, elements of this rank's part) of the buffers that a micro-batch's gradients are reduced into."""
    out = []
    for unit in layout.units:
        for part in reduced_parts(run, unit):
            out.append((unit.name, unit.count, sum(part)))
    return out


def reduced_parts(run: Run, unit: Unit) -> list[list[int]]:
    """Padded elements of the parameters whose gradients one call reduces together; a unit may need several calls.

    With a chunked loss the head's gradient is there before the decoder's backward has begun, and goes ahead alone
    (`_fsdp_param_group.py:FSDPParamGroup.post_backward` reduces the gradients that it finds). A tied weight is then
    reduced twice: as the head, and as the embedding together with the norm.
    """
    padded = {shard.parameter.name: shard.padded_numel for shard in unit.shards + unit.twins}
    if unit.name == "last" and run.settings["chunked_loss"]:
        rest = [n for name, n in padded.items() if name != "lm_head.weight"]
        return [[padded.get("lm_head.weight", rest[0])], rest]
    return [list(padded.values())]


# --- context parallel ------------------------------------------------------------------------------------------------


def _keys_and_values(run: Run, work: Work) -> Iterator[Collective]:
    """Every query sees all keys and values before it, so that FlexAttention gets those of the whole sequence
    (models/common/decoder_sharding.py:set_gqa_inner_attention_local_map; context_parallel/api.py:apply_cp_to_forward
    under partial_dtensor): each is gathered in a layer's forward and again where activations are recomputed, and its
    gradient is summed and scattered in the backward.
    """
    s, p = run.settings, run.parallel
    part = local_tokens(run) * run.model.kv_size // p.tensor_parallel
    whole = part * p.context_parallel
    rule = f"{_REDISTRIBUTE}:Module._redistribute_inputs"
    if s["spmd_backend"] == "partial_dtensor":
        rule = "torch/distributed/tensor/experimental/_context_parallel/_cp_custom_ops.py:flex_cp_allgather"
    again = 0 if s["activation_checkpoint"] == "none" else work.backwards
    for op, sizes, count, component, phase in (
        ("all_gather", (part, whole), work.forwards, "keys and values", "forward"),
        ("all_gather", (part, whole), again, "recompute", "backward"),
        ("reduce_scatter", (whole, part), work.backwards, "keys and values", "backward"),
    ):
        if count * work.layers:
            yield Collective(
                op, "cp", s["mixed_precision_param"], *sizes, 2 * work.layers * count, component, phase, rule
            )


# --- tensor parallel -------------------------------------------------------------------------------------------------


def _activations(run: Run, work: Work) -> Iterator[Collective]:
    """Activations between tensor-parallel regions (models/llama3/sharding.py): B·S·d elements, whole on every rank in
    a region.

    There are 2L + 1 boundaries each way: the embedding's output, two exits a layer; two entries a layer (inputs of
    attention and feed-forward, models/common/decoder_sharding.py), the final norm's output; a pipeline stage has
    those of its modules. With sequence parallelism a boundary gathers or scatters the sequence; without, it sums
    (and its opposite direction is free). Activation checkpointing repeats a layer's boundaries, but for what
    selective checkpointing saves: `distributed/activation_checkpoint.py:_get_default_save_ops` saves
    `_c10d_functional.reduce_scatter_tensor`, which only the DTensor backends call.
    """
    s, m, p = run.settings, run.model, run.parallel
    tokens = local_tokens(run)
    whole, part = tokens * m.hidden_size, tokens * m.hidden_size // p.tensor_parallel
    dtype, ac = s["mixed_precision_param"], s["activation_checkpoint"]
    entries, exits = 2 * work.layers, 2 * work.layers + work.embedding
    again = 0 if ac == "none" else 2 * work.layers * work.backwards
    into, out_of = (f"{_REDISTRIBUTE}:Module._redistribute_{side}" for side in ("inputs", "outputs"))

    def call(rule: str, op: str, count: int, phase: str, component: str = "activation") -> Iterator[Collective]:
        sizes = {"all_gather": (part, whole), "reduce_scatter": (whole, part), "all_reduce": (whole, whole)}[op]
        if count:
            yield Collective(op, "tp", dtype, *sizes, count, component, phase, rule)

    if p.sequence_parallel:
        saved = ac == "selective" and s["spmd_backend"] != "spmd_types"
        yield from call(into, "all_gather", entries * work.forwards, "forward")
        yield from call(out_of, "all_gather", work.end * work.forwards, "forward")
        yield from call(out_of, "reduce_scatter", exits * work.forwards, "forward")
        yield from call(out_of, "all_gather", exits * work.backwards, "backward")
        yield from call(into, "reduce_scatter", entries * work.backwards, "backward")
        yield from call(out_of, "reduce_scatter", work.end * work.backwards, "backward")
        yield from call(into, "all_gather", again, "backward", "recompute")
        if not saved:
            yield from call(out_of, "reduce_scatter", again, "backward", "recompute")
        return
    yield from call(out_of, "all_reduce", exits * work.forwards, "forward")
    if s["spmd_backend"] == "spmd_types":
        yield from call(into, "all_reduce", entries * work.backwards, "backward")
        yield from call(out_of, "all_reduce", work.end * work.backwards, "backward")
    else:
        yield from torchtitan_dtensor.backward(run)
    yield from call(out_of, "all_reduce", again, "backward", "recompute")


def _norm_gradients(run: Run) -> Iterator[Collective]:
    """A norm that sees a part of its input has a part of its gradient, which is summed before FSDP takes it.

    With sequence parallelism every norm sees a part of the sequence; without, its output's gradient is a pending sum in
    DTensors. Norms of queries and keys always see their rank's heads (models/qwen3/sharding.py). In the type that it
    was computed in.
    """
    m = run.model
    pending = run.parallel.sequence_parallel or run.settings["spmd_backend"] != "spmd_types"
    widths = [(m.hidden_size, 2 * m.num_layers + 1)] if pending else []
    if m.qk_norm:
        widths.append((m.head_dim, 2 * m.num_layers))
    for width, norms in widths:
        yield _all_reduce(
            "tp",
            run.settings["mixed_precision_param"],
            width,
            norms * run.num_micro_batches,
            "norm gradient",
            "backward",
            "torch/distributed/fsdp/_fully_shard/_fsdp_param.py:FSDPParam._get_grad_inner_tensor",
        )


def _loss(run: Run, micro_batches: int) -> Iterator[Collective]:
    """Cross entropy over a split vocabulary: maximum, sum of exponentials, and the label's logit, each B·S/C fp32, C
    times.
    """
    chunks = run.settings["num_chunks"] if run.settings["chunked_loss"] else 1
    yield _all_reduce(
        "tp",
        "float32",
        local_tokens(run) // chunks,
        3 * chunks * micro_batches,
        "cross entropy",
        "step",
        "torchtitan/components/loss.py:_LossParallelCrossEntropy.forward",
    )


def _gradient_norm(run: Run, layout: Layout) -> Iterator[Collective]:
    """One norm a parameter, stacked, then summed over each mesh axis that shards gradients; of pipeline stages the
    sum of all. Clipping off changes nothing.
    """
    rule = "torchtitan/distributed/utils.py:clip_grad_norm_"
    if shards(run) > 1:
        yield _all_reduce(shard_axis(run), "float32", layout.num_parameters, 1, "gradient norm", "step", rule)
    if run.parallel.tensor_parallel > 1:
        yield _all_reduce("tp", "float32", layout.num_parameters, 1, "gradient norm", "step", rule)
    if run.parallel.pipeline_parallel > 1:
        yield _all_reduce("pp", "float32", 1, 1, "gradient norm", "step", rule)
