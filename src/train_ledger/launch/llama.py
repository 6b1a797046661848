"""A Llama- or GPT-shaped decoder in plain PyTorch: what DeepSpeed trains here, and what the single-process
reference runs.

Modules and parameters carry their Hugging Face Llama names, so that `spec.model.canonical_tensors` maps one to one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from train_ledger.spec.model import ModelShape

INIT_STD = 0.02


def rope_frequencies(model: ModelShape, device: torch.device) -> Tensor:
    """Angle a position of each pair of a head, shape (head_dim / 2,), fp32, with `rope_scaling` applied.

    Raises:
        ValueError: a kind of `rope_scaling` that is not known here.
    """
    # An integer arange, cast: inside `deepspeed.zero.Init` a floating-point arange comes back in bf16.
    pair = torch.arange(0, model.head_dim, 2, device=device).to(torch.float32)
    frequency = model.rope_theta ** (-pair / model.head_dim)
    return _scaled(frequency, model.rope_scaling) if model.rope_scaling else frequency


def _scaled(frequency: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Hugging Face's `rope_scaling` of kind `linear` or `llama3` (transformers modeling_rope_utils.py)."""
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        return frequency / scaling["factor"]
    if kind != "llama3":
        raise ValueError(f"rope_scaling of kind {kind!r} is not known; known: linear, llama3")
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequency
    share = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - share) * frequency / scaling["factor"] + share * frequency


def rotate(x: Tensor, frequency: Tensor) -> Tensor:
    """Rotary positions, computed in fp32, for x of shape (batch, heads, sequence, head_dim); halves are paired, as
    in Hugging Face.
    """
    position = torch.arange(x.shape[-2], device=x.device).to(torch.float32)
    angle = position[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def make_norm(model: ModelShape, width: int) -> nn.Module:
    """The model's norm over the last `width` elements."""
    kind = nn.RMSNorm if model.normalization == "rmsnorm" else nn.LayerNorm
    return kind(width, eps=model.norm_eps)


class Linear(nn.Linear):
    """A linear layer whose weight begins normal with deviation 0.02 and whose bias begins at 0."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding that begins normal with deviation 0.02."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class Attention(nn.Module):
    """Causal self-attention with grouped queries."""

    def __init__(self, model: ModelShape) -> None:
        super().__init__()
        self.shape = model
        self.q_proj = Linear(model.hidden_size, model.query_size, bias=model.qkv_bias)
        self.k_proj = Linear(model.hidden_size, model.kv_size, bias=model.qkv_bias)
        self.v_proj = Linear(model.hidden_size, model.kv_size, bias=model.qkv_bias)
        if model.qk_norm:
            self.q_norm = make_norm(model, model.head_dim)
            self.k_norm = make_norm(model, model.head_dim)
        self.o_proj = Linear(model.query_size, model.hidden_size, bias=model.attention_output_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden_size) to the same shape."""
        batch, length, _ = x.shape
        heads, head_dim = (batch, length, -1, self.shape.head_dim), self.shape.head_dim
        query, key, value = self.q_proj(x).view(heads), self.k_proj(x).view(heads), self.v_proj(x).view(heads)
        if self.shape.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if self.shape.position_embedding == "rope":
            frequency = rope_frequencies(self.shape, x.device)
            query, key = rotate(query, frequency), rotate(key, frequency)
        grouped = self.shape.num_query_groups != self.shape.num_attention_heads
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=head_dim**-0.5, enable_gqa=grouped
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """Gated (three matrices) or plain (two)."""

    def __init__(self, model: ModelShape) -> None:
        super().__init__()
        self.activation = F.silu if model.activation == "silu" else F.gelu
        if model.gated_mlp:
            self.gate_proj = Linear(model.hidden_size, model.ffn_hidden_size, bias=model.mlp_bias)
        self.up_proj = Linear(model.hidden_size, model.ffn_hidden_size, bias=model.mlp_bias)
        self.down_proj = Linear(model.ffn_hidden_size, model.hidden_size, bias=model.mlp_bias)
        self.gated = model.gated_mlp

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden_size) to the same shape."""
        if not self.gated:
            return self.down_proj(self.activation(self.up_proj(x)))
        gate = self.activation(self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


class Layer(nn.Module):
    """One transformer layer, norms first."""

    def __init__(self, model: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = make_norm(model, model.hidden_size)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = make_norm(model, model.hidden_size)
        self.mlp = MLP(model)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden_size) to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embeddings, layers and the last norm."""

    def __init__(self, model: ModelShape, *, checkpoint_layers: bool = False) -> None:
        super().__init__()
        self.checkpoint_layers = checkpoint_layers
        self.embed_tokens = Embedding(model.vocab_size, model.hidden_size)
        if model.position_embedding == "learned":
            self.embed_positions = Embedding(model.max_position_embeddings, model.hidden_size)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.num_layers))
        self.norm = make_norm(model, model.hidden_size)
        self.learned_positions = model.position_embedding == "learned"

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, sequence) to hidden states (batch, sequence, hidden_size)."""
        x = self.embed_tokens(tokens)
        if self.learned_positions:
            x = x + self.embed_positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            # Reentrant: the kind that DeepSpeed's gradient hooks are written for (runtime/base_optimizer.py).
            x = checkpoint(layer, x, use_reentrant=True) if self.checkpoint_layers else layer(x)
        return self.norm(x)


class Llama(nn.Module):
    """The whole model, from tokens to the loss.

    Raises:
        ValueError: a kind of `rope_scaling` that is not known here.
    """

    def __init__(self, model: ModelShape, *, checkpoint_layers: bool = False) -> None:
        super().__init__()
        if model.position_embedding == "rope":
            rope_frequencies(model, torch.device("cpu"))  # to refuse what the forward would
        self.model = Decoder(model, checkpoint_layers=checkpoint_layers)
        self.lm_head = Linear(model.hidden_size, model.vocab_size, bias=False)
        if model.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss a token, fp32, of tokens and labels of shape (batch, sequence)."""
        logits = self.lm_head(self.model(tokens))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
