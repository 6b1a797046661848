"""Hugging Face's config.json of the Llama, Mistral, Qwen2, Qwen3, GPT-2 and GPT-NeoX families as a model shape.

Defaults are those of the family's configuration class in transformers, which a file may leave out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from train_ledger.spec.errors import ConfigError
from train_ledger.spec.io import read_text

from . import Native
from .lists import ignored

IGNORED = ignored("huggingface")

#: Activations by the ledger's two words; which one it is changes no size.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
}

LLAMA_LIKE = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "norm_eps",
    "head_dim": "head_dim",
    "tie_word_embeddings": "tie_embeddings",
    "hidden_act": "activation",
}
GPT2 = {
    "n_embd": "hidden_size",
    "n_inner": "ffn_hidden_size",
    "n_layer": "num_layers",
    "n_head": "num_attention_heads",
    "vocab_size": "vocab_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "activation_function": "activation",
}
NEOX = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "layer_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "hidden_act": "activation",
}
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")


def read_config(path: str) -> Native:
    """The model of a config.json, as the mapping that a model file holds.

    Raises:
        ConfigError: not JSON, a family that is not known, a key that could change bytes or calls; names the key.
    """
    data = read_json(path)
    family = data.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ConfigError(f"{str(family)[:60]!r} is not one of {', '.join(FAMILIES)}", file=path, key="model_type")
    table = {"gpt2": GPT2, "gpt_neox": NEOX}.get(family, LLAMA_LIKE)
    return replace(FAMILIES[family](path, data), called={ours: theirs for theirs, ours in table.items()})


def read_json(path: str) -> dict[str, Any]:
    """A JSON file with a mapping; a key given twice is refused, as DeepSpeed refuses it.

    Raises:
        ConfigError: unreadable, not JSON, no mapping, a key given twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            twice = next(k for i, (k, _) in enumerate(pairs) if k in dict(pairs[:i]))
            raise ConfigError(f"key {twice[:60]!r} is given twice", file=path)
        return out

    try:
        data = json.loads(read_text(path), object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"is not JSON: {e}", file=path) from e
    if not isinstance(data, dict):
        raise ConfigError("must hold a mapping of keys to values", file=path)
    return data


def _take(
    path: str, data: Mapping[str, Any], table: Mapping[str, str], own: tuple[str, ...]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Sizes by our names, and the ignored keys that are present. Every other key is refused."""
    known = {*table, *own, *IGNORED}
    unknown = sorted(set(data) - known)
    if unknown:
        raise ConfigError("could change bytes or calls and is not modelled", file=path, key=unknown[0][:100])
    out = {ours: data[theirs] for theirs, ours in table.items() if data.get(theirs) is not None}
    if "activation" in out:
        word = str(out["activation"])
        if word not in ACTIVATIONS:
            theirs = next(t for t, ours in table.items() if ours == "activation")
            raise ConfigError(f"{word[:60]!r} is not modelled", file=path, key=theirs)
        out["activation"] = ACTIVATIONS[word]
    return out, tuple(sorted(IGNORED & set(data) - {"model_type"}))


def _rope(path: str, data: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """Positions by rotation: transformers 4 has `rope_theta` and `rope_scaling`, transformers 5 `rope_parameters`."""
    new = data.get("rope_parameters")
    if new is not None and not isinstance(new, Mapping):
        raise ConfigError("is not a mapping", file=path, key="rope_parameters")
    scaling = dict(new) if new else data.get("rope_scaling")
    base = data.get("rope_theta", theta)
    if isinstance(scaling, Mapping):
        scaling = dict(scaling)
        base = scaling.pop("rope_theta", base)
        if scaling.get("rope_type", scaling.get("type", "default")) == "default":
            scaling = None
    return {"position_embedding": "rope", "rope_theta": base, "rope_scaling": scaling}


def _llama_like(
    path: str, data: Mapping[str, Any], defaults: Mapping[str, Any], own: tuple[str, ...], theta: float = 10000.0
) -> tuple[dict[str, Any], tuple[str, ...]]:
    out, ignored = _take(path, data, LLAMA_LIKE, (*ROPE_KEYS, *own))
    return {
        "seq_length": out.get("max_position_embeddings", defaults["max_position_embeddings"]),
        "normalization": "rmsnorm",
        "gated_mlp": True,
        **defaults,
        **out,
        **_rope(path, data, theta),
    }, ignored


def _flag(path: str, data: Mapping[str, Any], key: str, default: bool) -> bool:
    value = data.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{str(value)[:60]!r} is not true or false", file=path, key=key)
    return value


def _llama(path: str, data: Mapping[str, Any]) -> Native:
    out, ignored = _llama_like(
        path,
        data,
        {"max_position_embeddings": 2048, "norm_eps": 1e-6, "vocab_size": 32000},
        ("attention_bias", "mlp_bias"),
    )
    bias = _flag(path, data, "attention_bias", False)
    out |= {
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": _flag(path, data, "mlp_bias", False),
    }
    return Native({}, out, ignored)


def _mistral(path: str, data: Mapping[str, Any]) -> Native:
    defaults = {
        "max_position_embeddings": 131072,
        "norm_eps": 1e-6,
        "vocab_size": 32000,
        "num_query_groups": 8,
    }
    return Native({}, *_llama_like(path, data, defaults, ()))


def _qwen2(path: str, data: Mapping[str, Any]) -> Native:
    defaults = {"max_position_embeddings": 32768, "norm_eps": 1e-6, "vocab_size": 151936, "qkv_bias": True}
    return Native({}, *_llama_like(path, data, defaults, ()))


def _qwen3(path: str, data: Mapping[str, Any]) -> Native:
    defaults = {
        "max_position_embeddings": 32768,
        "norm_eps": 1e-6,
        "vocab_size": 151936,
        "head_dim": 128,
        "qk_norm": True,
    }
    out, ignored = _llama_like(path, data, defaults, ("attention_bias",))
    bias = _flag(path, data, "attention_bias", False)
    return Native({}, out | {"qkv_bias": bias, "attention_output_bias": bias}, ignored)


FUSED = "{} has query, key and value in one matrix; predicted are three, which changes how many calls a layer makes"


def _gpt2(path: str, data: Mapping[str, Any]) -> Native:
    out, ignored = _take(path, data, GPT2, ())
    shape = {"max_position_embeddings": 1024, "norm_eps": 1e-5, "vocab_size": 50257, "tie_embeddings": True} | out
    shape |= {
        "seq_length": shape["max_position_embeddings"],
        "ffn_hidden_size": out.get("ffn_hidden_size") or _times4(out.get("hidden_size")),
        "position_embedding": "learned",
        "normalization": "layernorm",
        "gated_mlp": False,
        "activation": out.get("activation", "gelu"),
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
    }
    return Native({}, shape, ignored, (FUSED.format("GPT-2"),))


def _neox(path: str, data: Mapping[str, Any]) -> Native:
    own = ("rotary_pct", "rotary_emb_base", "attention_bias", "use_parallel_residual", *ROPE_KEYS)
    out, ignored = _take(path, data, NEOX, own)
    shape = {"max_position_embeddings": 2048, "norm_eps": 1e-5, "vocab_size": 50432} | out
    bias = _flag(path, data, "attention_bias", True)
    shape |= {
        "seq_length": shape["max_position_embeddings"],
        **_rope(path, data, data.get("rotary_emb_base", 10000)),
        "normalization": "layernorm",
        "gated_mlp": False,
        "activation": out.get("activation", "gelu"),
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": True,
    }
    notes = [FUSED.format("GPT-NeoX")]
    if data.get("rotary_pct", 0.25) != 1:
        notes.append("rotary_pct below 1: tables of rotary positions are predicted for whole heads")
    if data.get("use_parallel_residual", True):
        notes.append("use_parallel_residual: the order of calls is predicted as without it")
    return Native({}, shape, ignored, tuple(notes))


def _times4(hidden: Any) -> Any:
    return 4 * hidden if isinstance(hidden, int) else hidden


FAMILIES = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "gpt_neox": _neox,
}
