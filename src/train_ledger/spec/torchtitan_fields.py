"""Fields of torchtitan's `Trainer.Config` that follow from a run: what is launched is what is exported."""

from __future__ import annotations

from typing import Any

from .run import Run

#: Settings that are fields of `ParallelismConfig` by the same name.
PIPELINE_KEYS = (
    "pipeline_parallel_schedule",
    "pipeline_parallel_layers_per_stage",
    "pipeline_parallel_first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers",
    "module_fqns_per_model_part",
)


def local_batch_size(run: Run) -> int:
    """Sequences that a rank takes at once: one micro-batch, or all of those of one pass of a pipeline schedule."""
    if run.parallel.pipeline_parallel == 1:
        return run.micro_batch
    return int(run.settings["local_batch_size"] or run.global_batch // run.parallel.data_parallel)


def pipeline_fields(run: Run) -> dict[str, Any]:
    """Fields of `ParallelismConfig` that cut the model into stages; none without pipeline parallelism."""
    if run.parallel.pipeline_parallel == 1:
        return {}
    return {
        "pipeline_parallel_degree": run.parallel.pipeline_parallel,
        "pipeline_parallel_microbatch_size": run.micro_batch,
        **{key: run.settings[key] for key in PIPELINE_KEYS},
    }
