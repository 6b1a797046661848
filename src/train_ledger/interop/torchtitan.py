"""torchtitan's `Trainer.Config` (0.3.0) as a run. Reading one imports the module that makes it, and so torchtitan."""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

from train_ledger.spec.errors import ConfigError

from . import Native
from .lists import ignored

IGNORED = ignored("torchtitan")

#: Fields that a run file holds, by its key.
READ: dict[str, str] = {
    "training.local_batch_size": "micro_batch",
    "training.seq_len": "seq_length",
    "training.steps": "steps",
    "training.max_norm": "optimizer.clip_grad",
    "training.mixed_precision_param": "torchtitan.mixed_precision_param",
    "training.mixed_precision_reduce": "torchtitan.mixed_precision_reduce",
    "parallelism.data_parallel_replicate_degree": "parallel.data_parallel_replicate",
    "parallelism.data_parallel_shard_degree": "parallel.data_parallel_shard",
    "parallelism.fsdp_reshard_after_forward": "torchtitan.fsdp_reshard_after_forward",
    "parallelism.tensor_parallel_degree": "parallel.tensor_parallel",
    "parallelism.enable_sequence_parallel": "parallel.sequence_parallel",
    "parallelism.spmd_backend": "torchtitan.spmd_backend",
    "parallelism.pipeline_parallel_degree": "parallel.pipeline_parallel",
    "parallelism.context_parallel_degree": "parallel.context_parallel",
    "metrics.log_freq": "torchtitan.log_freq",
    "debug.seed": "seed",
}
#: Fields of pipeline parallelism, by the key of a run file. Without stages torchtitan reads none of them.
PIPELINE: dict[str, str] = {
    "parallelism.pipeline_parallel_microbatch_size": "micro_batch",
    "parallelism.pipeline_parallel_schedule": "torchtitan.pipeline_parallel_schedule",
    "parallelism.pipeline_parallel_layers_per_stage": "torchtitan.pipeline_parallel_layers_per_stage",
    "parallelism.pipeline_parallel_first_stage_less_layers": "torchtitan.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers": "torchtitan.pipeline_parallel_last_stage_less_layers",
    "parallelism.module_fqns_per_model_part": "torchtitan.module_fqns_per_model_part",
}
SCHEDULE_FILE = "parallelism.pipeline_parallel_schedule_csv"
#: Read by hand below.
OTHER = frozenset(
    {
        "training.global_batch_size",
        "training.disable_cuda_graphs",
        "model_spec",
        "loss",
        "optimizer",
        "activation_checkpoint",
        "validator",
    }
)
CHECKPOINTING = {"NoneType": "none", "SelectiveAC.Config": "selective", "FullAC.Config": "full"}
#: The models that are modelled, each with its rotary positions.
ROPE = {"Llama3Model.Config": "ComplexRoPE.Config", "Qwen3Model.Config": "CosSinRoPE.Config"}
#: Attention over a sequence that ranks split.
SPLIT_ATTENTION = "FlexAttention.Config"
GRAPH_NOTE = (
    "training.disable_cuda_graphs is not set: a captured graph keeps its pool of activations between steps; containers "
    "are predicted as without it"
)


def read_native(target: str, world_size: int, leave_out: set[str]) -> Native:
    """The run that `MODULE:FUNCTION` describes, for `world_size` ranks.

    Raises:
        ConfigError: the function cannot be imported or called, or returns something else; a field that is not modelled.
    """
    return Reader(target, load(target), world_size, leave_out).native()


def load(target: str) -> Any:
    """The `Trainer.Config` that `MODULE:FUNCTION` returns. The current folder is searched first, as torchrun does.

    Raises:
        ConfigError: names the target and the reason.
    """
    module_name, colon, function_name = target.partition(":")
    if not colon or not module_name or not function_name:
        raise ConfigError("is not MODULE:FUNCTION", file=target, key="--torchtitan")
    sys.path.insert(0, os.getcwd())
    try:
        config = getattr(importlib.import_module(module_name), function_name)()
    # The module is a person's own program: whatever it raises is about that program.
    except (Exception, SystemExit) as e:
        raise ConfigError(f"cannot be called: {type(e).__name__}: {e}", file=target, key="--torchtitan") from e
    finally:
        sys.path.remove(os.getcwd())
    if not dataclasses.is_dataclass(config) or not hasattr(config, "model_spec") or not hasattr(config, "parallelism"):
        raise ConfigError(f"returned a {type(config).__name__}, no Trainer.Config", file=target, key="--torchtitan")
    return config


class Reader:
    """One `Trainer.Config` on its way to a run."""

    def __init__(self, target: str, config: Any, world_size: int, leave_out: set[str]) -> None:
        self.target, self.config, self.world_size, self.leave_out = target, config, world_size, leave_out
        self.flat: dict[str, Any] = {}
        self.skipped: list[str] = []
        self.notes: list[str] = []

    def refuse(self, field: str, why: str) -> ConfigError:
        """An error about a field."""
        return ConfigError(why, file=self.target, key=field)

    def native(self) -> Native:
        """Everything read."""
        for name, value, default in self._fields():
            section = name.partition(".")[0]
            if name in PIPELINE or name == SCHEDULE_FILE:
                if self.config.parallelism.pipeline_parallel_degree == 1 and not _same(value, default):
                    self.skipped.append(name)
            elif name in READ:
                self.flat[READ[name]] = value
            elif {name, section} & self.leave_out or name in OTHER or section in OTHER or _same(value, default):
                continue
            elif {name, section} & IGNORED:
                self.skipped.append(name)
            else:
                raise self.refuse(name, "could change bytes or calls and is not modelled (--without leaves it out)")
        self._layout()
        if self.flat["parallel.pipeline_parallel"] > 1:
            self._pipeline()
        self._optimizer()
        self._loss()
        if not self.config.training.disable_cuda_graphs:
            self.notes.append(GRAPH_NOTE)
        if getattr(self.config.validator, "enable", False) and "validator" not in self.leave_out:
            raise self.refuse("validator.enable", "validation between steps is not modelled (--without validator)")
        kind = type(self.config.activation_checkpoint).__qualname__
        if kind not in CHECKPOINTING:
            raise self.refuse("activation_checkpoint", f"{kind} is not modelled; known: {', '.join(CHECKPOINTING)}")
        self.flat["torchtitan.activation_checkpoint"] = CHECKPOINTING[kind]
        data: dict[str, Any] = {"framework": "torchtitan", "world": "nccl", "world_size": self.world_size}
        for key, value in self.flat.items():
            head, dot, tail = key.partition(".")
            if dot:
                data.setdefault(head, {})[tail] = value
            else:
                data[head] = value
        called = {ours: theirs for theirs, ours in READ.items()}
        if self.flat["parallel.pipeline_parallel"] > 1:
            called |= {ours: theirs for theirs, ours in PIPELINE.items()}
            called["torchtitan.local_batch_size"] = "training.local_batch_size"
        return Native(data, self._model(), tuple(self.skipped), tuple(self.notes), called)

    def _fields(self) -> Iterator[tuple[str, Any, Any]]:
        """Name, value and default of every field of `Trainer.Config`, sections field by field where they are plain."""
        for field in dataclasses.fields(self.config):
            value = getattr(self.config, field.name)
            if field.name in ("training", "parallelism", "comm", "debug", "compile", "metrics"):
                for sub in dataclasses.fields(value):
                    yield f"{field.name}.{sub.name}", getattr(value, sub.name), _default(sub)
            else:
                yield field.name, value, _default(field)

    def _layout(self) -> None:
        flat = self.flat
        shard, replicate = flat["parallel.data_parallel_shard"], flat["parallel.data_parallel_replicate"]
        others = flat["parallel.tensor_parallel"] * flat["parallel.pipeline_parallel"]
        others *= flat["parallel.context_parallel"] * replicate
        if shard == -1:  # torchtitan/distributed/parallel_dims.py:_validate
            if others < 1 or self.world_size % others:
                raise self.refuse(
                    "parallelism.data_parallel_shard_degree", f"-1 of {self.world_size} ranks is no integer"
                )
            flat["parallel.data_parallel_shard"] = shard = self.world_size // others
        if flat["parallel.tensor_parallel"] == 1:
            flat["parallel.sequence_parallel"] = False
        if self.config.training.dtype != "float32":
            raise self.refuse("training.dtype", f"{self.config.training.dtype} is not modelled; known: float32")
        given = self.config.training.global_batch_size
        # trainer.py: -1 means no accumulation
        flat["global_batch"] = given if given != -1 else flat["micro_batch"] * shard * replicate
        if flat["seed"] is None:
            flat.pop("seed")
        if math.isinf(flat["optimizer.clip_grad"]):
            flat["optimizer.clip_grad"] = 0

    def _pipeline(self) -> None:
        """Stages, schedule and micro-batches; what a rank takes at once is then several micro-batches."""
        from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

        p, flat = self.config.parallelism, self.flat
        if p.pipeline_parallel_schedule_csv:
            raise self.refuse(SCHEDULE_FILE, "a schedule from a file is not modelled")
        flat["torchtitan.local_batch_size"] = flat["micro_batch"]
        for theirs, ours in PIPELINE.items():
            flat[ours] = getattr(p, theirs.partition(".")[2])
        key = "torchtitan.pipeline_parallel_schedule"
        try:
            schedule = get_schedule_class(flat[key])  # in any case of letters
        except ValueError as e:
            raise self.refuse("parallelism.pipeline_parallel_schedule", str(e)) from e
        flat[key] = schedule.__name__.removeprefix("Schedule")
        stages = p.pipeline_parallel_degree * (1 if issubclass(schedule, PipelineScheduleSingle) else 2)
        if p.module_fqns_per_model_part is not None:
            stages = len(p.module_fqns_per_model_part)
        elif p.pipeline_parallel_layers_per_stage is not None:  # pipeline_parallel.py:_get_pipeline_metadata
            layers = len(self.config.model_spec.model.layers) + p.pipeline_parallel_first_stage_less_layers
            layers += p.pipeline_parallel_last_stage_less_layers
            stages = -(-layers // max(1, p.pipeline_parallel_layers_per_stage))
        flat["parallel.virtual_pipeline_parallel"] = max(1, stages // p.pipeline_parallel_degree)

    def _optimizer(self) -> None:
        for field in dataclasses.fields(self.config.optimizer):
            value = getattr(self.config.optimizer, field.name)
            if field.name != "param_groups" and not _same(value, _default(field)):
                raise self.refuse(f"optimizer.{field.name}", "could change bytes or calls and is not modelled")
        groups = self.config.optimizer.param_groups
        if any(g.optimizer_name not in ("Adam", "AdamW") for g in groups):
            names = sorted({g.optimizer_name for g in groups})
            raise self.refuse("optimizer.param_groups", f"{', '.join(names)}: only Adam and AdamW are modelled")
        last = groups[-1].optimizer_kwargs
        decays = [g.optimizer_kwargs.get("weight_decay") for g in groups]
        for theirs in ("lr", "eps", "weight_decay"):
            if theirs in last:
                self.flat[f"optimizer.{theirs}"] = last[theirs]
        if "betas" in last:
            self.flat["optimizer.beta1"], self.flat["optimizer.beta2"] = last["betas"]
        if len(groups) > 1 and decays[0] == 0:
            self.flat["optimizer.decay_norms"] = False
        elif len(groups) > 1:
            raise self.refuse("optimizer.param_groups", "several groups are modelled only where the first has no decay")

    def _loss(self) -> None:
        loss = self.config.loss
        kind = type(loss).__qualname__
        chunked = kind == "ChunkedLossWrapper.Config"
        if not chunked and kind != "CrossEntropyLoss.Config":
            raise self.refuse("loss", f"{kind} is not modelled; known: ChunkedLossWrapper and CrossEntropyLoss")
        self.flat["torchtitan.chunked_loss"] = chunked
        if chunked:
            self.flat["torchtitan.num_chunks"] = loss.num_chunks

    def _model(self) -> dict[str, Any]:
        spec = self.config.model_spec
        model: Any = getattr(spec, "model", None)
        kind = type(model).__qualname__
        if kind not in ROPE:
            raise self.refuse("model_spec.model", f"{kind} is not modelled; known: {', '.join(ROPE)}")
        sizes = {self._layer(i, layer, ROPE[kind]) for i, layer in enumerate(model.layers)}
        if len(sizes) != 1:
            raise self.refuse("model_spec.model.layers", "layers of different sizes are not modelled")
        heads, groups, head_dim, ffn, eps, theta, scaling = sizes.pop()
        return {
            "num_layers": len(model.layers),
            "hidden_size": model.dim,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "head_dim": head_dim,
            "ffn_hidden_size": ffn,
            "vocab_size": model.vocab_size,
            "seq_length": self.flat["seq_length"],
            "norm_eps": eps,
            "rope_theta": theta,
            "rope_scaling": dict(scaling) if scaling else None,
            "tie_embeddings": model.enable_weight_tying,
            "qk_norm": kind == "Qwen3Model.Config",
        }

    def _layer(self, i: int, layer: Any, rope_kind: str) -> tuple[Any, ...]:
        at = f"model_spec.model.layers[{i}]"
        attention, feed_forward = layer.attention, layer.feed_forward
        if feed_forward is None:
            raise self.refuse(f"{at}.moe", "experts are not modelled")
        for field, part, known in (
            ("attention", attention, "GQAttention.Config"),
            ("attention.qkv_linear", attention.qkv_linear, "FusedQKVLinear.Config"),
            ("feed_forward", feed_forward, "FeedForward.Config"),
            ("attention.rope", attention.rope, rope_kind),
        ):
            if type(part).__qualname__ != known:
                raise self.refuse(f"{at}.{field}", f"{type(part).__qualname__} is not modelled; known: {known}")
        inner = type(attention.inner_attention).__qualname__
        if self.flat["parallel.context_parallel"] > 1 and inner != SPLIT_ATTENTION:
            # distributed/full_dtensor.py:validate_config; context_parallel/api.py:apply_cp_to_forward
            raise self.refuse(
                f"{at}.attention.inner_attention",
                f"{inner} is not modelled with context parallelism; known: {SPLIT_ATTENTION}",
            )
        if (attention.qk_norm is not None) != (rope_kind == ROPE["Qwen3Model.Config"]):
            raise self.refuse(f"{at}.attention.qk_norm", "is modelled in a Qwen 3, which has it, and in no Llama 3")
        heads = attention.n_heads
        rope = attention.rope
        if rope.scaling not in ("none", "llama"):
            raise self.refuse(f"{at}.attention.rope.scaling", f"{rope.scaling!r} is not modelled; known: none, llama")
        scaling = None
        if rope.scaling == "llama":
            scaling = (
                ("rope_type", "llama3"),
                ("factor", rope.scaling_factor),
                ("low_freq_factor", rope.low_freq_factor),
                ("high_freq_factor", rope.high_freq_factor),
                ("original_max_position_embeddings", rope.original_max_position_embeddings),
            )
        return (
            heads,
            attention.n_kv_heads or heads,
            attention.head_dim or attention.dim // heads,
            feed_forward.w1.out_features,
            layer.attention_norm.eps or 1e-5,
            float(rope.theta),
            scaling,
        )


def _default(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else dataclasses.MISSING


def _same(value: Any, default: Any) -> bool:
    try:
        return bool(value == default)
    except (TypeError, ValueError):
        return False
