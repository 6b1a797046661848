"""The plain reference: equal to the model that DeepSpeed trains in every option, and changed by rounding only."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from test_weights import GPT, TINY

from train_ledger.launch.llama import Llama
from train_ledger.launch.reference import Order, forward, train
from train_ledger.launch.weights import generate
from train_ledger.spec.errors import LaunchError
from train_ledger.spec.model import ModelShape, canonical_tensors
from train_ledger.spec.run import Optimizer

SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SHAPES = {
    "llama": TINY,
    "gpt": GPT,
    "llama3 scaling": replace(TINY, rope_scaling=SCALED, rope_theta=100.0),
    "linear scaling": replace(TINY, rope_scaling={"type": "linear", "factor": 2.0}),
    "wide heads": replace(TINY, head_dim=10, qk_norm=True),
    "no positions": replace(TINY, position_embedding="none"),
}
COMMON = {"seed": 3, "seq_length": 8, "global_batch": 4, "steps": 3}


@pytest.mark.parametrize("kernels", [False, True], ids=["written out", "kernels"])
@pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES)
def test_loss_and_gradients_are_those_of_the_module(model: ModelShape, kernels: bool) -> None:
    """Two independent implementations, in fp64 where they must agree to the last digits."""
    read = generate(model, 3)
    torch.manual_seed(0)
    tokens, labels = torch.randint(0, model.vocab_size, (2, 2, 8))
    weights = {t.name: read(t.name).double().requires_grad_() for t in canonical_tensors(model)}
    logits = forward(model, weights, tokens, Order(parts=2, kernels=kernels))
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
    loss.backward()

    module = Llama(model).double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(read(name))
    own = module(tokens, labels)
    own.backward()
    torch.testing.assert_close(own, loss, rtol=1e-6, atol=0)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-4, atol=1e-7, msg=name)


def test_order_of_sums_is_rounding_only() -> None:
    """fp32 in any order agrees to fp32 rounding; bf16 differs from it by bf16 rounding, and visibly so."""
    orders = [Order(4), Order(1, 2, True, True), Order(3, 3)]
    exact = [
        train(TINY, generate(TINY, 3), **COMMON, optimizer=Optimizer(), dtype=torch.float32, order=o) for o in orders
    ]
    for a, b in itertools.combinations(exact, 2):
        assert a.losses == pytest.approx(b.losses, rel=3e-7)
        assert a.grad_norms == pytest.approx(b.grad_norms, rel=1e-6)
    rounded = train(TINY, generate(TINY, 3), **COMMON, optimizer=Optimizer(), order=Order(2, 2))
    assert rounded.losses == pytest.approx(exact[0].losses, rel=2e-3)
    assert rounded.losses != pytest.approx(exact[0].losses, rel=1e-6)


def test_same_twice_is_bitwise_the_same() -> None:
    runs = [train(TINY, generate(TINY, 3), **COMMON, optimizer=Optimizer()) for _ in range(2)]
    assert runs[0].losses == runs[1].losses
    assert runs[0].grad_norms == runs[1].grad_norms
    assert all(torch.equal(w, runs[1].weights[n]) for n, w in runs[0].weights.items())


def test_one_step_of_adamw_by_hand() -> None:
    """Step 1 from the gradient: g/(|g| + eps) x rate after clipping, and decay on what has two dimensions only."""
    optimizer = Optimizer(lr=1e-2, min_lr=1e-3, weight_decay=0.5, clip_grad=0.1, decay_norms=False)
    read = generate(TINY, 3)
    common = {**COMMON, "steps": 1}
    trained = train(TINY, read, **common, optimizer=optimizer, dtype=torch.float32)
    still = train(TINY, read, **common, optimizer=replace(optimizer, weight_decay=0.0), dtype=torch.float32)
    # With a large eps the step is proportional to the gradient, so that clipping shows as its factor.
    loose = replace(optimizer, lr=10.0, weight_decay=0.0, eps=100.0)
    clipped = train(TINY, read, **common, optimizer=loose, dtype=torch.float32)
    unclipped = train(TINY, read, **common, optimizer=replace(loose, clip_grad=0.0), dtype=torch.float32)
    assert trained.grad_norms[0] > 0.1
    for t in canonical_tensors(TINY):
        start = read(t.name)
        decay = 1e-2 * 0.5 * start if len(t.shape) == 2 else torch.zeros(())
        torch.testing.assert_close(
            still.weights[t.name] - trained.weights[t.name], decay.expand(t.shape), atol=2e-7, rtol=1e-3
        )
        assert (still.weights[t.name] - start).abs().max() <= 1.001e-2
        moved = [(run.weights[t.name] - start).norm() for run in (clipped, unclipped)]
        assert moved[0] / moved[1] == pytest.approx(0.1 / trained.grad_norms[0], rel=0.02)


def test_a_loss_that_is_not_finite_ends_the_reference() -> None:
    read = generate(TINY, 3)
    with pytest.raises(LaunchError, match="loss of step 1 is nan"):
        train(TINY, lambda name: read(name) * float("nan"), **COMMON, optimizer=Optimizer())


def test_unknown_scaling_is_refused() -> None:
    model = replace(TINY, rope_scaling={"rope_type": "yarn", "factor": 2.0})
    with pytest.raises(LaunchError, match="yarn"):
        train(model, generate(model, 3), **COMMON, optimizer=Optimizer())
