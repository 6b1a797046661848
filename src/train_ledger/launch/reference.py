"""The plain reference: the same model, tokens and AdamW in one process, in fp32 and in bf16 with fp32 master weights.

It shares no model code with what the frameworks train (launch/llama.py among them), so that a fault there is seen.
Precision rules of bf16, as the mixed precision of all three frameworks has them: matrices, activations and their
gradients are bf16; norms, rotary angles, softmax and the loss are computed in fp32 and rounded once; gradients are
summed, clipped and applied in fp32 to fp32 master weights, from which the bf16 weights are rounded after each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from train_ledger.spec.errors import LaunchError
from train_ledger.spec.model import ModelShape, canonical_tensors
from train_ledger.spec.run import Optimizer

from .schedule import lr_at
from .tokens import sample, step_samples
from .weights import Read


@dataclass(frozen=True)
class Order:
    """The order of sums, which exact arithmetic would not notice and rounding does.

    Args:
        micro_batch: sequences of one forward; gradients of the micro-batches are added in fp32.
        parts: every matrix is cut as that many tensor-parallel ranks would cut it, and their partial sums are added in
            the compute type.
        backwards: the sequences of a step come last one first.
        kernels: norms by torch's own kernels, whose backward adds in another order than what is written out here.
    """

    micro_batch: int = 1
    parts: int = 1
    backwards: bool = False
    kernels: bool = False


@dataclass
class Trained:
    """What a run leaves: a loss (mean a token) and a gradient norm (before clipping) a step, fp32 weights on CPU."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(
    model: ModelShape,
    read: Read,
    *,
    seed: int,
    seq_length: int,
    global_batch: int,
    steps: int,
    optimizer: Optimizer,
    dtype: torch.dtype = torch.bfloat16,
    order: Order = Order(),
    device: str = "cpu",
    progress: Callable[[int, float], None] | None = None,
) -> Trained:
    """Train from the weights that `read` gives, on the tokens of `seed`.

    Args:
        seq_length: tokens of a sequence. global_batch: sequences of a step. dtype: float32 or bfloat16, of the compute.
        progress: called after each step with its number (from 1) and loss.

    Raises:
        DataError: `read` does not have a weight. LaunchError: a loss that is not finite.
    """
    master = {t.name: read(t.name).to(device, copy=True).requires_grad_() for t in canonical_tensors(model)}
    flat = [w for w in master.values() if w.ndim < 2]
    groups = [
        {"params": [w for w in master.values() if w.ndim >= 2], "weight_decay": optimizer.weight_decay},
        {"params": flat, "weight_decay": optimizer.weight_decay if optimizer.decay_norms else 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=optimizer.lr, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.eps)
    out = Trained()
    for step in range(1, steps + 1):
        indices = list(step_samples(step, global_batch))
        if order.backwards:
            indices.reverse()
        loss = _gradients(model, master, seed, indices, seq_length, dtype, order, device)
        if not math.isfinite(loss):
            raise LaunchError(f"the reference's loss of step {step} is {loss}")
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(w.grad) for w in master.values()]))
        if optimizer.clip_grad and norm > optimizer.clip_grad:
            for w in master.values():
                w.grad *= optimizer.clip_grad / (norm + 1e-6)  # torch nn/utils/clip_grad.py, and the other two alike
        for group in adamw.param_groups:
            group["lr"] = lr_at(optimizer, step, steps)
        adamw.step()
        adamw.zero_grad()
        out.losses.append(loss)
        out.grad_norms.append(float(norm))
        if progress:
            progress(step, loss)
    out.weights = {name: w.detach().cpu() for name, w in master.items()}
    return out


def _gradients(
    model: ModelShape,
    master: dict[str, Tensor],
    seed: int,
    indices: Sequence[int],
    seq_length: int,
    dtype: torch.dtype,
    order: Order,
    device: str,
) -> float:
    """Adds the gradients of one step to `master`'s, in fp32. Returns the mean loss a token."""
    weights = {name: w.detach().to(dtype).requires_grad_() for name, w in master.items()}
    total = 0.0
    for at in range(0, len(indices), order.micro_batch):
        chosen = indices[at : at + order.micro_batch]
        tokens = torch.stack([torch.from_numpy(sample(seed, i, seq_length + 1, model.vocab_size)) for i in chosen])
        tokens = tokens.to(device)
        logits = forward(model, weights, tokens[:, :-1], order)
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) * (len(chosen) / len(indices))
        loss.backward()
        total += loss.item()
        for name, w in weights.items():
            if w.grad is None:
                raise LaunchError(f"the reference's loss does not depend on {name}")
            if master[name].grad is None:
                master[name].grad = torch.zeros_like(master[name])
            master[name].grad += w.grad
            w.grad = None
    return total


def forward(model: ModelShape, w: dict[str, Tensor], tokens: Tensor, order: Order = Order()) -> Tensor:
    """Logits (batch, sequence, vocabulary) of tokens (batch, sequence), in the type of the weights `w`."""
    x = F.embedding(tokens, w["model.embed_tokens.weight"])
    if model.position_embedding == "learned":
        x = x + w["model.embed_positions.weight"][: tokens.shape[1]]
    for i in range(model.num_layers):
        # On a GPU layers are computed again in the backward: at sequence 8192 the activations of all would not fit.
        layer = partial(_layer, model, w, f"model.layers.{i}", order=order)
        x = checkpoint(layer, x, use_reentrant=False) if x.is_cuda else layer(x)
    head = w["model.embed_tokens.weight" if model.tie_embeddings else "lm_head.weight"]
    return _columns(_norm(model, w, "model.norm", x, order), head, None, order)


def _layer(model: ModelShape, w: dict[str, Tensor], at: str, x: Tensor, order: Order) -> Tensor:
    x = x + _attention(model, w, f"{at}.self_attn", _norm(model, w, f"{at}.input_layernorm", x, order), order)
    return x + _mlp(model, w, f"{at}.mlp", _norm(model, w, f"{at}.post_attention_layernorm", x, order), order)


def _columns(x: Tensor, weight: Tensor, bias: Tensor | None, order: Order) -> Tensor:
    """x W^T + b with W's rows in `parts`, as tensor parallelism cuts it: the sum over parts is in the backward of x."""
    y = torch.cat([x @ rows.T for rows in weight.tensor_split(order.parts)], -1)
    return y if bias is None else y + bias


def _rows(x: Tensor, weight: Tensor, bias: Tensor | None, order: Order) -> Tensor:
    """x W^T + b with W's columns in `parts`, whose products are added in the compute type."""
    pieces = zip(x.tensor_split(order.parts, -1), weight.tensor_split(order.parts, 1), strict=True)
    y = sum(part @ columns.T for part, columns in pieces)
    return y if bias is None else y + bias


def _norm(model: ModelShape, w: dict[str, Tensor], name: str, x: Tensor, order: Order) -> Tensor:
    if order.kernels and model.normalization == "layernorm":
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], model.norm_eps)
    if order.kernels:
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], model.norm_eps)
    h = x.float()
    if model.normalization == "layernorm":
        h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + model.norm_eps) * w[f"{name}.weight"].float()
    if model.normalization == "layernorm":
        h = h + w[f"{name}.bias"].float()
    return h.to(x.dtype)


def _attention(model: ModelShape, w: dict[str, Tensor], at: str, x: Tensor, order: Order) -> Tensor:
    def heads(letter: str) -> Tensor:
        y = _columns(x, w[f"{at}.{letter}_proj.weight"], w.get(f"{at}.{letter}_proj.bias"), order)
        y = y.unflatten(-1, (-1, model.head_dim))
        if model.qk_norm and letter in "qk":
            y = _norm(model, w, f"{at}.{letter}_norm", y, order)
        y = y.transpose(1, 2)  # (batch, heads, sequence, head_dim)
        return _rotate(model, y) if model.position_embedding == "rope" and letter in "qk" else y

    q, k, v = heads("q"), heads("k"), heads("v")
    grouped = model.num_attention_heads // model.num_query_groups  # consecutive query heads share a key head
    k, v = k.repeat_interleave(grouped, 1), v.repeat_interleave(grouped, 1)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return _rows(y.transpose(1, 2).flatten(2), w[f"{at}.o_proj.weight"], w.get(f"{at}.o_proj.bias"), order)


def _mlp(model: ModelShape, w: dict[str, Tensor], at: str, x: Tensor, order: Order) -> Tensor:
    act = F.silu if model.activation == "silu" else F.gelu
    up = _columns(x, w[f"{at}.up_proj.weight"], w.get(f"{at}.up_proj.bias"), order)
    if model.gated_mlp:
        hidden = act(_columns(x, w[f"{at}.gate_proj.weight"], w.get(f"{at}.gate_proj.bias"), order)) * up
    else:
        hidden = act(up)
    return _rows(hidden, w[f"{at}.down_proj.weight"], w.get(f"{at}.down_proj.bias"), order)


def _rotate(model: ModelShape, x: Tensor) -> Tensor:
    """Rotary positions in Hugging Face's half-split layout: element i of a head turns with element i + head_dim/2."""
    half = model.head_dim // 2
    inverse = torch.tensor(
        [_frequency(model, model.rope_theta ** (-i / half)) for i in range(half)], dtype=torch.float32, device=x.device
    )
    angle = torch.arange(x.shape[-2], dtype=torch.float32, device=x.device)[:, None] * inverse
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).to(x.dtype)


def _frequency(model: ModelShape, frequency: float) -> float:
    """One rotary frequency under `rope_scaling`: none, linear, or Llama 3's (slow turns slower, fast as they are)."""
    scaling = model.rope_scaling
    if not scaling:
        return frequency
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        return frequency / scaling["factor"]
    if kind != "llama3":
        raise LaunchError(f"the reference knows no rope_scaling of type {kind!r}")
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = min(max((turns - low) / (high - low), 0.0), 1.0)
    return frequency * (keep + (1 - keep) / scaling["factor"])
