"""The model as DeepSpeed's hooks see it: parameters, modules in the order they run, gradients in the order they
are ready.

Mirrors `launch/llama.py`. An event is (kind, number): `pre` and `post` of a module, forward or backward, and `grad`
of a parameter.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from train_ledger.spec.model import CanonicalTensor, ModelShape, canonical_tensors

PRE, POST, GRAD = "pre", "post", "grad"
Event = tuple[str, int]


@dataclass(frozen=True, eq=False)
class ModelTrace:
    """One micro-batch of a model.

    `numels` and `dims` (number of dimensions) are by parameter; `modules` lists the parameters that each module owns
    itself (a tied head owns the embedding's). `forward` and `backward` are the events of one pass.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    dims: tuple[int, ...]
    modules: tuple[tuple[int, ...], ...]
    forward: tuple[Event, ...]
    backward: tuple[Event, ...]


class _Builder:
    """Numbers modules and parameters while it walks the model."""

    def __init__(self, tensors: list[CanonicalTensor]) -> None:
        self.parameters = {tensor.name: number for number, tensor in enumerate(tensors)}
        self.modules: list[tuple[int, ...]] = []

    def module(self, *names: str) -> int:
        self.modules.append(tuple(self.parameters[name] for name in names))
        return len(self.modules) - 1

    def leaf(self, name: str) -> int:
        """A module that owns parameters and calls no other."""
        return self.module(*(f"{name}.{kind}" for kind in ("weight", "bias") if f"{name}.{kind}" in self.parameters))

    def present(self, *names: str) -> list[int]:
        """The leaves among `names` that this model has."""
        return [self.leaf(name) for name in names if f"{name}.weight" in self.parameters]


def trace(model: ModelShape, checkpoint_layers: bool, fused_linear: bool) -> ModelTrace:
    """The events of one micro-batch of `model`.

    Args:
        model: the shape.
        checkpoint_layers: each layer runs without a graph and again, with one, in the backward (torch.utils.checkpoint,
            reentrant).
        fused_linear: linear layers are PyTorch's own; else DeepSpeed's `LinearFunctionForZeroStage3`
            (runtime/zero/linear.py). They give the gradients of weight and bias in opposite orders.
    """
    key = (
        model.num_layers,
        model.position_embedding == "learned",
        model.qk_norm,
        model.gated_mlp,
        model.tie_embeddings,
        checkpoint_layers,
        fused_linear,
        tuple((t.name, t.numel, len(t.shape)) for t in canonical_tensors(model)),
    )
    return _trace(*key)


@functools.lru_cache(maxsize=64)
def _trace(
    num_layers: int,
    learned_positions: bool,
    qk_norm: bool,
    gated_mlp: bool,
    tied: bool,
    checkpoint_layers: bool,
    fused_linear: bool,
    tensors: tuple[tuple[str, int, int], ...],
) -> ModelTrace:
    build = _Builder([CanonicalTensor(name, (numel,)) for name, numel, _ in tensors])

    def leaf_backward(module: int, needs_input_gradient: bool = True) -> list[Event]:
        owned = build.modules[module]
        ready = reversed(owned) if fused_linear and module in linears else owned
        end = [(POST, module)] if needs_input_gradient else []
        return [(PRE, module), *((GRAD, p) for p in ready), *end]

    linears: set[int] = set()
    top, decoder = build.module(), build.module()
    embeddings = build.present("model.embed_tokens", "model.embed_positions")
    forward: list[Event] = [(PRE, top), (PRE, decoder)]
    for module in embeddings:
        forward += [(PRE, module), (POST, module)]

    backward_layers: list[list[Event]] = []
    for i in range(num_layers):
        at = f"model.layers.{i}"
        layer = build.module()
        [norm_1] = build.present(f"{at}.input_layernorm")
        attention = build.module()
        projections = build.present(*(f"{at}.self_attn.{x}_proj" for x in "qkv"))
        head_norms = build.present(*(f"{at}.self_attn.{x}_norm" for x in "qk"))
        [out] = build.present(f"{at}.self_attn.o_proj")
        [norm_2] = build.present(f"{at}.post_attention_layernorm")
        mlp = build.module()
        matrices = build.present(*(f"{at}.mlp.{x}_proj" for x in ("gate", "up", "down")))
        linears.update(projections, [out], matrices)

        run: list[Event] = [(PRE, layer), (PRE, norm_1), (POST, norm_1), (PRE, attention)]
        for module in (*projections, *head_norms, out):
            run += [(PRE, module), (POST, module)]
        run += [(POST, attention), (PRE, norm_2), (POST, norm_2), (PRE, mlp)]
        for module in matrices:
            run += [(PRE, module), (POST, module)]
        run += [(POST, mlp), (POST, layer)]
        forward += run

        back: list[Event] = run if checkpoint_layers else []
        back = [*back, (PRE, layer), (PRE, mlp)]
        for module in reversed(matrices):
            back += leaf_backward(module)
        back += [(POST, mlp), *leaf_backward(norm_2), (PRE, attention), *leaf_backward(out)]
        for module in (*reversed(head_norms), *reversed(projections)):
            back += leaf_backward(module)
        back += [(POST, attention), *leaf_backward(norm_1), (POST, layer)]
        backward_layers.append(back)

    [last_norm] = build.present("model.norm")
    head = build.module("model.embed_tokens.weight") if tied else build.leaf("lm_head")
    forward += [(PRE, last_norm), (POST, last_norm), (POST, decoder), (PRE, head), (POST, head), (POST, top)]

    # Tokens are integers, so nothing after the embeddings gives a gradient to its input: those modules' backward ends
    # unnoticed (zero/parameter_offload.py:PostBackwardFunctionModule). A tied weight is ready when both its uses are.
    backward: list[Event] = [(PRE, top)]
    backward += [e for e in leaf_backward(head) if not (tied and e[0] == GRAD)]
    backward += [(PRE, decoder), *leaf_backward(last_norm)]
    for back in reversed(backward_layers):
        backward += back
    for module in reversed(embeddings):
        backward += leaf_backward(module, needs_input_gradient=False)
    names, numels, dims = zip(*tensors, strict=True)
    return ModelTrace(names, numels, dims, tuple(build.modules), tuple(forward), tuple(backward))
