"""How torchtitan 0.3.0 lays a Llama model out: which rank holds which part of which parameter, in which FSDP unit, on
which mesh.

Sources: `torchtitan/models/llama3/sharding.py` (tensor parallel),
`torchtitan/distributed/fsdp.py:apply_fsdp_to_decoder` (units),
`torch/distributed/fsdp/_fully_shard/_fsdp_param.py` (shards and their padding),
`torchtitan/distributed/parallel_dims.py` (meshes).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from train_ledger.spec.groups import Group, groups_along
from train_ledger.spec.groups import coordinates as place_on_grid
from train_ledger.spec.run import Run

from .torchtitan_stages import held

#: hidden_size, query_size, kv_size, ffn_hidden_size, vocab_size, tie_embeddings, head_dim if qk_norm else 0
_Sizes = tuple[int, int, int, int, int, bool, int]
#: Of a stage: how many layers it has, whether it has the embedding, whether norm and head.
_Part = tuple[int, bool, bool]


@dataclass(frozen=True)
class Parameter:
    """A parameter in its whole shape. `tensor_parallel_dim` is the dimension that tensor parallelism splits, None if
    it does not.
    """

    name: str
    shape: tuple[int, ...]
    tensor_parallel_dim: int | None

    def local_shape(self, tensor_parallel: int, tp_rank: int) -> tuple[int, ...]:
        """Shape on one tensor-parallel rank: `torch.chunk`, so the last ranks may hold less."""
        dim = self.tensor_parallel_dim
        if dim is None:
            return self.shape
        return (*self.shape[:dim], _chunk(self.shape[dim], tensor_parallel, tp_rank), *self.shape[dim + 1 :])


@dataclass(frozen=True)
class Shard:
    """One rank's part of a parameter, elements: what it owns, and what its storage holds with the padding of dimension
    0.
    """

    parameter: Parameter
    whole_numel: int  # on this tensor-parallel rank, whole over data parallel
    owned_numel: int
    padded_numel: int


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP2 gathers and reduces together. `count` units are alike (the layers).

    `twins` share the storage of a tied parameter among `shards`, but FSDP2 does not know: it gathers and reduces them
    too.
    """

    name: str
    count: int
    shards: tuple[Shard, ...]
    twins: tuple[Shard, ...] = ()

    @property
    def gathered_numel(self) -> int:
        """Elements of this rank's input to the all-gather of one such unit, padding included."""
        return sum(s.padded_numel for s in self.shards + self.twins)


@dataclass(frozen=True)
class Layout:
    """Everything of one rank's layout that memory and traffic depend on. Equal for ranks that keep and send the
    same. `stages` has the units of each pipeline stage that the rank holds; without pipeline there is one.
    """

    stages: tuple[tuple[Unit, ...], ...]

    @property
    def units(self) -> tuple[Unit, ...]:
        """Of all stages."""
        return tuple(unit for stage in self.stages for unit in stage)

    @property
    def num_layers(self) -> int:
        """Layers on this rank."""
        return sum(unit.count for unit in self.units if unit.name == "layers")

    @property
    def num_parameters(self) -> int:
        """Tensors, tied ones once."""
        return sum(unit.count * len(unit.shards) for unit in self.units)


def mesh_sizes(run: Run) -> dict[str, int]:
    """torchtitan's mesh, fastest dimension first. `parallel_dims.py:build_mesh` unflattens (pp, dp_replicate,
    dp_shard, cp, tp).
    """
    p = run.parallel
    return {
        "tp": p.tensor_parallel,
        "cp": p.context_parallel,
        "dp_shard": p.data_parallel_shard,
        "dp_replicate": p.data_parallel_replicate,
        "pp": p.pipeline_parallel,
    }


def coordinates(run: Run, rank: int) -> dict[str, int]:
    """Place of `rank` on the mesh, slowest dimension first; `pp` only where there are pipeline stages, `cp` where
    sequences are split.
    """
    p = run.parallel
    hidden = {name for name, degree in (("pp", p.pipeline_parallel), ("cp", p.context_parallel)) if degree == 1}
    place = place_on_grid(rank, mesh_sizes(run))
    return {name: place[name] for name in reversed(place) if name not in hidden}


def pp_rank(run: Run, rank: int) -> int:
    """Pipeline rank, the slowest dimension of the mesh."""
    return rank // (run.world_size // run.parallel.pipeline_parallel)


def shards(run: Run) -> int:
    """Ranks that FSDP shards over: those that share out the data and those that share out the sequence."""
    return run.parallel.data_parallel_shard * run.parallel.context_parallel


def local_tokens(run: Run) -> int:
    """Tokens of a micro-batch on one context-parallel rank (`context_parallel/api.py:cp_shard`)."""
    return run.micro_batch * run.seq_length // run.parallel.context_parallel


def shard_axis(run: Run) -> str:
    """Name of the mesh axis that FSDP shards over: `fsdp` under partial_dtensor (`parallel_dims.py:build_mesh`), else
    `dp_shard`, with context parallelism flattened with it (`_fsdp_init.py:_get_mesh_info_from_named_dims`).
    """
    if run.settings["spmd_backend"] == "partial_dtensor":
        return "fsdp"
    return "dp_shard_cp" if run.parallel.context_parallel > 1 else "dp_shard"


def groups(run: Run) -> list[Group]:
    """Every group of more than one rank: the world, then torchtitan's one-dimensional meshes by their names.

    `batch` and `dp` hold the same ranks, and `loss` too without context parallelism; torchtitan makes a group for each
    (`parallel_dims.py:build_mesh`).
    """
    sizes = mesh_sizes(run)
    both, sharded = ("dp_shard", "dp_replicate"), ("cp", "dp_shard")
    named = [("pp", ("pp",)), ("batch", both), ("loss", ("cp", *both)), ("dp_replicate", both[1:])]
    named += [("cp", ("cp",)), ("tp", ("tp",))]
    if run.settings["spmd_backend"] == "spmd_types":
        named.append(("dp", both))
    if shard_axis(run) == "dp_shard_cp":
        named.append(("dp_shard", both[:1]))
    named.append((shard_axis(run), sharded))
    out = [Group("world", tuple(range(run.world_size)))]
    for name, dims in named:
        if math.prod(sizes[d] for d in dims) > 1:
            out += [Group(name, ranks) for ranks in groups_along(sizes, dims)]
    return out


def layout(run: Run, rank: int) -> Layout:
    """The layout of one rank."""
    # models/common/decoder.py ties lm_head and embedding, then protocols/module.py:Module.parallelize registers new
    # parameters in both, then init_states ties them again, too late for fully_shard. partial_dtensor parallelizes only
    # with tensor parallelism (models/llama3/parallelize.py), so without it the tie holds.
    untied = run.settings["spmd_backend"] != "partial_dtensor" or run.parallel.tensor_parallel > 1
    return _layout(_sizes(run), _parts(run, rank), *_degrees(run, rank), untied)


def _parts(run: Run, rank: int) -> tuple[_Part, ...]:
    return tuple((len(stage.layers), stage.embedding, stage.end) for stage in held(run, pp_rank(run, rank)))


def _sizes(run: Run) -> _Sizes:
    m = run.model
    normed = m.head_dim if m.qk_norm else 0
    return (
        m.hidden_size,
        m.query_size,
        m.kv_size,
        m.ffn_hidden_size,
        m.vocab_size,
        m.tie_embeddings,
        normed,
    )


def _degrees(run: Run, rank: int) -> tuple[int, int, int, int]:
    tp = run.parallel.tensor_parallel
    return tp, shards(run), rank % tp, rank // tp % shards(run)


@functools.lru_cache(maxsize=4096)
def _layout(
    sizes: _Sizes, parts: tuple[_Part, ...], tensor_parallel: int, fsdp: int, tp: int, shard: int, twins: bool
) -> Layout:
    hidden, query, kv, ffn, vocab, tied, normed = sizes
    embedding = Parameter("tok_embeddings.weight", (vocab, hidden), 0)
    norm = Parameter("norm.weight", (hidden,), None)
    head = Parameter("lm_head.weight", (vocab, hidden), 0)
    block = (
        Parameter("attention.qkv_linear.wqkv.weight", (query + 2 * kv, hidden), 0),
        Parameter("attention.wo.weight", (hidden, query), 1),
        Parameter("feed_forward.w1.weight", (ffn, hidden), 0),
        Parameter("feed_forward.w2.weight", (hidden, ffn), 1),
        Parameter("feed_forward.w3.weight", (ffn, hidden), 0),
        Parameter("attention_norm.weight", (hidden,), None),
        Parameter("ffn_norm.weight", (hidden,), None),
        *(Parameter(f"attention.{which}_norm.weight", (normed,), None) for which in "qk" if normed),
    )

    def cut(*parameters: Parameter) -> tuple[Shard, ...]:
        return tuple(_shard(q, tensor_parallel, fsdp, tp, shard) for q in parameters)

    # fsdp.py:apply_fsdp_to_decoder: tied, the embedding, the norm and the head are one unit; else the embedding is its
    # own.
    if tied:
        middle = Unit("layers", parts[0][0], cut(*block))
        return Layout(((middle, Unit("last", 1, cut(embedding, norm), cut(head) if twins else ())),))
    stages = []
    for layers, first, last in parts:
        units = [Unit("tok_embeddings", 1, cut(embedding))] if first else []
        units += [Unit("layers", layers, cut(*block))] if layers else []
        units += [Unit("last", 1, cut(norm, head))] if last else []
        stages.append(tuple(units))
    return Layout(tuple(stages))


def _shard(parameter: Parameter, tensor_parallel: int, fsdp: int, tp: int, shard: int) -> Shard:
    """`_fsdp_param.py:_init_sharded_param` chunks dimension 0 and pads every shard to the size of the first."""
    shape = parameter.local_shape(tensor_parallel, tp)
    row = math.prod(shape[1:])
    return Shard(parameter, shape[0] * row, _chunk(shape[0], fsdp, shard) * row, _chunk(shape[0], fsdp, 0) * row)


def _chunk(size: int, parts: int, part: int) -> int:
    """Length of one part of `torch.chunk`, with parts beyond the end empty (`_fsdp_common.py:_chunk_with_empty`)."""
    length = -(-size // parts)
    return max(0, min(length, size - part * length))


def layout_class(run: Run, rank: int) -> tuple[int, ...]:
    """Ranks of equal class hold equal parts. Only pipeline stages and the sizes of the last, smaller chunks tell ranks
    apart, never replicas.
    """
    return pp_rank(run, rank), *_layout_class(_sizes(run), *_degrees(run, rank))


@functools.lru_cache(maxsize=65536)
def _layout_class(sizes: _Sizes, tensor_parallel: int, fsdp: int, tp: int, shard: int) -> tuple[int, ...]:
    hidden, query, kv, ffn, vocab, _, normed = sizes
    rows = [_chunk(n, tensor_parallel, tp) for n in (query + 2 * kv, ffn, vocab)]
    return (*rows, *(_chunk(n, fsdp, shard) for n in (*rows, hidden, normed)), _chunk(query, tensor_parallel, tp))
