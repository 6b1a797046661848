"""What Megatron Core refuses, and what the ledger does not model: each by its key and reason, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from train_ledger.predict.frameworks import megatron
from train_ledger.spec.config import model_shape, resolve_run
from train_ledger.spec.errors import ConfigError

SHAPE: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 48,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 64,
    "vocab_size": 96,
    "seq_length": 16,
}


def refusal(model: dict[str, Any] | None = None, settings: dict[str, Any] | None = None, **run: Any) -> ConfigError:
    """The error that this run meets."""
    shape = model_shape("m", SHAPE | (model or {}), "m.yaml")
    data = {"framework": "megatron", "global_batch": 24, "megatron": settings or {}} | run
    with pytest.raises(ConfigError) as caught:
        megatron.check(resolve_run("r", data, Path("r.yaml"), "config", model=shape))
    return caught.value


def layout(**parallel: Any) -> dict[str, Any]:
    """Keys of a run with these degrees."""
    size = 1
    for key in ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel"):
        size *= parallel.get(key, 1)
    return {"world_size": size, "parallel": parallel}


@pytest.mark.parametrize(
    ("case", "key", "words"),
    [
        (layout(sequence_parallel=True), "parallel.sequence_parallel", "without tensor parallelism"),
        (layout(context_parallel=3), "parallel.context_parallel", "not divisible by 2 x context parallel 3"),
        (
            layout(context_parallel=2) | {"megatron": {"core_attention": "local"}},
            "megatron.core_attention",
            "TEDotProductAttention",
        ),
        (
            layout(context_parallel=4, tensor_parallel=8, sequence_parallel=True) | {"seq_length": 48},
            "parallel.sequence_parallel",
            "12 tokens",
        ),
        (layout(pipeline_parallel=3), "parallel.pipeline_parallel", "8 layers are not divisible by 3"),
        (
            layout(pipeline_parallel=2, virtual_pipeline_parallel=3),
            "parallel.virtual_pipeline_parallel",
            "4 layers of a stage are not divisible by 3",
        ),
        (
            layout(pipeline_parallel=4, virtual_pipeline_parallel=2) | {"global_batch": 6},
            "global_batch",
            "not a multiple of pipeline_parallel 4",
        ),
    ],
)
def test_layouts(case: dict[str, Any], key: str, words: str) -> None:
    """Degrees that do not go together."""
    error = refusal(**case)
    assert error.key == key
    assert words in error.message


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        ({"use_distributed_optimizer": False}, "overlap_param_gather", "only supported with distributed optimizer"),
        ({"overlap_grad_reduce": False}, "overlap_param_gather", "with --overlap-grad-reduce"),
        ({"num_layers_in_first_pipeline_stage": 2}, "num_layers_in_first_pipeline_stage", "2 or more"),
        ({"recompute_granularity": "full"}, "recompute_method", '"block" or "uniform"'),
        ({"recompute_granularity": "full", "recompute_method": "block"}, "recompute_num_layers", "must be given"),
        ({"recompute_granularity": "selective", "recompute_method": "block"}, "recompute_method", "selective"),
        ({"recompute_granularity": "selective", "recompute_num_layers": 2}, "recompute_num_layers", "must be None"),
        ({"recompute_method": "block"}, "recompute_method", "without recompute_granularity"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
            "recompute_modules",
            "Transformer Engine",
        ),
    ],
)
def test_settings(settings: dict[str, Any], key: str, words: str) -> None:
    """Megatron's own settings."""
    error = refusal(settings=settings, **layout())
    assert error.key == f"megatron.{key}"
    assert words in error.message


@pytest.mark.parametrize(
    ("model", "case", "key", "words"),
    [
        ({"attention_output_bias": True}, layout(), "model", "add_bias_linear"),
        (
            {"num_query_groups": 3, "num_attention_heads": 12},
            layout(tensor_parallel=4),
            "parallel.tensor_parallel",
            "divisor",
        ),
        (
            {"num_query_groups": 1, "num_attention_heads": 4, "head_dim": 6},
            layout(tensor_parallel=8),
            "parallel.tensor_parallel",
            "num_attention_heads",
        ),
        (
            {"num_query_groups": 1, "num_attention_heads": 8, "head_dim": 2},
            layout(tensor_parallel=8),
            "parallel.tensor_parallel",
            "20 rows of QKV",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, layout(), "model.rope_scaling", "'yarn' is not modelled"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2}},
            layout(),
            "model.rope_scaling",
            "low_freq_factor fixed at 1",
        ),
    ],
)
def test_shapes(model: dict[str, Any], case: dict[str, Any], key: str, words: str) -> None:
    """Models that Megatron has no switches for, or cannot split so."""
    error = refusal(model, **case)
    assert error.key == key
    assert words in error.message


def test_uneven_stages() -> None:
    """First and last stage of their own size must leave the middle what it can divide."""
    too_many = {"num_layers_in_first_pipeline_stage": 6, "num_layers_in_last_pipeline_stage": 6}
    assert "Mismatch" in refusal(settings=too_many, **layout(pipeline_parallel=4)).message
    none_left = {"num_layers_in_first_pipeline_stage": 4, "num_layers_in_last_pipeline_stage": 4}
    assert "Mismatch: 0 middle layers" in refusal(settings=none_left, **layout(pipeline_parallel=4)).message
    uneven = {"num_layers_in_first_pipeline_stage": 3}
    assert "5 layers are not divisible by 3" in refusal(settings=uneven, **layout(pipeline_parallel=4)).message
    even = {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 6}
    assert (
        "number of middle stages"
        in refusal(settings=even, **layout(pipeline_parallel=2, virtual_pipeline_parallel=2)).message
    )
    odd = {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 5}
    error = refusal(settings=odd, **layout(pipeline_parallel=2, virtual_pipeline_parallel=2))
    assert error.key == "megatron.num_layers_in_first_pipeline_stage"


def test_recomputed_mlp_with_biases() -> None:
    """Megatron's backward would call itself without end."""
    biases = {"qkv_bias": True, "attention_output_bias": True, "mlp_bias": True}
    settings = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    error = refusal(biases, settings, **layout())
    assert error.key == "megatron.recompute_modules"
    assert "without end" in error.message


def test_errors_name_the_file() -> None:
    """So that the message leads to the line to change."""
    assert str(refusal(**layout(sequence_parallel=True))).startswith("r.yaml: parallel.sequence_parallel: ")
