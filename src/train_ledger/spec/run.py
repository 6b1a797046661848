"""One run: a model, a layout, a framework with its settings, and how it is launched. Resolved.

Every default is filled in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .errors import ConfigError
from .model import ModelShape, canonical_tensors


@dataclass(frozen=True)
class Parallel:
    """Degrees of the layout. `data_parallel` is the total; torchtitan splits it into replicate x shard (HSDP)."""

    tensor_parallel: int = 1
    sequence_parallel: bool = False
    pipeline_parallel: int = 1
    virtual_pipeline_parallel: int = 1  # model chunks a pipeline rank holds (interleaved 1F1B when > 1)
    context_parallel: int = 1
    data_parallel: int = 1
    data_parallel_replicate: int = 1
    data_parallel_shard: int = 1


@dataclass(frozen=True)
class Optimizer:
    """AdamW as every framework here runs it, and the clipping and schedule around it."""

    lr: float = 3e-4
    min_lr: float = 3e-5
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_grad: float = 1.0  # 0 turns clipping off
    lr_warmup_steps: int = 0
    decay_norms: bool = True  # false: no decay on norms and biases, in every framework alike


@dataclass(frozen=True)
class Probe:
    """What is read besides step boundaries.

    The steps (from 1) whose calls are recorded, and the weight whose life is followed.
    """

    collective_steps: tuple[int, ...] = ()
    lifeline_weight: str = ""


@dataclass(frozen=True)
class Run:
    """A resolved run. `settings` holds the framework's own keys, named as that framework names them.

    `micro_batch` and `global_batch` are sequences; `seq_length` is tokens; `steps` are optimizer steps.
    """

    name: str
    framework: str
    model: ModelShape
    world: str  # cpu | fake | shared | nccl
    world_size: int
    parallel: Parallel
    seq_length: int
    micro_batch: int
    global_batch: int
    steps: int
    seed: int
    optimizer: Optimizer
    probe: Probe
    settings: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""  # the file it came from, for error messages only

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step on one data-parallel replica (= gradient accumulation steps)."""
        return self.global_batch // (self.micro_batch * self.parallel.data_parallel)

    def to_dict(self) -> dict[str, Any]:
        """Plain data. `Run.from_dict(run.to_dict()) == run` up to `source`."""
        out = asdict(self)
        out.pop("source")
        out["probe"]["collective_steps"] = list(self.probe.collective_steps)
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "") -> Run:
        """The inverse of `to_dict`, for the stages that get a resolved run."""
        probe = Probe(tuple(data["probe"]["collective_steps"]), data["probe"]["lifeline_weight"])
        return cls(
            **{
                **data,
                "model": ModelShape(**data["model"]),
                "parallel": Parallel(**data["parallel"]),
                "optimizer": Optimizer(**data["optimizer"]),
                "probe": probe,
                "source": source,
            }
        )

    def sha256(self) -> str:
        """Identity of the run: hash of the canonical JSON of everything that it is made from."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_layout(run: Run) -> None:
    """Refuse a layout that no framework could run. A framework's own limits are in its `predict` module's `check`.

    Raises:
        ConfigError: names the key and says why.
    """

    def refuse(key: str, why: str) -> None:
        raise ConfigError(why, file=run.source or None, key=key)

    p, m = run.parallel, run.model
    product = p.tensor_parallel * p.context_parallel * p.pipeline_parallel * p.data_parallel
    if product != run.world_size:
        refuse(
            "world_size",
            f"is {run.world_size}, but tensor {p.tensor_parallel} x context {p.context_parallel} x pipeline "
            f"{p.pipeline_parallel} x data {p.data_parallel} = {product}",
        )
    if m.num_attention_heads % m.num_query_groups:
        refuse(
            "model.num_query_groups",
            f"{m.num_attention_heads} attention heads do not divide into {m.num_query_groups} query groups",
        )
    if p.tensor_parallel > 1:
        split = {"num_attention_heads": m.num_attention_heads}
        if run.framework != "torchtitan":  # its shards need not be equal
            split["ffn_hidden_size"] = m.ffn_hidden_size
        for key, value in split.items():
            if value % p.tensor_parallel:
                refuse("parallel.tensor_parallel", f"{p.tensor_parallel} does not divide the model's {key} = {value}")
        if p.sequence_parallel and run.seq_length % p.tensor_parallel:
            refuse(
                "parallel.sequence_parallel",
                f"seq_length {run.seq_length} does not divide by tensor_parallel {p.tensor_parallel}",
            )
    if p.virtual_pipeline_parallel > 1 and p.pipeline_parallel == 1:
        refuse("parallel.virtual_pipeline_parallel", "model chunks need pipeline_parallel of 2 or more")
    per_step = run.micro_batch * p.data_parallel
    if run.global_batch % per_step:
        refuse(
            "global_batch",
            f"{run.global_batch} sequences do not divide into micro_batch {run.micro_batch} x data parallel "
            f"{p.data_parallel} = {per_step}",
        )
    if m.position_embedding == "learned" and run.seq_length > m.max_position_embeddings:
        refuse("seq_length", f"{run.seq_length} is longer than max_position_embeddings {m.max_position_embeddings}")
    late = [s for s in run.probe.collective_steps if s > run.steps]
    if late:
        refuse("probe.collective_steps", f"{late} come after the last step, {run.steps}")
    weight = run.probe.lifeline_weight
    if weight and weight not in {tensor.name for tensor in canonical_tensors(m)}:
        refuse(
            "probe.lifeline_weight",
            f"the model has no weight {weight[:120]!r}; names are Hugging Face Llama's, as model.norm.weight or "
            f"model.layers.N.self_attn.o_proj.weight with N from 0 to {m.num_layers - 1}; '' follows none",
        )
