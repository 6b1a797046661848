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


def boundary_shape(run: Run) -> tuple[int, int, int]:
    """Shape of what one stage sends to the next on one rank: sequences, tokens, channels."""
    p = run.parallel
    tokens = run.seq_length // (p.tensor_parallel if p.sequence_parallel else 1)
    return run.micro_batch, tokens, run.model.hidden_size


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

    def vote(voters: list[PipelineStage], has_backward: bool, p2p_done: bool) -> None:
        total = None
        for stage in voters:
            total = stage._warmup_forward_vote(has_backward, received_acc=total)
        for stage in reversed(voters):
            total = stage._warmup_backward_result(received_result=total)
            stage._inference_mode = InferenceMode.DYNAMIC

    trainer.pp_schedule._warmup_p2p = vote
    for stage in stages:
        setattr(stage, "_recv_meta", _answer(stage, boundary_shape(run), dtype))  # noqa: B010 - a method
        for method in ("_setup_forward_recv_info", "_setup_backward_recv_info"):
            setattr(stage, method, _then_zero(stage, getattr(stage, method)))


def _answer(stage: PipelineStage, shape: tuple[int, int, int], dtype: torch.dtype) -> Callable[[int], Any]:
    def receive(source: int) -> _StageForwardMeta | _StageBackwardMeta:
        forward = source < stage.stage_index
        meta = _TensorMeta(torch.Size(shape), (shape[1] * shape[2], shape[2], 1), dtype, requires_grad=forward)
        answer = _StageForwardMeta((meta,)) if forward else _StageBackwardMeta((meta,))
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
