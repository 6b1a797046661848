"""First order, in closed form: what one GPU of a layout keeps and sends, without padding, buckets, buffers or scalars.

For sizing and for sweeps. The formulas are written without branches, so that the same lines serve one layout (integers)
and a hundred thousand (NumPy arrays, `predict.sweep`). The exact prediction is `train_ledger.predict.predict`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from train_ledger.spec.errors import ConfigError
from train_ledger.spec.model import ModelShape
from train_ledger.spec.run import Run
from train_ledger.spec.units import fmt

__all__ = ["PRECISIONS", "Layout", "Placement", "StateBytes", "fmt", "place", "report", "state_bytes"]


class Precision(NamedTuple):
    """Bytes an element: kept parameter, kept gradient, separate fp32 master, and what is gathered and reduced."""

    param: int
    grad: int
    main: int
    gathered: int
    reduced: int


#: The published sums are 16 (ZeRO paper, section 3.1), 18 (Megatron's docs, distributed optimizer) and 16 (FSDP2).
PRECISIONS: dict[str, Precision] = {
    "bf16": Precision(param=2, grad=2, main=4, gathered=2, reduced=2),
    "bf16-fp32-grad": Precision(param=2, grad=4, main=4, gathered=2, reduced=4),
    "fp32-mixed": Precision(param=4, grad=4, main=0, gathered=2, reduced=4),
    "fp32": Precision(param=4, grad=4, main=0, gathered=4, reduced=4),
}

#: Bytes of optimizer state an element, beside the master: Adam keeps two fp32 moments, momentum SGD one.
MOMENT_BYTES = {"adam": 8, "adamw": 8, "sgd-momentum": 4, "sgd": 0}


class Sizes(NamedTuple):
    """Elements of a model by what divides them: `layer_split` by tensor parallel, `layer_whole` (norms) by nothing."""

    num_layers: int
    hidden_size: int
    kv_size: int
    layer_split: int
    layer_whole: int
    embedding: int
    head: int
    head_if_split: int  # a tied head is a second copy of the embedding where the last stage is not the first
    final_norm: int


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Model state of one whole copy, before anything is divided. `numel` counts elements, tied ones once."""

    numel: int
    precision: Precision
    moments: int
    sizes: Sizes

    @property
    def params_bytes(self) -> int:
        """Bytes of the parameters as they are kept."""
        return self.numel * self.precision.param

    @property
    def grads_bytes(self) -> int:
        """Bytes of the gradients as they are kept."""
        return self.numel * self.precision.grad

    @property
    def optim_bytes(self) -> int:
        """Bytes of the fp32 master (where it is a separate copy) and of the moments."""
        return self.numel * (self.precision.main + self.moments)

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.params_bytes + self.grads_bytes + self.optim_bytes


def state_bytes(model: ModelShape, precision: str = "bf16", optimizer: str = "adam") -> StateBytes:
    """Bytes of model state of one whole copy of `model`.

    Args:
        model: the shape.
        precision: a key of `PRECISIONS`: `bf16` (bf16 parameters and gradients, fp32 master), `bf16-fp32-grad` (fp32
            gradients too), `fp32-mixed` (fp32 shards that are gathered in bf16), `fp32`.
        optimizer: a key of `MOMENT_BYTES`.

    Raises:
        ConfigError: a precision or an optimizer of another name.
    """
    for key, value, known in (("precision", precision, PRECISIONS), ("optimizer", optimizer, MOMENT_BYTES)):
        if value not in known:
            raise ConfigError(f"{value!r} is not one of {', '.join(known)}", key=key)
    h, q, kv, f = model.hidden_size, model.query_size, model.kv_size, model.ffn_hidden_size
    norm = 2 if model.normalization == "layernorm" else 1
    wide = 2 if model.gated_mlp else 1
    sizes = Sizes(
        num_layers=model.num_layers,
        hidden_size=h,
        kv_size=kv,
        layer_split=h * (q + 2 * kv)
        + q * h
        + (wide + 1) * h * f
        + (q + 2 * kv) * model.qkv_bias
        + wide * f * model.mlp_bias,
        layer_whole=2 * norm * h
        + 2 * norm * model.head_dim * model.qk_norm
        + h * model.attention_output_bias
        + h * model.mlp_bias,
        embedding=(model.vocab_size + model.max_position_embeddings * (model.position_embedding == "learned")) * h,
        head=0 if model.tie_embeddings else model.vocab_size * h,
        head_if_split=model.vocab_size * h,
        final_norm=norm * h,
    )
    numel = sizes.num_layers * (sizes.layer_split + sizes.layer_whole) + sizes.embedding + sizes.head + sizes.final_norm
    return StateBytes(numel, PRECISIONS[precision], MOMENT_BYTES[optimizer], sizes)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is divided. `zero_stage`: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.

    `shard` is the number of ranks that ZeRO or FSDP divides over and `replicate` how many such copies there are; their
    product is data parallel times context parallel. `gathers` counts the all-gathers of a parameter in one micro-batch
    at stage 3 (2: forward and backward; 1 where it is not sharded again after the forward). The two `tp_*` are calls a
    layer and micro-batch: Megatron 6 and 4, since a column-parallel layer gathers its input again in backward
    (`core/tensor_parallel/layers.py:LinearWithGradAccumulationAndAsyncCommunication`).
    """

    tensor_parallel: int = 1
    sequence_parallel: bool = True
    pipeline_parallel: int = 1
    context_parallel: int = 1
    shard: int = 1
    replicate: int = 1
    zero_stage: int = 1
    micro_batch: int = 1
    num_micro_batches: int = 1
    seq_length: int = 8192
    gathers: int = 2
    tp_all_gathers: int = 6
    tp_reduce_scatters: int = 4

    @classmethod
    def of(cls, run: Run) -> Layout:
        """The layout of a resolved run."""
        p = run.parallel
        own = cls(
            tensor_parallel=p.tensor_parallel,
            sequence_parallel=p.sequence_parallel,
            pipeline_parallel=p.pipeline_parallel,
            context_parallel=p.context_parallel,
            shard=p.data_parallel * p.context_parallel,
            micro_batch=run.micro_batch,
            num_micro_batches=run.num_micro_batches,
            seq_length=run.seq_length,
        )
        if run.framework == "megatron":
            return replace(own, zero_stage=int(run.settings["use_distributed_optimizer"]))
        if run.framework == "deepspeed":
            return replace(own, zero_stage=run.settings["zero_optimization"]["stage"])
        reshard, recompute = run.settings["fsdp_reshard_after_forward"], run.settings["activation_checkpoint"] != "none"
        keeps = reshard == "never" or (reshard == "default" and p.pipeline_parallel > 1)
        return replace(
            own,
            shard=p.data_parallel_shard * p.context_parallel,
            replicate=p.data_parallel_replicate,
            zero_stage=3,
            gathers=1 if keeps else 2,
            tp_all_gathers=6 if recompute else 4,
            tp_reduce_scatters=6 if recompute else 4,
        )


def precision_of(run: Run) -> str:
    """The key of `PRECISIONS` that a run's settings amount to."""
    if run.framework == "torchtitan":
        return "fp32-mixed" if run.settings["mixed_precision_param"] == "bfloat16" else "fp32"
    if run.framework == "megatron":
        return "bf16-fp32-grad" if run.settings["grad_reduce_in_fp32"] else "bf16"
    kept = run.settings["data_types"].get("grad_accum_dtype")
    return "bf16-fp32-grad" if kept == "fp32" else "bf16"


class PerGpu(NamedTuple):
    """Resident model state of the GPU that keeps most, bytes."""

    params_bytes: int
    grads_bytes: int
    optim_bytes: int

    @property
    def total_bytes(self) -> int:
        """All three."""
        return self.params_bytes + self.grads_bytes + self.optim_bytes


class Traffic(NamedTuple):
    """One kind of call in one step: along which parallel dimension, and what this GPU puts on the wire, bytes."""

    dimension: str
    op: str
    wire_bytes: int


_ROWS = (
    ("dp", "all_gather"),
    ("dp", "reduce_scatter"),
    ("dp", "all_reduce"),
    ("tp", "all_gather"),
    ("tp", "reduce_scatter"),
    ("tp", "all_reduce"),
    ("cp", "send"),
    ("pp", "send"),
)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model's state lies under a layout, and what a step sends."""

    layout: Layout
    numel: int
    per_gpu: PerGpu
    wire: tuple[int, ...]  # in the order of _ROWS

    @property
    def traffic(self) -> list[Traffic]:
        """The calls that carry bytes."""
        return [Traffic(*row, w) for row, w in zip(_ROWS, self.wire, strict=True) if w]

    def by_kind(self) -> dict[str, int]:
        """Bytes on the wire of one step and GPU by kind of call."""
        out: dict[str, int] = {}
        for t in self.traffic:
            out[t.op] = out.get(t.op, 0) + t.wire_bytes
        return out

    def by_dimension(self) -> dict[str, int]:
        """Bytes on the wire of one step and GPU by parallel dimension."""
        out: dict[str, int] = {}
        for t in self.traffic:
            out[t.dimension] = out.get(t.dimension, 0) + t.wire_bytes
        return out


def terms(sizes: Sizes, b: Precision, moments: int, lay: Any) -> tuple[Any, Any, Any, Any, tuple[Any, ...]]:
    """The formulas. Every field of `lay` (a `Layout`, or the like with arrays) may be an integer or an array of them.

    Returns:
        Elements on the heaviest stage; bytes of parameters, gradients and optimizer state; wire bytes by `_ROWS`.
    """
    tp, pp, cp, d, r, zero = (
        lay.tensor_parallel,
        lay.pipeline_parallel,
        lay.context_parallel,
        lay.shard,
        lay.replicate,
        lay.zero_stage,
    )
    layers = -(-sizes.num_layers // pp)
    split = 1 * (pp > 1)  # an integer: NumPy adds two truths to one truth
    head = sizes.head + (sizes.head_if_split - sizes.head) * split
    first = -(-sizes.embedding // tp)
    last = -(-head // tp) + sizes.final_norm
    ends = first + last - split * (last + (first - last) * (last > first))  # one stage has both; else the larger end
    numel = layers * (-(-sizes.layer_split // tp) + sizes.layer_whole) + ends

    # ZeRO, Rajbhandari et al. 2020, section 5: each stage divides one more kind of state by the sharding degree.
    params = -(-b.param * numel // (1 + (d - 1) * (zero >= 3)))
    grads = -(-b.grad * numel // (1 + (d - 1) * (zero >= 2)))
    optim = -(-(b.main + moments) * numel // (1 + (d - 1) * (zero >= 1)))

    # A ring over n ranks moves (n - 1) / n of the payload, an all-reduce twice that.
    m = lay.num_micro_batches
    gathered = (zero >= 3) * lay.gathers * m + (zero == 1) + (zero == 2)
    reduced = (zero == 1) + (zero >= 2) * m
    dp_gather = gathered * (b.gathered * numel * (d - 1) // d)
    dp_scatter = reduced * (b.reduced * numel * (d - 1) // d)
    # Without ZeRO an all-reduce over all replicas; with HSDP (zero 3) one of each shard over the copies.
    dp_reduce = 2 * (zero == 0) * b.reduced * numel * (d * r - 1) // (d * r)
    # FSDP2 reduces over the copies after each scatter (_fsdp_collectives.py:foreach_reduce), so in every micro-batch.
    dp_reduce = dp_reduce + 2 * reduced * (b.reduced * numel * (r - 1) // (d * r))

    act = lay.seq_length // cp * lay.micro_batch * sizes.hidden_size * 2  # one bf16 activation of this GPU's tokens
    sp = lay.sequence_parallel * (tp > 1)
    part = act * (tp - 1) // tp
    tp_gather = sp * m * layers * lay.tp_all_gathers * part
    tp_scatter = sp * m * layers * lay.tp_reduce_scatters * part
    tp_reduce = (1 - sp) * m * layers * 4 * 2 * part
    # Ring attention: keys and values go round once in forward; in backward they go round again with their gradients.
    kv = lay.seq_length // cp * lay.micro_batch * (-(-2 * sizes.kv_size // tp)) * 2
    cp_send = m * layers * 3 * kv * (cp - 1)
    # A middle stage sends activations on and gradients back; of two stages each does one of them.
    pp_send = m * (split + (pp > 2)) * (act // (1 + (tp - 1) * sp))
    return (
        numel,
        params,
        grads,
        optim,
        (dp_gather, dp_scatter, dp_reduce, tp_gather, tp_scatter, tp_reduce, cp_send, pp_send),
    )


def place(model: ModelShape, st: StateBytes, cfg: Layout | Run) -> Placement:
    """Model state and traffic of the GPU that keeps most, under the layout `cfg`.

    Args:
        model: the shape that `st` was made from.
        st: from `state_bytes`.
        cfg: a layout, or a run whose layout is taken.

    Returns:
        `.per_gpu.params_bytes`, `.grads_bytes`, `.optim_bytes` (bytes), `.by_kind()` (wire bytes of one step).
    """
    layout = cfg if isinstance(cfg, Layout) else Layout.of(cfg)
    numel, params, grads, optim, wire = terms(st.sizes, st.precision, st.moments, layout)
    return Placement(layout, numel, PerGpu(params, grads, optim), wire)


def report(model: ModelShape, st: StateBytes, cfg: Layout | Run) -> str:
    """A few lines for a person: state of one GPU and traffic of one step. GB is 10^9 bytes."""
    placed = place(model, st, cfg)
    lay, g = placed.layout, placed.per_gpu
    degrees = f"TP {lay.tensor_parallel}  PP {lay.pipeline_parallel}  CP {lay.context_parallel}"
    lines = [
        f"{model.name}: {st.numel:,} parameters, {st.total_bytes / st.numel:g} B each; "
        f"{degrees}  shard {lay.shard}  replicate {lay.replicate}  ZeRO {lay.zero_stage}",
        f"  per GPU  parameters {fmt(g.params_bytes)}  gradients {fmt(g.grads_bytes)}  "
        f"optimizer {fmt(g.optim_bytes)}  total {fmt(g.total_bytes)}  ({placed.numel:,} elements)",
    ]
    lines += [f"  per step {t.dimension} {t.op:15} {fmt(t.wire_bytes)} sent" for t in placed.traffic]
    return "\n".join(lines)
