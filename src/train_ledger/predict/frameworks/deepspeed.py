"""DeepSpeed 0.19.2: what a rank keeps and sends under ZeRO stages 0 to 3, in bf16 with fp32 master weights."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from train_ledger.spec.config import SCALING_NUMBERS
from train_ledger.spec.errors import ConfigError
from train_ledger.spec.groups import Group
from train_ledger.spec.ledger import Collective, Container, RankLedger
from train_ledger.spec.run import Run

from . import deepspeed_zero3 as zero3
from . import deepspeed_zero3_replay as zero3_replay
from . import deepspeed_zero12 as zero12
from .deepspeed_model import ModelTrace, trace

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def check(run: Run) -> None:
    """Refuses what DeepSpeed would refuse, in its words, and what is not modelled, by name.

    Raises:
        ConfigError: names the key.
    """

    def refuse(key: str, why: str) -> None:
        raise ConfigError(why, file=run.source or None, key=key)

    p, s = run.parallel, run.settings
    for key in ("tensor_parallel", "pipeline_parallel", "context_parallel", "virtual_pipeline_parallel"):
        if getattr(p, key) != 1:
            refuse(f"parallel.{key}", f"is {getattr(p, key)}; DeepSpeed is modelled with data parallelism alone")
    if p.sequence_parallel:
        refuse("parallel.sequence_parallel", "DeepSpeed is modelled with data parallelism alone")
    scaling = run.model.rope_scaling
    if scaling and run.model.position_embedding == "rope":
        # DeepSpeed brings no model; what it trains here is launch/llama.py.
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind not in ("linear", "llama3"):
            refuse("model.rope_scaling", f"{kind!r} is not modelled for DeepSpeed; known: llama3, linear")
        missing = [key for key in SCALING_NUMBERS if key not in scaling and kind == "llama3"]
        if missing:
            refuse("model.rope_scaling", f"llama3 scaling needs {missing[0]}, a number above 0")
    zero = s["zero_optimization"]
    stage, grads = zero["stage"], s["data_types"]["grad_accum_dtype"]
    for key, value in zero.items():
        if isinstance(value, float) and value != int(value):
            refuse(f"deepspeed.zero_optimization.{key}", f"{value} is not a whole number of elements")
    if stage == 0 and grads not in (None, "bf16"):
        refuse(
            "deepspeed.data_types.grad_accum_dtype",
            f"is {grads}: without ZeRO, DeepSpeed raises 'unsupported mix of model_dtype and grad_accum_dtype' "
            "(runtime/engine.py:_do_optimizer_sanity_check)",
        )
    if stage == 1 and grads == "fp16":
        refuse(
            "deepspeed.data_types.grad_accum_dtype",
            "is fp16: stage 1 then averages a copy of the gradients and steps on what was not averaged "
            "(runtime/zero/stage_1_and_2.py:get_gradient_for_reduction)",
        )
    if (stage == 2 or (stage == 1 and grads != "fp32")) and int(zero["allgather_bucket_size"]) % 2:
        refuse(
            "deepspeed.zero_optimization.allgather_bucket_size",
            "must be a multiple of nccl_start_alignment_factor, 2 (runtime/zero/stage_1_and_2.py:__init__)",
        )


def groups(run: Run) -> list[Group]:
    """The world's group, in which parameters are gathered, and its clone for everything else."""
    everyone = tuple(range(run.world_size))
    return [Group("world", everyone), Group("data_parallel", everyone)]


def coords(run: Run, rank: int) -> dict[str, int]:
    """DeepSpeed here has data parallelism alone."""
    return {"dp": rank}


def rank_class(run: Run, rank: int) -> Hashable:
    """Ranks differ in nothing but how much of their shards is padding."""
    plan = _plan(run)
    return zero3.own_numel(plan, rank) if isinstance(plan, zero3.Zero3) else zero12.own_numels(plan, rank)


def rank_ledger(run: Run, rank: int, step: str = "steady") -> RankLedger:
    """What `rank` keeps and sends. DeepSpeed has no step that logs by a collective: `log` is `steady`."""
    plan = _plan(run)
    kept: tuple[Container, ...]
    sent: tuple[Collective, ...]
    if isinstance(plan, zero3.Zero3):
        kept = zero3.containers(plan, zero3.own_numel(plan, rank))
        sent = zero3_replay.collectives(plan, "first" if step == "first" else "steady")
    else:
        kept = zero12.containers(plan, zero12.own_numels(plan, rank))
        sent = zero12.collectives(plan)
    return RankLedger(rank, coords(run, rank), kept, sent)


def master_shares(run: Run, name: str) -> tuple[tuple[int, int, int], ...]:
    """(rank, elements, first element) of the ranks that keep some of a weight's fp32 master.

    Stage 3 cuts each parameter in equal parts (runtime/zero/partition_parameters.py:_partition_param), the other stages
    what lies flat: `deepspeed_zero12.shares`.
    """
    plan = _plan(run)
    parameter = plan.trace.names.index(name)
    if isinstance(plan, zero12.Zero12):
        return zero12.shares(plan, parameter)
    numel = plan.trace.numels[parameter]
    part = -(-numel // run.world_size)
    firsts = range(0, numel, part)
    return tuple((rank, min(part, numel - first), first) for rank, first in enumerate(firsts))


Plan = zero3.Zero3 | zero12.Zero12
#: The last run and its plan. All ranks of a run are asked for one after the other, thousands of times.
_last: tuple[Run, Plan] | None = None


def _plan(run: Run) -> Plan:
    """The run in the terms that its stage depends on."""
    global _last
    if _last is None or _last[0] is not run:
        _last = run, _make_plan(run)
    return _last[1]


def _make_plan(run: Run) -> Plan:
    s = run.settings
    zero = s["zero_optimization"]
    stage = zero["stage"]
    # zero.Init puts DeepSpeed's own linear function in place of PyTorch's
    # (partition_parameters.py:patch_init_and_builtins).
    own_linear = stage == 3 and s["zero_init"]
    model = trace(run.model, s["activation_checkpointing"], fused_linear=not own_linear)
    common: dict[str, Any] = {
        "trace": model,
        "world_size": run.world_size,
        "micro_batches": run.num_micro_batches,
        "param_groups": param_groups(model, run.optimizer.decay_norms),
        "reduce_bucket_size": int(zero["reduce_bucket_size"]),
        "contiguous_gradients": zero["contiguous_gradients"],
        "reduce_scatter": zero["reduce_scatter"],
        "comm_dtype": DTYPES[s["communication_data_type"] or "bf16"],
        "grad_dtype": DTYPES[s["data_types"]["grad_accum_dtype"] or "bf16"],
    }
    if stage < 3:
        return zero12.Zero12(**common, stage=stage, overlap_comm=zero["overlap_comm"])
    return zero3.Zero3(
        **common,
        prefetch_bucket_size=int(zero["stage3_prefetch_bucket_size"]),
        param_persistence_threshold=int(zero["stage3_param_persistence_threshold"]),
        max_live_parameters=int(zero["stage3_max_live_parameters"]),
        max_reuse_distance=int(zero["stage3_max_reuse_distance"]),
        sub_group_size=int(zero["sub_group_size"]),
    )


def param_groups(model: ModelTrace, decay_norms: bool) -> tuple[tuple[int, ...], ...]:
    """Parameter groups of the optimizer: one, or matrices apart from norms and biases if those shall not decay."""
    every = range(len(model.numels))
    if decay_norms:
        return (tuple(every),)
    return tuple(p for p in every if model.dims[p] >= 2), tuple(p for p in every if model.dims[p] < 2)
