"""What pipeline stages keep and send on one rank of torchtitan: FSDP's calls under torch's schedules, transfers between
stages, buffers for what is received.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from train_ledger.spec.dtypes import element_bytes
from train_ledger.spec.ledger import Collective, Container
from train_ledger.spec.run import Run

from .torchtitan_layout import Layout, Unit, layout, pp_rank, shard_axis, shards
from .torchtitan_replay import END, HEAD, NORM, Replay, replay
from .torchtitan_schedule import order
from .torchtitan_stages import Stage, held, num_stages, passes, stages

_GROUP = "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py"
_REDUCE = "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:foreach_reduce"
_STAGE = "torch/distributed/pipelining/stage.py"
_INNER = "torch/distributed/fsdp/_fully_shard/_fsdp_param.py:FSDPParam._get_grad_inner_tensor"

#: Lengths of pickled shapes (`_metadata_bytes`) but for the sizes and the name of the type in them.
_FORWARD_METADATA_BYTES, _BACKWARD_METADATA_BYTES = 146, 147


class Work(NamedTuple):
    """Modules of one stage, and how many micro-batches go through them forward and backward in a step."""

    layers: int
    embedding: bool
    end: bool
    forwards: int
    backwards: int


def work(run: Run, rank: int, first: bool) -> list[Work]:
    """Of every stage of a rank. In step 1 a stage runs one micro-batch more to learn the shapes of what it passes on,
    the first stage only forward (stage.py:_forward_metadata_inference, _backward_metadata_inference).
    """
    m = run.num_micro_batches
    if run.parallel.pipeline_parallel == 1:
        return [Work(run.model.num_layers, True, True, m, m)]
    return [
        Work(len(stage.layers), stage.embedding, stage.end, m + first, m + (first and stage.index > 0))
        for stage in held(run, pp_rank(run, rank))
    ]


def _replays(run: Run, at: Layout, rank: int, first: bool) -> Iterator[tuple[tuple[Unit, ...], Replay]]:
    """Units of every stage of a rank, and what FSDP does with them in a step."""
    p, s = run.parallel, run.settings
    times, each = passes(run)
    place = pp_rank(run, rank)
    actions = order(s["pipeline_parallel_schedule"], p.pipeline_parallel, place, p.virtual_pipeline_parallel, each)
    for stage, units in zip(held(run, place), at.stages, strict=True):
        own = tuple(action for action in actions if action.stage == stage.index)
        names = tuple(unit.name for unit in units)
        policy, chunked = s["fsdp_reshard_after_forward"], s["chunked_loss"]
        yield units, replay(names, own, times, policy, chunked, first, stage.index > 0)


def _part_numel(unit: Unit, parts: tuple[str, ...]) -> int:
    """Elements of this rank's part of what one call reduces, padding included."""
    if unit.name != END:
        return unit.gathered_numel
    return sum(s.padded_numel for s in unit.shards if s.parameter.name.removesuffix(".weight") in parts)


def grad_buffers(run: Run, at: Layout, rank: int) -> Counter[int]:
    """How many buffers of how many elements the gradients of a step lie in at its end."""
    out: Counter[int] = Counter()
    for units, result in _replays(run, at, rank, first=False):
        by_name = {unit.name: unit for unit in units}
        for name, parts in result.kept:
            out[_part_numel(by_name[name], parts)] += by_name[name].count
    return out


def sharded(run: Run, at: Layout, rank: int, first: bool) -> Iterator[Collective]:
    """All-gathers, reduce-scatters, HSDP's all-reduces, and sums of norms' gradients over tensor-parallel ranks."""
    p, s = run.parallel, run.settings
    fsdp, param, reduce = shards(run), s["mixed_precision_param"], s["mixed_precision_reduce"]
    norms: Counter[tuple[int, str]] = Counter()
    for units, result in _replays(run, at, rank, first):
        by_name = {unit.name: unit for unit in units}
        for (name, phase), count in result.gathers.items():
            unit, numel = by_name[name], by_name[name].gathered_numel
            rule = f"{_GROUP}:FSDPParamGroup.unshard"
            sizes = (numel, numel * fsdp, count * unit.count, f"FSDP {name}", phase, rule)
            if fsdp > 1:
                yield Collective("all_gather", shard_axis(run), param, *sizes)
        for (name, parts), count in result.reductions.items():
            unit, numel = by_name[name], _part_numel(by_name[name], parts)
            phase = "backward" if HEAD in parts and s["chunked_loss"] else "step"
            common = (count * unit.count, f"FSDP {name}", phase, _REDUCE)
            if fsdp > 1:
                yield Collective("reduce_scatter", shard_axis(run), reduce, numel * fsdp, numel, *common)
            if p.data_parallel_replicate > 1:
                yield Collective("all_reduce", "dp_replicate", reduce, numel, numel, *common)
            for width in _summed(run, unit, parts):
                norms[width, phase] += count * unit.count
    # Gradients wait in the type that they are reduced in (_fsdp_param.py:to_accumulated_grad_if_needed).
    for (width, phase), count in norms.items():
        yield Collective("all_reduce", "tp", reduce, width, width, count, "norm gradient", phase, _INNER)


def _summed(run: Run, unit: Unit, parts: tuple[str, ...]) -> list[int]:
    """Widths of the norms in one reduction whose gradient is a pending sum over tensor-parallel ranks
    (`torchtitan_calls.py:_norm_gradients`).
    """
    p = run.parallel
    if p.tensor_parallel == 1:
        return []
    pending = p.sequence_parallel or run.settings["spmd_backend"] != "spmd_types"
    if unit.name == END:
        return [run.model.hidden_size] if pending and NORM in parts else []
    if unit.name != "layers":
        return []
    own = [run.model.head_dim] * 2 if run.model.qk_norm else []
    return own + ([run.model.hidden_size] * 2 if pending else [])


def reduces_norm_with_head(run: Run) -> bool:
    """Whether gradients of the final norm wait for a reduction of the head's, on the last stage of a pipeline."""
    if run.parallel.pipeline_parallel == 1:
        return False
    last = run.world_size - 1
    results = _replays(run, layout(run, last), last, first=False)
    return any({NORM, HEAD} <= set(parts) for _, result in results for _, parts in result.reductions)


# --- between stages --------------------------------------------------------------------------------------------------


def boundary(run: Run) -> tuple[int, int, int]:
    """Sequences, tokens and channels of what one stage passes to the next on one rank."""
    p = run.parallel
    tokens = run.seq_length // p.context_parallel // (p.tensor_parallel if p.sequence_parallel else 1)
    return run.micro_batch, tokens, run.model.hidden_size


def transfers(run: Run, rank: int, first: bool) -> Iterator[Collective]:
    """Activations to the next stage and gradients to the previous one, each micro-batch. In step 1 also a vote on
    whether shapes are known, there and back, and the shapes, pickled, with their length.
    """
    dtype, m = run.settings["mixed_precision_param"], run.num_micro_batches
    numel = math.prod(boundary(run))
    rule = "torch/distributed/pipelining/schedules.py:_batch_p2p"
    vote, shapes = f"{_STAGE}:PipelineStage._warmup_forward_vote", f"{_STAGE}:PipelineStage._send_meta"
    for stage in held(run, pp_rank(run, rank)):
        for there, way in _neighbours(run, stage):
            back = {"send": "recv", "recv": "send"}[way]
            earlier = stage if way == "send" else there
            ways = (
                (way, "activation", _FORWARD_METADATA_BYTES + _metadata_bytes(run, alone=not earlier.layers)),
                (back, "gradient", _BACKWARD_METADATA_BYTES + _metadata_bytes(run)),
            )
            for op, what, length in ways:
                yield _transfer(op, dtype, numel, m, f"pipeline {what}", rule)
                if first:
                    yield _transfer(op, "int32", 1, 1, f"vote with stage {there.index}", vote)
                    yield _transfer(op, "int64", 1, 1, f"shapes with stage {there.index}", shapes)
                    yield _transfer(op, "uint8", length, 1, f"shapes with stage {there.index}", shapes)


def _neighbours(run: Run, stage: Stage) -> Iterator[tuple[Stage, str]]:
    """Neighbouring stages, and what happens to activations between it and `stage`."""
    every = stages(run)
    if stage.index > 0:
        yield every[stage.index - 1], "recv"
    if stage.index < len(every) - 1:
        yield every[stage.index + 1], "send"


def _transfer(op: str, dtype: str, numel: int, count: int, component: str, rule: str) -> Collective:
    """One kind of call of the schedule, which stands outside of both passes."""
    sizes = (numel, 0) if op == "send" else (0, numel)
    return Collective(op, "pp", dtype, *sizes, count, component, "step", rule)


def _metadata_bytes(run: Run, alone: bool = False) -> int:
    """Length of the pickled shapes that a stage tells another (`distributed_c10d.py:_object_to_tensor`), as far as it
    depends on them: the name of the type, and three sizes and three strides, each in as few bytes as pickle has for it.

    Args:
        run: resolved and checked.
        alone: of an activation that comes straight from the embedding. Sequence parallelism leaves it tokens first
            (spmd_types/_collectives.py:_ReduceScatterShard.forward); the sums of a layer undo that.
    """
    batch, tokens, hidden = boundary(run)
    tokens_first = alone and run.parallel.tensor_parallel > 1 and run.parallel.sequence_parallel
    strides = (hidden, batch * hidden) if tokens_first else (tokens * hidden, hidden)
    numbers = (batch, tokens, hidden, *strides, 1)
    return len(run.settings["mixed_precision_param"]) + sum(map(_pickled_bytes, numbers))


def _pickled_bytes(number: int) -> int:
    """Opcode and value: BININT1, BININT2, BININT or LONG1 (`pickle.py:_Pickler.save_long`)."""
    for limit, length in ((2**8, 2), (2**16, 3), (2**31, 5)):
        if number < limit:
            return length
    return 3 + number.bit_length() // 8


def received(run: Run, rank: int) -> Iterator[Container]:
    """A buffer a micro-batch of a pass for each stage's activations, and one for its gradients; kept for good."""
    dtype, (_, each) = run.settings["mixed_precision_param"], passes(run)
    numel = math.prod(boundary(run))
    mine = held(run, pp_rank(run, rank))
    for name, count, method in (
        ("received_activation", sum(stage.index > 0 for stage in mine), "_setup_forward_recv_info"),
        ("received_grad", sum(stage.index < num_stages(run) - 1 for stage in mine), "_create_grad_recv_info"),
    ):
        if count:
            blocks = ((numel * element_bytes(dtype), count * each),)
            rule = f"{_STAGE}:PipelineStage.{method}"
            yield Container(name, "framework", dtype, numel * count * each, 0, "cuda", rule, blocks)
