"""What torchtitan 0.3.0 refuses, with its own reason, and what the ledger does not model, by name."""

from __future__ import annotations

from train_ledger.spec.errors import ConfigError
from train_ledger.spec.run import Run

from . import torchtitan_dtensor, torchtitan_pipeline, torchtitan_stages
from .torchtitan_layout import shards

#: torch/nn/attention/flex_attention.py:_DEFAULT_SPARSE_BLOCK_SIZE
_MASK_BLOCK = 128
_SCALING_KEYS = ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings")


def check(run: Run) -> None:
    """Refuse a run that torchtitan could not train or that is not modelled.

    Raises:
        ConfigError: names the key and says why.
    """
    _check_model(run)
    _check_parallel(run)
    _check_tensor_parallel(run)
    _check_loss(run)


def _refuse(run: Run, key: str, why: str) -> None:
    raise ConfigError(why, file=run.source or None, key=key)


def _check_model(run: Run) -> None:
    """`models/llama3` and `models/qwen3` express one family: RMSNorm, RoPE, SwiGLU, no biases."""
    m = run.model
    lacking = (
        ("position_embedding", m.position_embedding != "rope", f"positions of kind {m.position_embedding!r}"),
        ("normalization", m.normalization != "rmsnorm", f"normalization of kind {m.normalization!r}"),
        ("gated_mlp", not m.gated_mlp, "an MLP without a gate"),
        ("activation", m.activation != "silu", f"activation {m.activation!r}"),
        ("qkv_bias", m.qkv_bias, "biases of query, key and value"),
        ("attention_output_bias", m.attention_output_bias, "a bias of the attention's output"),
        ("mlp_bias", m.mlp_bias, "biases of the MLP"),
    )
    for key, lacks, what in lacking:
        if lacks:
            _refuse(run, f"model.{key}", f"torchtitan's Llama 3 and Qwen 3 do not have {what}")
    scaling = m.rope_scaling
    if scaling and m.qk_norm:
        # models/common/rope.py:CosSinRoPE
        _refuse(
            run, "model.rope_scaling", "Cos/sin RoPE does not support Llama scaling (norms of query and key: Qwen 3)"
        )
    if scaling:
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind != "llama3":
            _refuse(run, "model.rope_scaling", f"{kind!r} is not modelled for torchtitan, only 'llama3'")
        for key in _SCALING_KEYS:
            value = scaling.get(key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                _refuse(run, "model.rope_scaling", f"llama3 scaling needs {key}, a number above 0")


def _check_parallel(run: Run) -> None:
    torchtitan_stages.check(run)
    p = run.parallel
    # trainer.py:Trainer.__init__; half the head and half the tail of a sequence go to a rank together.
    divisor = (p.tensor_parallel if p.sequence_parallel else 1) * (2 * p.context_parallel if _splits(run) else 1)
    if run.seq_length % divisor:
        _refuse(
            run,
            "seq_length",
            f"Training sequence length ({run.seq_length}) must be divisible by {divisor} for the configured "
            "sequence/context parallelism.",
        )
    if _splits(run):
        _check_context_parallel(run)


def _splits(run: Run) -> bool:
    return run.parallel.context_parallel > 1


def _check_context_parallel(run: Run) -> None:
    """FlexAttention is what there is: `distributed/full_dtensor.py:validate_config` refuses PyTorch's attention under
    spmd_types and full_dtensor.
    """
    degree = run.parallel.context_parallel
    if run.settings["spmd_backend"] == "full_dtensor":
        # torch/distributed/tensor/experimental/_func_map.py:_local_map_wrapped waits for keys and values, which
        # protocols/module.py:Module._redistribute_inputs gathers asynchronously, in AsyncCollectiveTensor.wait, outside
        # of autograd.
        _refuse(
            run,
            "torchtitan.spmd_backend",
            "full_dtensor with context parallelism trains without the gradients of keys and values (the gathered "
            "tensors leave autograd), which is not modelled; spmd_types and partial_dtensor are",
        )
    bare = [stage.index for stage in torchtitan_stages.stages(run) if not stage.layers]
    if bare and run.settings["spmd_backend"] == "partial_dtensor":
        # context_parallel/api.py:apply_cp_to_forward looks at the first attention of a stage.
        _refuse(
            run,
            "torchtitan.spmd_backend",
            f"partial_dtensor splits no sequence on a stage without layers, here {bare[0]} (list index out of range); "
            "spmd_types does",
        )
    if run.seq_length % (degree * _MASK_BLOCK):
        # _context_parallel/_attention.py:_create_cp_block_mask
        _refuse(
            run,
            "seq_length",
            f"Q_LEN {run.seq_length} is not divisible by CP mesh world size {degree} * BLOCK_SIZE {_MASK_BLOCK}. "
            "This is not supported yet.",
        )


def _check_tensor_parallel(run: Run) -> None:
    p, m = run.parallel, run.model
    tp = p.tensor_parallel
    rows = m.query_size + 2 * m.kv_size
    degrees = f"{p.data_parallel_shard}" + (f" x context_parallel {p.context_parallel}" if _splits(run) else "")
    if rows < shards(run) * tp:
        # models/common/config_utils.py:_fused_qkv_param_init copies into the shards; DTensor's copy_ wants none empty.
        _refuse(
            run,
            "parallel.data_parallel_shard",
            f"{degrees} x tensor_parallel {tp} is more than the {rows} rows of wqkv: torchtitan cannot initialise it "
            "(aten.copy_.default: no valid strategy preserves this placement)",
        )
    if tp == 1:
        return
    # models/common/decoder.py:Decoder.Config.update_from_config
    for name, heads in (("n_heads", m.num_attention_heads), ("n_kv_heads", m.num_query_groups)):
        if heads % tp:
            _refuse(run, "parallel.tensor_parallel", f"tensor_parallel_degree ({tp}) must divide {name} ({heads}).")
    if m.ffn_hidden_size % tp:
        # DTensors are split as torch.chunk does, spmd_types as tensor_split; torchtitan trains both.
        _refuse(
            run,
            "parallel.tensor_parallel",
            f"{tp} does not divide ffn_hidden_size {m.ffn_hidden_size}; unequal shards of the MLP are not modelled for "
            "torchtitan",
        )
    if run.settings["spmd_backend"] == "spmd_types" and m.vocab_size % tp:
        # components/loss.py:_LossParallelCrossEntropy.forward splits as torch.chunk does, spmd_types as tensor_split.
        _refuse(
            run,
            "parallel.tensor_parallel",
            f"_LossParallelCrossEntropy under spmd_types expects equal vocab shards: {m.vocab_size} does not divide "
            f"by {tp}",
        )
    if -(-m.vocab_size // tp) * (tp - 1) >= m.vocab_size:
        _refuse(
            run,
            "parallel.tensor_parallel",
            f"_LossParallelCrossEntropy does not support empty vocab shards: {m.vocab_size} over {tp}",
        )
    if not p.sequence_parallel and run.settings["spmd_backend"] != "spmd_types":
        torchtitan_dtensor.check(run)


def _check_loss(run: Run) -> None:
    chunks = run.settings["num_chunks"]
    tokens = run.seq_length // run.parallel.context_parallel
    if run.settings["chunked_loss"] and tokens % chunks:
        # components/loss.py:ChunkedLossWrapper.__call__
        _refuse(
            run,
            "torchtitan.num_chunks",
            f"ChunkedLossWrapper sequence length must be divisible by num_chunks: {tokens} by {chunks}",
        )
    if (
        run.settings["chunked_loss"]
        and chunks == 1
        and run.settings["mixed_precision_param"] != run.settings["mixed_precision_reduce"]
        and torchtitan_pipeline.reduces_norm_with_head(run)
    ):
        # _fsdp_collectives.py:foreach_reduce: of several chunks the head's gradient is summed in the type of the
        # reduction, where the norm's of an earlier backward waits; of one chunk it is not.
        _refuse(
            run,
            "torchtitan.num_chunks",
            "FSDP reduce-scatter expects uniform gradient dtype but got both types of mixed precision: with 1 chunk "
            f"under {run.settings['pipeline_parallel_schedule']} the head's gradient meets the norm's",
        )
