"""Tensor parallelism without sequence parallelism in DTensors: what the backward sends, which DTensor decides by cost.

The gradient that comes down the residual stream is a sum over the tensor-parallel ranks that nobody has carried out. At
each row-parallel weight (wo, w2) it meets an operand that is split, in two products: with the activation for the
weight's gradient, and with the weight for the input's. Each time DTensor takes what it thinks is cheapest:
`gather` the operand and leave the result a pending sum, `sum` the gradient, or `exchange` both, which only pays for
many ranks and large operands (torch/distributed/tensor/_ops/_matrix_ops.py, _collective_utils.py:redistribute_cost).
"""

from __future__ import annotations

from collections.abc import Iterator

from train_ledger.spec.dtypes import element_bytes
from train_ledger.spec.errors import ConfigError
from train_ledger.spec.ledger import Collective
from train_ledger.spec.run import Run

from .torchtitan_layout import local_tokens

#: (microseconds a hop, GB/s) that `MeshTopoInfo.build_from_mesh` takes within a host and between hosts.
LINKS = ((0.6, 87.7), (2.7, 87.7 * 0.22))
_BASE_US = 6.6
_EXCHANGE_PENALTY_US = 1.0

_COST = "torch/distributed/tensor/_collective_utils.py:redistribute_cost"


def choice(gradient_bytes: int, operand_bytes: int, ranks: int, link: tuple[float, float]) -> str:
    """`gather`, `sum` or `exchange`: what DTensor does in one product.

    Args:
        gradient_bytes: the gradient that is a pending sum, on one rank.
        operand_bytes: the other operand, whole.
        ranks: tensor-parallel ranks.
        link: one of `LINKS`.
    """

    def cost_us(hops: int, n_bytes: float) -> float:
        return _BASE_US + hops * link[0] + n_bytes * hops / ranks / 2**30 / link[1] * 1e6

    once = ranks - 1
    costs = {
        "gather": cost_us(once, operand_bytes),
        "sum": cost_us(2 * once, gradient_bytes),
        "exchange": cost_us(once, gradient_bytes) + cost_us(once, operand_bytes / ranks) + _EXCHANGE_PENALTY_US,
    }
    return min(costs, key=lambda name: costs[name])


def _products(run: Run) -> Iterator[tuple[int, int, str, str]]:
    """(width of the weight, pending sums that the input's gradient meets, choice for the weight's gradient, the
    input's).

    Raises:
        ConfigError: a choice depends on whether the ranks share a host, or is one that is not modelled.
    """
    m, ranks = run.model, run.parallel.tensor_parallel
    size = element_bytes(run.settings["mixed_precision_param"])
    tokens = local_tokens(run)
    # The gradient of w2's input is used twice, for both factors of the gated MLP; that of wo's goes into attention.
    for width, uses in ((m.query_size, 1), (m.ffn_hidden_size, 2)):
        chosen = []
        for rows in (tokens, m.hidden_size):
            options = {choice(size * tokens * m.hidden_size, size * rows * width, ranks, link) for link in LINKS}
            if len(options) > 1 or "exchange" in options:
                what = "exchanges shards" if "exchange" in options else "depends on whether the ranks share a host"
                raise ConfigError(
                    f"without sequence parallelism {run.settings['spmd_backend']} {what} in the backward at this size, "
                    "which is not modelled; spmd_types is",
                    file=run.source or None,
                    key="parallel.sequence_parallel",
                )
            chosen.append(options.pop())
        yield width, uses, chosen[0], chosen[1]


def check(run: Run) -> None:
    """Refuse a size at which the choice is not modelled.

    Raises:
        ConfigError: says so.
    """
    for _ in _products(run):
        pass


def backward(run: Run) -> Iterator[Collective]:
    """Calls of one step's backward beside those of norms' gradients, recomputation not included."""
    m, ranks = run.model, run.parallel.tensor_parallel
    dtype = run.settings["mixed_precision_param"]
    hidden = local_tokens(run) * m.hidden_size
    layers = m.num_layers * run.num_micro_batches

    def call(op: str, whole: int, count: int, component: str, rule: str) -> Collective:
        part = whole // ranks
        sizes = {"all_gather": (part, whole), "reduce_scatter": (whole, part), "all_reduce": (whole, whole)}[op]
        return Collective(op, "tp", dtype, *sizes, count, component, "backward", rule)

    # The embedding's output was summed in the forward; its gradient is, once, on the way out.
    yield call(
        "all_reduce",
        hidden,
        run.num_micro_batches,
        "activation",
        "torchtitan/protocols/module.py:Module._apply_local_map",
    )
    for width, uses, for_weight, for_input in _products(run):
        inner, weight = local_tokens(run) * width, m.hidden_size * width
        if for_weight == "gather":
            yield call("all_gather", inner, layers, "activation", _COST)
            yield call(
                "reduce_scatter",
                weight,
                layers,
                "weight gradient",
                "torch/distributed/fsdp/_fully_shard/_fsdp_param.py:FSDPParam._get_grad_inner_tensor",
            )
        else:
            yield call("all_reduce", hidden, layers, "activation", _COST)
        if for_input == "gather":
            yield call("all_gather", weight, layers, "weight", _COST)
            yield call("reduce_scatter", inner, uses * layers, "activation", _COST)
        else:
            yield call("all_reduce", hidden, layers, "activation", _COST)
