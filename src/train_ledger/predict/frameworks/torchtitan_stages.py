"""How torchtitan 0.3.0 cuts a Llama model into pipeline stages, and which of them a rank holds.

Sources: `torchtitan/distributed/pipeline_parallel.py` (stages), `torchtitan/trainer.py` (micro-batches).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from train_ledger.spec.errors import ConfigError
from train_ledger.spec.run import Run
from train_ledger.spec.torchtitan_fields import local_batch_size

#: Schedules that are modelled, and whether a rank holds several stages (torch/distributed/pipelining/schedules.py).
SCHEDULES = {"1F1B": False, "GPipe": False, "Interleaved1F1B": True, "LoopedBFS": True}


@dataclass(frozen=True)
class Stage:
    """Modules of one stage: consecutive layers, the embedding (`tok_embeddings`), the end (`norm` and `lm_head`)."""

    index: int
    layers: tuple[int, ...]
    embedding: bool
    end: bool


def layer_counts(num_stages: int, num_layers: int, first_less: int, last_less: int) -> tuple[int, ...]:
    """Layers of each stage (`_generate_llm_fqn_per_model_part`): the embedding counts as `first_less` layers, norm and
    head as `last_less`; stages get equal numbers, the first ones one more.

    Raises:
        ValueError: torchtitan's own reason.
    """
    if num_stages == 1:
        return (num_layers,)
    effective = num_layers + first_less + last_less
    if num_stages > effective:
        raise ValueError(f"Number of stages ({num_stages}) cannot be greater than effective layers ({effective})")
    each, more = divmod(effective, num_stages)
    for name, weight in (("input_weight", first_less), ("output_weight", last_less)):
        if weight > each:
            raise ValueError(f"{name} ({weight}) exceeds minimum layers per stage ({each}).")
    out, left = [], num_layers
    for stage in range(num_stages):
        wanted = each + (stage < more) - (first_less if stage == 0 else last_less if stage == num_stages - 1 else 0)
        out.append(min(wanted, left))
        left -= out[-1]
    return tuple(out)


def num_stages(run: Run) -> int:
    """Stages of the whole pipeline (`_get_pipeline_metadata`, or as many as `module_fqns_per_model_part` names)."""
    s, p = run.settings, run.parallel
    if p.pipeline_parallel == 1:
        return 1
    if s["module_fqns_per_model_part"] is not None:
        return len(s["module_fqns_per_model_part"])
    return _generated(run)


def _generated(run: Run) -> int:
    s = run.settings
    each = s["pipeline_parallel_layers_per_stage"]
    if each is None:
        return run.parallel.pipeline_parallel * (2 if SCHEDULES[s["pipeline_parallel_schedule"]] else 1)
    less = s["pipeline_parallel_first_stage_less_layers"] + s["pipeline_parallel_last_stage_less_layers"]
    return int(-(-(run.model.num_layers + less) // each))


def stages(run: Run) -> tuple[Stage, ...]:
    """Every stage of the pipeline, in order; one with everything without pipeline parallelism."""
    s, layers = run.settings, run.model.num_layers
    if run.parallel.pipeline_parallel == 1:
        return _even((layers,))
    named = s["module_fqns_per_model_part"]
    if named is not None:
        return tuple(
            Stage(
                i,
                tuple(int(name.removeprefix("layers.")) for name in part if name.startswith("layers.")),
                "tok_embeddings" in part,
                "lm_head" in part,
            )
            for i, part in enumerate(named)
        )
    less = (s["pipeline_parallel_first_stage_less_layers"], s["pipeline_parallel_last_stage_less_layers"])
    return _even(layer_counts(num_stages(run), layers, *less))


@functools.lru_cache(maxsize=256)
def _even(counts: tuple[int, ...]) -> tuple[Stage, ...]:
    out, at = [], 0
    for i, count in enumerate(counts):
        out.append(Stage(i, tuple(range(at, at + count)), i == 0, i == len(counts) - 1))
        at += count
    return tuple(out)


def held(run: Run, pp_rank: int) -> tuple[Stage, ...]:
    """The stages of one pipeline rank: every `pipeline_parallel`-th (`_get_pp_rank_to_stage_indices_mapping`)."""
    return stages(run)[pp_rank :: run.parallel.pipeline_parallel]


def stage_of(run: Run, weight: str) -> int:
    """Number of the stage that holds the weight of that Hugging Face Llama name."""
    found = re.match(r"model\.layers\.(\d+)\.", weight)
    for stage in stages(run):
        held_here = int(found[1]) in stage.layers if found else stage.end
        if held_here or (stage.embedding and weight == "model.embed_tokens.weight"):
            return stage.index
    raise ValueError(f"{weight} is on no stage")


def passes(run: Run) -> tuple[int, int]:
    """Passes of the schedule in a step, and micro-batches of one pass (`trainer.py:Trainer.__init__`)."""
    each = local_batch_size(run) // run.micro_batch
    return run.num_micro_batches // each, each


def check(run: Run) -> None:
    """Refuse a pipeline that torchtitan could not build or that is not modelled.

    Raises:
        ConfigError: names the key and says why.
    """
    s, p = run.settings, run.parallel
    if p.pipeline_parallel == 1:
        if s.get("local_batch_size") is not None:
            _refuse(run, "torchtitan.local_batch_size", "is for pipelines; without, a rank takes micro_batch at once")
        return
    if run.model.tie_embeddings:
        # models/common/decoder.py:Decoder.Config.update_from_config
        _refuse(run, "model.tie_embeddings", "Weight tying is not supported with Pipeline Parallel.")
    if s["spmd_backend"] == "full_dtensor" or (s["spmd_backend"] == "partial_dtensor" and p.tensor_parallel > 1):
        _refuse(
            run,
            "torchtitan.spmd_backend",
            f"{s['spmd_backend']} sends DTensors between pipeline stages, which is not modelled; spmd_types is",
        )
    schedule = s["pipeline_parallel_schedule"]
    if schedule not in SCHEDULES:
        _refuse(
            run,
            "torchtitan.pipeline_parallel_schedule",
            f"{schedule} is not modelled for torchtitan, only {', '.join(SCHEDULES)}",
        )
    _check_split(run)
    _check_micro_batches(run)
    if p.tensor_parallel > 1 and p.sequence_parallel and run.micro_batch > 1:
        # Sequence parallelism leaves its results tokens first (spmd_types/_collectives.py:_ReduceScatterShard.forward).
        # Stages tell each other strides, of gradients those of a backward of ones (stage.py:_ones_from_metadata), which
        # need not be those of the real ones; then gloo refuses to send, and NCCL moves memory as it lies.
        _refuse(
            run,
            "micro_batch",
            f"{run.micro_batch} sequences do not lie one after the other under sequence parallelism, which is not "
            "modelled between pipeline stages; 1 is",
        )


def _refuse(run: Run, key: str, why: str) -> None:
    raise ConfigError(why, file=run.source or None, key=key)


def _check_split(run: Run) -> None:
    s, p = run.settings, run.parallel
    schedule, key = s["pipeline_parallel_schedule"], "torchtitan.pipeline_parallel_layers_per_stage"
    if s["pipeline_parallel_layers_per_stage"] is not None:
        # _get_pipeline_metadata, which named parts do not switch off
        count = _generated(run)
        if count % p.pipeline_parallel:
            _refuse(
                run,
                key,
                f"Number of virtual stages ({count}) must be divisible by pipeline parallel size "
                f"({p.pipeline_parallel}).",
            )
        _check_per_rank(run, count, key)
    named = s["module_fqns_per_model_part"]
    if named is not None:
        key = "torchtitan.module_fqns_per_model_part"
        _check_names(run, named)
        if len(named) % p.pipeline_parallel:
            _refuse(run, key, f"num_stages {len(named)} must be evenly divisible by pp_degree {p.pipeline_parallel}")
        _check_per_rank(run, len(named), key)
    else:
        try:
            layer_counts(
                num_stages(run),
                run.model.num_layers,
                s["pipeline_parallel_first_stage_less_layers"],
                s["pipeline_parallel_last_stage_less_layers"],
            )
        except ValueError as e:
            end = "first" if "input_weight" in str(e) else "last" if "output_weight" in str(e) else ""
            key = f"torchtitan.pipeline_parallel_{end}_stage_less_layers" if end else "parallel.pipeline_parallel"
            _refuse(run, key, str(e))
    bare = [stage.index for stage in stages(run) if not stage.layers and not stage.end]
    if bare and not run.optimizer.decay_norms:
        # components/optimizer/optimizer.py:OptimizersContainer._build_param_groups looks in each model part
        _refuse(
            run,
            "optimizer.decay_norms",
            f"Optimizer param_groups pattern of norms matched no parameters on stage {bare[0]}, which holds none",
        )
    each = num_stages(run) // p.pipeline_parallel
    if each != p.virtual_pipeline_parallel:
        _refuse(
            run,
            "parallel.virtual_pipeline_parallel",
            f"is {p.virtual_pipeline_parallel}, but torchtitan makes {each} stages a rank with {schedule} of "
            f"{num_stages(run)} stages on {p.pipeline_parallel} ranks",
        )


def _check_per_rank(run: Run, count: int, key: str) -> None:
    each, several = count // run.parallel.pipeline_parallel, SCHEDULES[run.settings["pipeline_parallel_schedule"]]
    if not several and each != 1:
        _refuse(run, key, f"Single stage schedule requires exactly 1 stage per rank, but got {each} stages per rank.")
    if several and each < 2:
        _refuse(run, key, f"Multi-stage schedule requires at least 2 stages per rank, but got {each} stages per rank.")


def _check_names(run: Run, named: list[list[str]]) -> None:
    """Every module once, in order; norm and head together, since FSDP gathers them as one only there."""
    layers = [f"layers.{i}" for i in range(run.model.num_layers)]
    wanted, given = ["tok_embeddings", *layers, "norm", "lm_head"], [name for part in named for name in part]
    key = "torchtitan.module_fqns_per_model_part"
    if given != wanted:
        odd = [n for n in given if n not in wanted] or [n for n in wanted if n not in given]
        what = f"{odd[0][:60]!r} is " + ("no module" if odd[0] in given else "missing") if odd else "they are not"
        _refuse(run, key, f"parts must name tok_embeddings, layers.0 to layers.{run.model.num_layers - 1}, norm and "
                f"lm_head once and in this order: {what}")  # fmt: skip
    if named[-1][-2:] != ["norm", "lm_head"]:
        _refuse(run, key, "norm and lm_head on different stages are not modelled")


def _check_micro_batches(run: Run) -> None:
    p, local = run.parallel, local_batch_size(run)
    key = "torchtitan.local_batch_size"
    if local % run.micro_batch:
        _refuse(
            run,
            key,
            f"training.local_batch_size ({local}) must be evenly divisible by "
            f"parallelism.pipeline_parallel_microbatch_size ({run.micro_batch}) when pipeline parallelism is enabled.",
        )
    if run.global_batch % (local * p.data_parallel):
        _refuse(
            run,
            key,
            "global batch size must be multiple of local batch size times data-parallel degree "
            f"({run.global_batch} % ({local} * {p.data_parallel}) != 0)",
        )
    _, each = passes(run)
    schedule, count = run.settings["pipeline_parallel_schedule"], num_stages(run)
    if schedule == "1F1B" and each < count:
        _refuse(
            run,
            "global_batch" if run.settings["local_batch_size"] is None else key,
            f"Number of microbatches ({each}) must be greater than or equal to the number of stages ({count}).",
        )
    rounds = max(1, each // p.pipeline_parallel)
    if schedule == "Interleaved1F1B" and each % rounds:
        _refuse(
            run,
            "global_batch" if run.settings["local_batch_size"] is None else key,
            "Interleaved 1F1B requires the number of microbatches to be a multiple of the number of rounds "
            f"({rounds}), but got {each}.",
        )
