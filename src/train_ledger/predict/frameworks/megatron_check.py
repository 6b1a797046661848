"""Refusals: what Megatron Core 0.18.0 itself would not run, with its own reason, and by name what is not modelled."""

from __future__ import annotations

from typing import NoReturn

from train_ledger.spec.errors import ConfigError
from train_ledger.spec.run import Run

#: Hugging Face's rope_scaling kinds that Megatron can express, and the constants that it has fixed for `llama3`
#: (models/common/embeddings/rotary_pos_embedding.py:_apply_scaling).
LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


def check(run: Run) -> None:
    """Refuse a run that Megatron Core would refuse, or that the ledger does not model.

    Raises:
        ConfigError: names the key and the reason, with the place in Megatron Core that says so.
    """
    _model(run)
    _tensor_parallel(run)
    _pipeline(run)
    _data_parallel(run)
    _recompute(run)


def _refuse(run: Run, key: str, why: str) -> NoReturn:
    raise ConfigError(why, file=run.source or None, key=key)


def _model(run: Run) -> None:
    m = run.model
    biases = (m.qkv_bias, m.attention_output_bias, m.mlp_bias)
    if biases not in {(False, False, False), (True, False, False), (True, True, True)}:
        _refuse(
            run,
            "model",
            "Megatron Core has one switch for all biases and one for QKV alone (add_bias_linear, add_qkv_bias), so "
            f"qkv_bias {biases[0]}, attention_output_bias {biases[1]}, mlp_bias {biases[2]} cannot be built",
        )
    scaling = m.rope_scaling
    if not scaling or m.position_embedding != "rope":
        return
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in {"llama3", "linear", "default"}:
        _refuse(
            run, "model.rope_scaling", f"{kind!r} is not modelled for Megatron Core; known: llama3, linear, default"
        )
    if kind == "llama3":
        for key, fixed in LLAMA3.items():
            if scaling.get(key, fixed) != fixed:
                _refuse(
                    run,
                    "model.rope_scaling",
                    f"Megatron Core has {key} fixed at {fixed}, not {scaling[key]} "
                    "(rotary_pos_embedding.py:_apply_scaling)",
                )


def _tensor_parallel(run: Run) -> None:
    m, p = run.model, run.parallel
    tp = p.tensor_parallel
    if p.sequence_parallel and tp == 1:
        _refuse(
            run,
            "parallel.sequence_parallel",
            "Cannot use sequence parallelism without tensor parallelism (model_parallel_config.py:__post_init__)",
        )
    if m.num_query_groups % tp and tp % m.num_query_groups:
        _refuse(
            run,
            "parallel.tensor_parallel",
            f"num_query_groups ({m.num_query_groups}) must be a multiple or divisor of tensor_model_parallel_size "
            f"({tp}) (transformer_config.py:__post_init__)",
        )
    rows = m.query_size + 2 * m.kv_size
    if rows % tp:
        _refuse(
            run,
            "parallel.tensor_parallel",
            f"{rows} rows of QKV are not divisible by {tp} (core/utils.py:divide in ColumnParallelLinear)",
        )
    cp = p.context_parallel
    if cp > 1 and run.settings["core_attention"] == "local":
        _refuse(
            run,
            "megatron.core_attention",
            "Context parallelism is only supported by TEDotProductAttention "
            "(transformer/dot_product_attention.py), and by the sdpa core of this program",
        )
    if cp > 1 and run.seq_length % (2 * cp):
        _refuse(
            run,
            "parallel.context_parallel",
            f"seq_length {run.seq_length} is not divisible by 2 x context parallel {cp} "
            "(megatron/training/arguments.py:validate_args)",
        )
    if p.sequence_parallel and run.seq_length // cp % tp:
        _refuse(
            run,
            "parallel.sequence_parallel",
            f"{run.seq_length // cp} tokens of a context-parallel rank are not divisible by tensor_parallel {tp} "
            "(tensor_parallel/mappings.py:_split_along_first_dim)",
        )


def _pipeline(run: Run) -> None:
    p, s, layers = run.parallel, run.settings, run.model.num_layers
    pp, vp, m = p.pipeline_parallel, p.virtual_pipeline_parallel, run.num_micro_batches
    ends = {
        f"megatron.num_layers_in_{end}_pipeline_stage": s[f"num_layers_in_{end}_pipeline_stage"]
        for end in ("first", "last")
    }
    given = {key: n for key, n in ends.items() if n is not None}
    if given and pp == 1:
        _refuse(
            run,
            next(iter(given)),
            "a first or last stage of its own size needs pipeline_parallel of 2 or more; on one stage Megatron Core "
            "ignores it, or finds a mismatch (transformer_config.py:__post_init__)",
        )
    rest, stages = layers - sum(given.values()), pp - len(given)
    if bool(rest) != bool(stages) or rest < 0:
        key = next(iter(given), "parallel.pipeline_parallel")
        _refuse(
            run,
            key,
            f"Mismatch: {rest} middle layers remaining but {stages} middle PP stages available "
            "(transformer_config.py:__post_init__)",
        )
    if stages and rest % stages:
        _refuse(
            run,
            "parallel.pipeline_parallel",
            f"{rest} layers are not divisible by {stages} pipeline stages "
            "(transformer_block.py:get_num_layers_to_build)",
        )
    if vp == 1:
        return
    for key, n in {**given, "parallel.virtual_pipeline_parallel": rest // stages if stages else vp}.items():
        if n % vp:
            _refuse(
                run,
                key,
                f"{n} layers of a stage are not divisible by {vp} virtual stages "
                "(transformer_block.py:get_num_layers_to_build)",
            )
    if given and not stages:
        _refuse(
            run,
            next(iter(given)),
            "Megatron Core cannot number the layers of virtual stages without a middle stage: it divides by the number "
            "of middle stages, which is 0 (transformer_layer.py:get_transformer_layer_offset)",
        )
    if m % pp:
        _refuse(
            run,
            "global_batch",
            f"{m} micro-batches are not a multiple of pipeline_parallel {pp}; the interleaved schedule asks for that "
            "(pipeline_parallel/schedules.py:forward_backward_pipelining_with_interleaving)",
        )


def _data_parallel(run: Run) -> None:
    s = run.settings
    if s["overlap_param_gather"] and not s["use_distributed_optimizer"]:
        _refuse(
            run,
            "megatron.overlap_param_gather",
            "--overlap-param-gather only supported with distributed optimizer "
            "(megatron/training/arguments.py:validate_args); it is on unless it is set to false",
        )
    if s["overlap_param_gather"] and not s["overlap_grad_reduce"]:
        _refuse(
            run,
            "megatron.overlap_param_gather",
            "Must use --overlap-param-gather with --overlap-grad-reduce "
            "(megatron/training/arguments.py:validate_args); it is on unless it is set to false",
        )


def _recompute(run: Run) -> None:
    s = run.settings
    granularity, method, layers = (s[f"recompute_{k}"] for k in ("granularity", "method", "num_layers"))
    where = "(transformer_config.py:__post_init__)"
    if granularity is None:
        for key, value in (("method", method), ("num_layers", layers)):
            if value is not None:
                _refuse(run, f"megatron.recompute_{key}", "does nothing without recompute_granularity")
    elif granularity == "full":
        if method is None:
            _refuse(
                run,
                "megatron.recompute_method",
                f'must be "block" or "uniform" with recompute_granularity full {where}',
            )
        if layers is None:
            _refuse(run, "megatron.recompute_num_layers", f"must be given with recompute_granularity full {where}")
    else:
        if "layernorm" in s["recompute_modules"]:
            _refuse(
                run,
                "megatron.recompute_modules",
                "recomputing layernorm needs Transformer Engine, which this environment has not "
                "(tensor_parallel/random.py:CheckpointWithoutOutputFunction)",
            )
        if "mlp" in s["recompute_modules"] and run.model.mlp_bias:
            _refuse(
                run,
                "megatron.recompute_modules",
                "recomputing mlp does not work with biases: the bias of the second layer comes out of the checkpointed "
                "function as it went in, so its backward calls itself without end "
                "(tensor_parallel/random.py:CheckpointFunction)",
            )
        if method is not None:
            _refuse(
                run,
                "megatron.recompute_method",
                "recompute method is not yet supported for selective recomputing granularity "
                "(megatron/training/arguments.py:validate_args)",
            )
        if layers is not None:
            _refuse(run, "megatron.recompute_num_layers", f"must be None with recompute_granularity selective {where}")
