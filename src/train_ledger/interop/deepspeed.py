"""DeepSpeed's ds_config.json (0.19.2) as a run, and a run as ds_config.json with a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from train_ledger.spec.errors import ConfigError
from train_ledger.spec.model import ModelShape

from . import Native
from .hf import read_json
from .lists import ignored, neutral

IGNORED, NEUTRAL = ignored("deepspeed"), neutral("deepspeed")

#: Keys that a run file holds under another name.
RENAMED: dict[str, str] = {
    "gradient_clipping": "optimizer.clip_grad",
    "optimizer.params.lr": "optimizer.lr",
    "optimizer.params.eps": "optimizer.eps",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
    "communication_data_type": "deepspeed.communication_data_type",
    "data_types.grad_accum_dtype": "deepspeed.data_types.grad_accum_dtype",
    "zero_optimization.prefetch_bucket_size": "deepspeed.zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.param_persistence_threshold": "deepspeed.zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.max_live_parameters": "deepspeed.zero_optimization.stage3_max_live_parameters",
    "zero_optimization.max_reuse_distance": "deepspeed.zero_optimization.stage3_max_reuse_distance",
}
#: Keys of `zero_optimization` that a run file holds under the same name.
ZERO = frozenset(
    {
        "stage",
        "overlap_comm",
        "contiguous_gradients",
        "reduce_scatter",
        "reduce_bucket_size",
        "allgather_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "sub_group_size",
    }
)
#: Read by hand below.
OTHER = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "bf16.enabled",
        "bfloat16.enabled",
        "optimizer.type",
        "optimizer.params.betas",
        "optimizer.params.torch_adam",
    }
)
#: Adam by any of these names keeps two fp32 moments.
ADAM = frozenset({"adam", "adamw"})

#: What DeepSpeed does where a key is not given (runtime/zero/config.py, runtime/constants.py), in our keys.
DEFAULTS: dict[str, Any] = {
    "deepspeed.zero_optimization.stage": 0,
    "optimizer.clip_grad": 0.0,
    "optimizer.weight_decay": 0.0,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.999,
}

HF_AUTO = "is 'auto'; Hugging Face's Trainer fills that in, so write the number that it uses"
SCRIPT_NOTE = (
    "ds_config.json does not say how the model is built: zero.Init is taken as used with stage 3 "
    "(--set deepspeed.zero_init=false), activation checkpointing as off (--set "
    "deepspeed.activation_checkpointing=true), all parameters as one group (--set optimizer.decay_norms=false)"
)
FUSED_NOTE = "optimizer.params.torch_adam is not set: DeepSpeed's FusedAdam keeps no step tensor (4 bytes)"


def read_native(path: str, world_size: int, leave_out: set[str]) -> Native:
    """The run that a ds_config.json describes, for `world_size` ranks; the model is named elsewhere.

    Raises:
        ConfigError: names the file and the dotted key.
    """
    keys = dict(_leaves(read_json(path)))
    flat: dict[str, Any] = dict(DEFAULTS)
    skipped = []
    for key, value in keys.items():
        head, _, tail = key.partition(".")
        if key in leave_out or head in leave_out:
            continue
        if value == "auto":
            raise ConfigError(HF_AUTO, file=path, key=key)
        if key in RENAMED:
            flat[RENAMED[key]] = value
        elif head == "zero_optimization" and tail in ZERO:
            flat[f"deepspeed.{key}"] = value
        elif _is_ignored(key):
            skipped.append(key)
        elif key in NEUTRAL:
            if str(value) not in NEUTRAL[key]:
                raise ConfigError(
                    f"{str(value)[:60]} could change bytes or calls and is not modelled", file=path, key=key
                )
            skipped.append(key)
        elif key not in OTHER:
            raise ConfigError(
                "could change bytes or calls and is not modelled (--without leaves it out)", file=path, key=key
            )
    zero = "deepspeed.zero_optimization"
    # runtime/zero/config.py:overlap_comm_valid
    flat.setdefault(f"{zero}.overlap_comm", flat[f"{zero}.stage"] == 3)
    _precision(path, keys)
    _batch(path, keys, world_size, flat)
    notes = [SCRIPT_NOTE, *_adam(path, keys, flat)]
    data: dict[str, Any] = {"framework": "deepspeed", "world": "nccl", "world_size": world_size}
    for key, value in flat.items():
        at = data
        *parents, last = key.split(".")
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    data["parallel"] = {"data_parallel": world_size}
    called = {ours: theirs for theirs, ours in RENAMED.items()}
    called |= {f"{zero}.{key}": f"zero_optimization.{key}" for key in ZERO}
    called |= {"micro_batch": "train_micro_batch_size_per_gpu", "global_batch": "train_batch_size"}
    return Native(data, None, tuple(skipped), tuple(notes), called)


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_ignored(key: str) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:i]) in IGNORED for i in range(1, len(parts) + 1))


def _precision(path: str, keys: Mapping[str, Any]) -> None:
    if not (keys.get("bf16.enabled") is True or keys.get("bfloat16.enabled") is True):
        raise ConfigError("is not true; only bf16 is modelled", file=path, key="bf16.enabled")


def _count(path: str, keys: Mapping[str, Any], key: str) -> int | None:
    value = keys.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 10**9:
        raise ConfigError(f"{str(value)[:60]} has to be an integer greater than 0", file=path, key=key)
    return value


def _batch(path: str, keys: Mapping[str, Any], world_size: int, flat: dict[str, Any]) -> None:
    """Two of the three give the third (runtime/config.py:_set_batch_related_parameters)."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    train, micro, steps = (_count(path, keys, name) for name in names)
    if train is not None:
        if micro is None:
            micro = max(train // (world_size * (steps or 1)), 1)
        if steps is None:
            steps = max(train // (micro * world_size), 1)
    elif micro is not None:
        steps = steps or 1
        train = micro * steps * world_size
    else:
        raise ConfigError(
            "Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided (runtime/config.py)",
            file=path,
            key="train_batch_size",
        )
    if train != micro * steps * world_size:
        raise ConfigError(
            f"train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size "
            f"{train} != {micro} * {steps} * {world_size} (runtime/config.py:_batch_assertion)",
            file=path,
            key="train_batch_size",
        )
    flat |= {"micro_batch": micro, "global_batch": train}


def _adam(path: str, keys: Mapping[str, Any], flat: dict[str, Any]) -> list[str]:
    kind = keys.get("optimizer.type")
    if kind is None:
        return ["optimizer.type is not set: torch's AdamW is taken, as the script would hand it over"]
    if str(kind).lower() not in ADAM:
        raise ConfigError(f"{str(kind)[:60]!r} is not modelled; known: Adam, AdamW", file=path, key="optimizer.type")
    betas = keys.get("optimizer.params.betas")
    if betas is not None:
        if not isinstance(betas, list) or len(betas) != 2:
            raise ConfigError("is not a pair of numbers", file=path, key="optimizer.params.betas")
        flat["optimizer.beta1"], flat["optimizer.beta2"] = betas
    return [] if keys.get("optimizer.params.torch_adam") is True else [FUSED_NOTE]


def hf_config(m: ModelShape, file: str | None = None) -> dict[str, Any]:
    """Hugging Face's config.json of a shape, in the family that has it.

    Raises:
        ConfigError: no family that is read here has such a shape.
    """
    biases = (m.qkv_bias, m.attention_output_bias, m.mlp_bias)
    sizes = {
        "hidden_size": m.hidden_size,
        "intermediate_size": m.ffn_hidden_size,
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.num_attention_heads,
        "vocab_size": m.vocab_size,
        "max_position_embeddings": m.max_position_embeddings,
        "tie_word_embeddings": m.tie_embeddings,
    }
    rope = {"rope_theta": m.rope_theta, "rope_scaling": m.rope_scaling}
    if m.normalization == "rmsnorm" and m.gated_mlp and m.activation == "silu" and m.position_embedding == "rope":
        grouped = {"num_key_value_heads": m.num_query_groups, "head_dim": m.head_dim, "rms_norm_eps": m.norm_eps}
        both = m.qkv_bias == m.attention_output_bias
        if both and not m.qk_norm:
            own = {"model_type": "llama", "attention_bias": m.qkv_bias, "mlp_bias": m.mlp_bias}
        elif biases == (True, False, False) and not m.qk_norm:
            own = {"model_type": "qwen2"}
        elif both and m.qk_norm and not m.mlp_bias:
            own = {"model_type": "qwen3", "attention_bias": m.qkv_bias}
        else:
            raise _no_family(file)
        return {**own, **sizes, **grouped, **rope}
    plain = m.normalization == "layernorm" and not m.gated_mlp and m.activation == "gelu" and not m.qk_norm
    whole = m.num_query_groups == m.num_attention_heads and m.head_dim * m.num_attention_heads == m.hidden_size
    if plain and whole and m.mlp_bias and m.qkv_bias == m.attention_output_bias:
        if m.position_embedding == "rope":
            own = {"model_type": "gpt_neox", "attention_bias": m.qkv_bias, "layer_norm_eps": m.norm_eps}
            return {**own, **sizes, "rotary_pct": 1.0, "use_parallel_residual": False, **rope}
        if m.position_embedding == "learned" and m.qkv_bias:
            return {
                "model_type": "gpt2",
                "n_embd": m.hidden_size,
                "n_inner": m.ffn_hidden_size,
                "n_layer": m.num_layers,
                "n_head": m.num_attention_heads,
                "n_positions": m.max_position_embeddings,
                "vocab_size": m.vocab_size,
                "layer_norm_epsilon": m.norm_eps,
                "tie_word_embeddings": m.tie_embeddings,
            }
    raise _no_family(file)


def _no_family(file: str | None) -> ConfigError:
    return ConfigError("no Hugging Face family that is read here has this shape", file=file, key="model")
