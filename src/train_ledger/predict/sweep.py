"""Many layouts at once, first order: which of them fit a device, and which of those send least. Needs NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from train_ledger.predict.first_order import Layout, StateBytes, terms
from train_ledger.spec.errors import ConfigError
from train_ledger.spec.model import ModelShape

#: The degrees that are tried unless the caller says otherwise; those that cannot be are dropped.
DEGREES: dict[str, tuple[int, ...]] = {
    "tensor_parallel": (1, 2, 4, 8),
    "pipeline_parallel": (1, 2, 4, 6, 8, 12, 16),
    "context_parallel": (1, 2, 4, 8),
    "replicate": (1, 2, 4, 8),
    "zero_stage": (0, 1, 2, 3),
    "micro_batch": (1, 2, 4, 8),
}


@dataclass(frozen=True)
class Grid:
    """Layouts as columns: the fields of `Layout`, each an array with one entry a layout."""

    world_size: Any
    columns: dict[str, Any]

    def __len__(self) -> int:
        return len(self.world_size)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["columns"][name]
        except KeyError:
            raise AttributeError(name) from None

    def layout(self, i: int) -> Layout:
        """The layout in row `i`."""
        return Layout(**{f.name: self.columns[f.name][i].item() for f in fields(Layout)})


@dataclass(frozen=True)
class Swept:
    """What `place` says of every row of the grid, and the rows from best to worst."""

    grid: Grid
    numel: Any
    state_bytes: Any
    wire_bytes: Any
    fits: Any
    order: Any


def grid(
    model: ModelShape,
    world_sizes: Sequence[int],
    global_batch: int,
    *,
    seq_length: int | None = None,
    degrees: dict[str, Sequence[int]] | None = None,
) -> Grid:
    """Every layout of `degrees` that the model, the world and the batch allow.

    Args:
        global_batch: sequences of one optimizer step.
        seq_length: tokens; None means the model's.
        degrees: goes before `DEGREES`, key by key.

    Raises:
        ConfigError: a degree below 1, a key that is not in `DEGREES`, or nothing is left.
    """
    chosen = {**DEGREES, **(degrees or {})}
    if set(chosen) != set(DEGREES):
        raise ConfigError(f"unknown degree {sorted(set(chosen) - set(DEGREES))[0]!r}", key="degrees")
    if min(map(min, [world_sizes, [global_batch], *(v for k, v in chosen.items() if k != "zero_stage")])) < 1:
        raise ConfigError("sizes and degrees must be 1 or more", key="degrees")
    axes = [np.asarray(v, dtype=np.int64) for v in (world_sizes, *chosen.values())]
    world, *columns = (a.ravel() for a in np.meshgrid(*axes, indexing="ij"))
    c = dict(zip(chosen, columns, strict=True))
    tp, pp, cp, copies, zero, mb = c.values()
    model_ranks = tp * pp * cp
    data = world // model_ranks
    seq = seq_length or model.seq_length
    per_micro = mb * np.maximum(data, 1)
    ok = (
        (world % model_ranks == 0)
        & (data >= 1)
        & (data % copies == 0)
        & (model.num_attention_heads % tp == 0)
        & (model.ffn_hidden_size % tp == 0)
        & (pp <= model.num_layers)
        & (seq % (tp * cp) == 0)
        & (global_batch % per_micro == 0)
        # Copies of a shard group are FSDP's (HSDP); ZeRO-2 and 3 need the whole model on a rank's own stage.
        & ((copies == 1) | (zero == 3))
        & ((zero < 2) | (pp == 1))
    )
    if not ok.any():
        raise ConfigError("no layout of these degrees fits the model, the world size and the global batch")
    c = {name: column[ok] for name, column in c.items()}
    world, data, per_micro = world[ok], data[ok], per_micro[ok]
    n = len(world)
    c |= {
        "sequence_parallel": np.ones(n, dtype=bool),
        "shard": data // c["replicate"] * c["context_parallel"],
        "num_micro_batches": global_batch // per_micro,
        "seq_length": np.full(n, seq, dtype=np.int64),
        "gathers": np.full(n, 2, dtype=np.int64),
        "tp_all_gathers": np.full(n, 6, dtype=np.int64),
        "tp_reduce_scatters": np.full(n, 4, dtype=np.int64),
    }
    return Grid(world, c)


def sweep(st: StateBytes, layouts: Grid, device_bytes: int, *, keep_free_bytes: int = 0) -> Swept:
    """State and traffic of every layout, and an order: those that fit first, fewest GPUs, then fewest bytes sent.

    Args:
        st: from `first_order.state_bytes`.
        device_bytes: memory of one device.
        keep_free_bytes: what must be left for activations, workspaces and buffers; the first order knows none of them.

    Raises:
        ConfigError: numbers too large for 64 bits.
    """
    # The largest products, in floating point, row by row.
    m, data = layouts.num_micro_batches.astype(float), layouts.shard.astype(float) * layouts.replicate
    activations = m * layouts.micro_batch * layouts.seq_length * (8.0 * 2 * st.sizes.hidden_size * st.sizes.num_layers)
    z, tp = st.sizes, layouts.tensor_parallel
    rank_numel = 2.0 * st.numel / (tp * layouts.pipeline_parallel) + (z.embedding + z.head_if_split) / tp
    rank_numel = rank_numel + 1.0 * z.num_layers * z.layer_whole
    if max((8.0 * rank_numel * np.maximum(m, data)).max(), activations.max()) >= 2.0**62:
        raise ConfigError("the model and the batch are too large for a sweep in 64-bit numbers", key="global_batch")
    numel, params, grads, optim, wire = terms(st.sizes, st.precision, st.moments, layouts)
    state = params + grads + optim
    sent = sum(wire)
    fits = state + keep_free_bytes <= device_bytes
    order = np.lexsort((state, sent, layouts.world_size, ~fits))
    return Swept(layouts, numel, state, sent, fits, order)
