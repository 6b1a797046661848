"""The model that DeepSpeed trains against the plain reference, which shares no code with it: every family, in fp32."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from train_ledger.launch.llama import Llama
from train_ledger.launch.reference import forward
from train_ledger.launch.weights import generate
from train_ledger.spec.config import model_shape
from train_ledger.spec.model import canonical_tensors

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from deepspeed_generate import model as draw_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SCALINGS: list[dict[str, Any] | None] = [None, LLAMA3, {"rope_type": "linear", "factor": 4.0}]


@pytest.mark.parametrize("seed", range(24))
def test_same_loss_and_gradients_as_the_reference(seed: int) -> None:
    shape = model_shape("case", {**draw_model(random.Random(seed)), "rope_scaling": SCALINGS[seed % 3]}, "case")
    read = generate(shape, 3)
    tokens = torch.randint(0, shape.vocab_size, (2, 9), generator=torch.Generator().manual_seed(seed))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]

    network = Llama(shape, checkpoint_layers=seed % 2 == 1)
    parameters = dict(network.named_parameters())
    assert list(parameters) == [t.name for t in canonical_tensors(shape)]  # DeepSpeed numbers them in this order
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(read(name))
    loss = network(inputs, labels)
    loss.backward()

    weights = {t.name: read(t.name).requires_grad_() for t in canonical_tensors(shape)}
    expected = F.cross_entropy(forward(shape, weights, inputs).flatten(0, 1), labels.flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, weight in weights.items():
        torch.testing.assert_close(parameters[name].grad, weight.grad, rtol=1e-3, atol=1e-5, msg=name)
