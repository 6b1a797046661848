"""torch's pipeline stages as torchtitan builds them: what they keep between steps, and neighbours that are not there.

A stage asks its neighbours for the shapes of what they will send before the first micro-batch
(torch/distributed/pipelining/stage.py:PipelineStage._recv_meta). In world `fake` nobody answers; `stand_in` gives the
answer that a neighbour would, through receives of the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode, _StageBackwardMeta, _StageForwardMeta, _TensorMeta

from train_ledger.launch.session import Owned
from train_ledger.spec.run import Run


def stages_of(trainer: Any) -> list[PipelineStage]:
    """The stages of this rank, none without pipeline parallelism."""
    if not trainer.parallel_dims.pp_enabled:
        return []
    schedule = trainer.pp_schedule
    return list(getattr(schedule, "_stages", None) or [schedule._stage])


def received(trainer: Any) -> Iterator[Owned]:
    """Buffers that activations and gradients are received into, one a micro-batch: stages make them in the first step
    and keep them (stage.py:_setup_forward_recv_info, _setup_backward_recv_info).
    """
    for stage in stages_of(trainer):
        for name, infos in (("received_activation", stage.args_recv_info), ("received_grad", stage.grad_recv_info)):
            for info in (info for chunk in infos.values() for info in chunk):
                if info.buffer is not None:
                    yield Owned(name, "framework", info.buffer)


def boundary(run: Run, alone: bool) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Shape and strides of what a stage passes on: sequences, tokens, channels.

    Args:
        run: resolved.
        alone: an activation that comes straight from the embedding. Sequence parallelism leaves it tokens first
            (spmd_types/_collectives.py:_ReduceScatterShard.forward); the sums of a layer undo that of one sequence.
    """
    p, d = run.parallel, run.model.hidden_size
    split = p.tensor_parallel > 1 and p.sequence_parallel
    batch, tokens = run.micro_batch, run.seq_length // p.context_parallel // (p.tensor_parallel if split else 1)
    return (batch, tokens, d), (d, batch * d, 1) if split and alone else (tokens * d, d, 1)


def _stages_with_layers(trainer: Any) -> list[bool]:
    """Of the whole pipeline, as torchtitan cuts it (pipeline_parallel.py:pipeline_llm)."""
    from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part, _get_pipeline_metadata

    parallelism = trainer.config.parallelism
    named = parallelism.module_fqns_per_model_part or _generate_llm_fqn_per_model_part(
        *_get_pipeline_metadata(trainer.parallel_dims, parallelism, trainer.model_config)
    )
    return [any(name.startswith("layers.") for name in names) for names in named]


def stand_in(trainer: Any, run: Run) -> None:
    """Makes the stages of this rank work without neighbours, in world `fake`.

    torch refuses a fake group, since it would ask for shapes and nobody would answer
    (schedules.py:_PipelineSchedule._warmup_p2p). The votes that it would exchange are exchanged here, and each stage is
    told what its neighbour would have said. Activations that are never received are zeros, not what memory held.
    """
    stages = stages_of(trainer)
    if not stages:
        return
    dtype = getattr(torch, run.settings["mixed_precision_param"])
    layers = _stages_with_layers(trainer)

    def meta(source: int, forward: bool) -> _TensorMeta:
        shape, strides = boundary(run, alone=forward and not layers[source])
        return _TensorMeta(torch.Size(shape), strides, dtype, requires_grad=forward)

    def vote(voters: list[PipelineStage], has_backward: bool, p2p_done: bool) -> None:
        total = None
        for stage in voters:
            total = stage._warmup_forward_vote(has_backward, received_acc=total)
        for stage in reversed(voters):
            total = stage._warmup_backward_result(received_result=total)
            stage._inference_mode = InferenceMode.DYNAMIC

    trainer.pp_schedule._warmup_p2p = vote
    for stage in stages:
        setattr(stage, "_recv_meta", _answer(stage, meta))  # noqa: B010 - a method
        for method in ("_setup_forward_recv_info", "_setup_backward_recv_info"):
            setattr(stage, method, _then_zero(stage, getattr(stage, method)))


def _answer(stage: PipelineStage, meta: Callable[[int, bool], _TensorMeta]) -> Callable[[int], Any]:
    def receive(source: int) -> _StageForwardMeta | _StageBackwardMeta:
        forward = source < stage.stage_index
        answer = (_StageForwardMeta if forward else _StageBackwardMeta)((meta(source, forward),))
        made, size = dist.distributed_c10d._object_to_tensor(answer, stage.device, stage.group)
        peer = stage.stage_index_to_group_rank[source]
        for tensor in (size, made):  # distributed_c10d.py:recv_object_list
            dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, group_peer=peer, group=stage.group)]).pop().wait()
        return answer

    return receive


def _then_zero(stage: PipelineStage, setup: Callable[..., None]) -> Callable[..., None]:
    def zeroed(*args: Any, **kwargs: Any) -> None:
        setup(*args, **kwargs)
        for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
            for info in infos:
                if info.buffer is not None:
                    info.buffer.detach().zero_()

    return zeroed
