"""The shape of a dense decoder-only transformer: all that memory and traffic depend on, nothing about values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """A Llama- or GPT-shaped model. Names are Megatron Core's (`TransformerConfig`), sizes are counts of elements.

    `head_dim` is `kv_channels`; `seq_length` is the sequence that this shape is trained at unless a run says otherwise.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    ffn_hidden_size: int
    vocab_size: int
    seq_length: int
    head_dim: int
    max_position_embeddings: int
    position_embedding: str = "rope"  # rope | learned | none
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    normalization: str = "rmsnorm"  # rmsnorm | layernorm
    norm_eps: float = 1e-5
    gated_mlp: bool = True
    activation: str = "silu"  # silu | gelu
    tie_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def query_size(self) -> int:
        """Width of all query heads together, elements."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (as wide as all value heads), elements."""
        return self.num_query_groups * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(tensor.numel for tensor in canonical_tensors(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON and for hashing."""
        return asdict(self)


@dataclass(frozen=True)
class CanonicalTensor:
    """One parameter under its Hugging Face Llama name, in the shape `torch.nn` gives it ((out, in) for a linear
    layer).
    """

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def canonical_tensors(model: ModelShape) -> list[CanonicalTensor]:
    """Every parameter of `model` in module order under Hugging Face Llama names: not yet fused, sharded or padded.

    A LayerNorm has a bias beside its weight; a tied head has no tensor of its own.
    """
    h, q, kv, f = model.hidden_size, model.query_size, model.kv_size, model.ffn_hidden_size
    out: list[CanonicalTensor] = []

    def add(name: str, *shape: int) -> None:
        out.append(CanonicalTensor(name, shape))

    def linear(name: str, rows: int, cols: int, bias: bool) -> None:
        add(f"{name}.weight", rows, cols)
        if bias:
            add(f"{name}.bias", rows)

    def norm(name: str, width: int) -> None:
        add(f"{name}.weight", width)
        if model.normalization == "layernorm":
            add(f"{name}.bias", width)

    add("model.embed_tokens.weight", model.vocab_size, h)
    if model.position_embedding == "learned":
        add("model.embed_positions.weight", model.max_position_embeddings, h)
    for i in range(model.num_layers):
        at = f"model.layers.{i}"
        norm(f"{at}.input_layernorm", h)
        linear(f"{at}.self_attn.q_proj", q, h, model.qkv_bias)
        linear(f"{at}.self_attn.k_proj", kv, h, model.qkv_bias)
        linear(f"{at}.self_attn.v_proj", kv, h, model.qkv_bias)
        if model.qk_norm:
            norm(f"{at}.self_attn.q_norm", model.head_dim)
            norm(f"{at}.self_attn.k_norm", model.head_dim)
        linear(f"{at}.self_attn.o_proj", h, q, model.attention_output_bias)
        norm(f"{at}.post_attention_layernorm", h)
        if model.gated_mlp:
            linear(f"{at}.mlp.gate_proj", f, h, model.mlp_bias)
        linear(f"{at}.mlp.up_proj", f, h, model.mlp_bias)
        linear(f"{at}.mlp.down_proj", h, f, model.mlp_bias)
    norm("model.norm", h)
    if not model.tie_embeddings:
        add("lm_head.weight", model.vocab_size, h)
    return out
