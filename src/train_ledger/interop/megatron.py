"""Megatron-LM's flags (`pretrain_gpt.py`, core 0.18.0) as a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from train_ledger.spec.errors import ConfigError

from . import Native
from .lists import ignored, neutral
from .shell import read_flags

IGNORED, NEUTRAL = ignored("megatron"), neutral("megatron")

#: Flags with one number, by the key of a run file or (after `model.`) of a model file that they set.
NUMBERS: dict[str, str] = {
    "num-layers": "model.num_layers",
    "hidden-size": "model.hidden_size",
    "ffn-hidden-size": "model.ffn_hidden_size",
    "num-attention-heads": "model.num_attention_heads",
    "kv-channels": "model.head_dim",
    "max-position-embeddings": "model.max_position_embeddings",
    "seq-length": "model.seq_length",
    "rotary-base": "model.rope_theta",
    "norm-epsilon": "model.norm_eps",
    "tensor-model-parallel-size": "parallel.tensor_parallel",
    "pipeline-model-parallel-size": "parallel.pipeline_parallel",
    "context-parallel-size": "parallel.context_parallel",
    "micro-batch-size": "micro_batch",
    "global-batch-size": "global_batch",
    "train-iters": "steps",
    "seed": "seed",
    "lr": "optimizer.lr",
    "min-lr": "optimizer.min_lr",
    "lr-warmup-iters": "optimizer.lr_warmup_steps",
    "weight-decay": "optimizer.weight_decay",
    "clip-grad": "optimizer.clip_grad",
    "adam-beta1": "optimizer.beta1",
    "adam-beta2": "optimizer.beta2",
    "adam-eps": "optimizer.eps",
    "make-vocab-size-divisible-by": "megatron.make_vocab_size_divisible_by",
    "ddp-bucket-size": "megatron.bucket_size",
    "recompute-num-layers": "megatron.recompute_num_layers",
    "decoder-first-pipeline-num-layers": "megatron.num_layers_in_first_pipeline_stage",
    "decoder-last-pipeline-num-layers": "megatron.num_layers_in_last_pipeline_stage",
}

#: Flags with one word: the key, and our word for each of Megatron's.
WORDS: dict[str, tuple[str, dict[str, Any]]] = {
    "normalization": ("model.normalization", {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}),
    "position-embedding-type": (
        "model.position_embedding",
        {"rope": "rope", "learned_absolute": "learned", "none": "none"},
    ),
    "recompute-granularity": ("megatron.recompute_granularity", {"full": "full", "selective": "selective"}),
    "recompute-method": ("megatron.recompute_method", {"uniform": "uniform", "block": "block"}),
}

#: Switches: the key and what it becomes when the flag is there.
SWITCHES: dict[str, tuple[str, Any]] = {
    "sequence-parallel": ("parallel.sequence_parallel", True),
    "use-distributed-optimizer": ("megatron.use_distributed_optimizer", True),
    "overlap-grad-reduce": ("megatron.overlap_grad_reduce", True),
    "overlap-param-gather": ("megatron.overlap_param_gather", True),
    "grad-reduce-in-bf16": ("megatron.grad_reduce_in_fp32", False),
    "ddp-pad-buckets-for-high-nccl-busbw": ("megatron.pad_buckets_for_high_nccl_busbw", True),
    "recompute-activations": ("megatron.recompute_granularity", "selective"),
    "swiglu": ("model.gated_mlp", True),
    "disable-bias-linear": ("model.mlp_bias", False),
    "add-qkv-bias": ("model.qkv_bias", True),
    "untie-embeddings-and-output-weights": ("model.tie_embeddings", False),
    "qk-layernorm": ("model.qk_norm", True),
    "use-rotary-position-embeddings": ("model.position_embedding", "rope"),
    "no-position-embedding": ("model.position_embedding", "none"),
}

#: Read by hand below.
OTHER = frozenset(
    {
        "bf16",
        "accumulate-allreduce-grads-in-fp32",
        "group-query-attention",
        "num-query-groups",
        "vocab-size",
        "padded-vocab-size",
        "no-pad-vocab-size",
        "disable-pad-vocab-size",
        "use-rope-scaling",
        "rope-scaling-factor",
        "rotary-seq-len-interpolation-factor",
        "transformer-impl",
        "recompute-modules",
        "num-layers-per-virtual-pipeline-stage",
        "num-virtual-stages-per-pipeline-rank",
        "cp-comm-type",
    }
)

#: What Megatron does where the flag is not given, in our keys (its parser's defaults, and `validate_args`).
DEFAULTS: dict[str, Any] = {
    "parallel.sequence_parallel": False,
    "megatron.use_distributed_optimizer": False,
    "megatron.overlap_grad_reduce": False,
    "megatron.overlap_param_gather": False,
    "megatron.grad_reduce_in_fp32": True,  # validate_args turns it on for bf16
    "model.normalization": "layernorm",
    "model.position_embedding": "learned",
    "model.gated_mlp": False,
    "model.activation": "gelu",
    "model.mlp_bias": True,
    "model.tie_embeddings": True,
    "model.rope_theta": 10000.0,
    "model.norm_eps": 1e-5,
    "optimizer.weight_decay": 0.01,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.999,
    "optimizer.eps": 1e-8,
    "optimizer.min_lr": 0.0,
    "optimizer.decay_norms": False,  # optimizer/__init__.py:_get_param_groups leaves norms and biases out
    "micro_batch": 1,
}

LOOP_NOTE = (
    "calls are those of Megatron Core; megatron.training's loop adds its own (loss and timer reductions, broadcasts of "
    "the batch over tensor parallel)"
)
ENGINE_NOTE = (
    "--transformer-impl transformer_engine: predicted with Megatron Core's own layers and a fused attention; "
    "Transformer Engine registers a layer's first norm after its projection, which can move the border of a gradient "
    "bucket, and keeps workspaces of its own"
)


def modelled() -> frozenset[str]:
    """Every flag that is read."""
    return frozenset({*NUMBERS, *WORDS, *SWITCHES, *OTHER})


def read_native(path: str, world_size: int, leave_out: set[str]) -> Native:
    """The run that a file of flags describes, for `world_size` ranks.

    Raises:
        ConfigError: names the file and the flag: not modelled, a value that it cannot have, a flag that is missing.
    """
    flags = {k: v for k, v in read_flags(path).items() if k not in leave_out}
    return Reader(path, flags, world_size).native()


class Reader:
    """Flags of one file on their way to a run."""

    def __init__(self, path: str, flags: Mapping[str, list[str]], world_size: int) -> None:
        self.path, self.flags, self.world_size = path, flags, world_size
        self.flat: dict[str, Any] = dict(DEFAULTS)
        self.notes = [LOOP_NOTE]

    def refuse(self, flag: str, why: str) -> ConfigError:
        """An error about a flag of this file."""
        return ConfigError(why, file=self.path, key=f"--{flag}")

    def native(self) -> Native:
        """Everything read."""
        ignored = self._sort()
        for flag, key in NUMBERS.items():
            if flag in self.flags:
                self.flat[key] = self._number(flag)
        for flag, (key, words) in WORDS.items():
            if flag in self.flags:
                self.flat[key] = self._word(flag, words)
        for flag, (key, value) in SWITCHES.items():
            if flag in self.flags:
                if self.flags[flag]:
                    raise self.refuse(flag, f"is a switch and takes no value, not {self.flags[flag][0][:60]!r}")
                self.flat[key] = value
        self._model()
        self._layout()
        data: dict[str, Any] = {"framework": "megatron", "world": "nccl", "world_size": self.world_size}
        model: dict[str, Any] = {}
        for key, value in self.flat.items():
            head, dot, tail = key.partition(".")
            if head == "model":
                model[tail] = value
            elif dot:
                data.setdefault(head, {})[tail] = value
            else:
                data[head] = value
        names = {key: f"--{flag}" for flag, key in NUMBERS.items()}
        names |= {key: f"--{flag}" for flag, (key, _) in {**WORDS, **SWITCHES}.items()}
        names |= {key.removeprefix("model."): flag for key, flag in names.items() if key.startswith("model.")}
        return Native(data, model, ignored, tuple(self.notes), names)

    def _sort(self) -> tuple[str, ...]:
        known = modelled()
        for flag, values in self.flags.items():
            if flag in known or flag in IGNORED:
                continue
            if flag in NEUTRAL:
                if len(values) != 1 or values[0] not in NEUTRAL[flag]:
                    raise self.refuse(
                        flag, f"{' '.join(values)[:60]!r} could change bytes or calls and is not modelled"
                    )
                continue
            raise self.refuse(flag, "could change bytes or calls and is not modelled (--without leaves it out)")
        return tuple(f"--{flag}" for flag in self.flags if flag in IGNORED or flag in NEUTRAL)

    def _one(self, flag: str) -> str:
        values = self.flags[flag]
        if len(values) != 1:
            raise self.refuse(flag, f"takes one value, not {len(values)}")
        return values[0]

    def _number(self, flag: str) -> int | float:
        text = self._one(flag)
        try:
            value = float(text)
        except ValueError:
            raise self.refuse(flag, f"{text[:60]!r} is not a number") from None
        if not math.isfinite(value):
            raise self.refuse(flag, f"{text[:60]!r} is not a finite number")
        return int(text) if text.lstrip("+-").isdigit() and len(text) < 30 else value

    def _word(self, flag: str, words: Mapping[str, Any]) -> Any:
        text = self._one(flag)
        if text not in words:
            raise self.refuse(flag, f"{text[:60]!r} is not modelled; known: {', '.join(words)}")
        return words[text]

    def _model(self) -> None:
        flat, flags = self.flat, self.flags
        for flag in ("num-layers", "hidden-size", "num-attention-heads", "seq-length"):
            if flag not in flags:
                raise self.refuse(flag, "is missing")
        if "bf16" not in flags:
            raise self.refuse("bf16", "is missing; only bf16 is modelled")
        if flat["model.gated_mlp"]:
            flat["model.activation"] = "silu"
        if "ffn-hidden-size" not in flags:
            # megatron/training/arguments.py:validate_args
            h = int(flat["model.hidden_size"])
            flat["model.ffn_hidden_size"] = int(4 * h * 2 / 3 / 64) * 64 if flat["model.gated_mlp"] else 4 * h
        # One switch for all biases, one for those of query, key and value alone (TransformerConfig).
        flat["model.attention_output_bias"] = flat["model.mlp_bias"]
        flat["model.qkv_bias"] = flat["model.mlp_bias"] or flat.get("model.qkv_bias", False)
        if "group-query-attention" in flags:
            groups = self._number("num-query-groups") if "num-query-groups" in flags else 1
            flat["model.num_query_groups"] = groups
        if "use-rope-scaling" in flags:
            factor = self._number("rope-scaling-factor") if "rope-scaling-factor" in flags else 8.0
            # models/common/embeddings/rotary_pos_embedding.py:_apply_scaling
            flat["model.rope_scaling"] = {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 8192,
            }
        if "rotary-seq-len-interpolation-factor" in flags:
            factor = self._number("rotary-seq-len-interpolation-factor")
            flat["model.rope_scaling"] = {"rope_type": "linear", "factor": factor}
        self._vocabulary()

    def _vocabulary(self) -> None:
        flat, flags = self.flat, self.flags
        if "padded-vocab-size" in flags:
            flat["model.vocab_size"] = self._number("padded-vocab-size")
            flat["megatron.make_vocab_size_divisible_by"] = 1
            return
        if "vocab-size" not in flags:
            raise self.refuse("vocab-size", "is missing; no tokenizer is read, so give its size before padding")
        flat["model.vocab_size"] = self._number("vocab-size")
        if "no-pad-vocab-size" in flags or "disable-pad-vocab-size" in flags:
            flat["megatron.make_vocab_size_divisible_by"] = 1

    def _layout(self) -> None:
        flat, flags = self.flat, self.flags
        degrees = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
        tp, pp, cp = (int(flat.get(NUMBERS[flag], 1)) for flag in degrees)
        for flag, degree in zip(degrees, (tp, pp, cp), strict=True):
            if degree < 1:
                raise self.refuse(flag, f"{degree} is not 1 or more")
        if self.world_size % (tp * pp * cp):
            raise ConfigError(
                f"world size ({self.world_size}) is not divisible by tensor {tp} x pipeline {pp} x context {cp} "
                "(megatron/training/arguments.py:validate_args)",
                file=self.path,
                key="--world-size",
            )
        data = flat["parallel.data_parallel"] = self.world_size // (tp * pp * cp)
        kind = self.flags.get("cp-comm-type", ["p2p"])
        if cp > 1 and kind != ["all_gather"]:
            raise self.refuse("cp-comm-type", f"{' '.join(kind)[:60]!r} is not modelled; known: all_gather")
        if tp == 1:
            flat["parallel.sequence_parallel"] = False  # validate_args turns it off
        if "global-batch-size" not in flags:
            flat["global_batch"] = flat["micro_batch"] * data
        if "recompute-modules" in flags:
            flat["megatron.recompute_modules"] = flags["recompute-modules"]
        self._virtual_stages(pp)
        impl = self._one("transformer-impl") if "transformer-impl" in flags else "transformer_engine"
        if impl == "local":
            flat["megatron.core_attention"] = "local"
        elif impl == "transformer_engine":
            self.notes.append(ENGINE_NOTE)
        else:
            raise self.refuse("transformer-impl", f"{impl[:60]!r} is not modelled; known: local, transformer_engine")

    def _virtual_stages(self, pp: int) -> None:
        flat, flags = self.flat, self.flags
        if "num-virtual-stages-per-pipeline-rank" in flags:
            flat["parallel.virtual_pipeline_parallel"] = self._number("num-virtual-stages-per-pipeline-rank")
        elif "num-layers-per-virtual-pipeline-stage" in flags:
            flag = "num-layers-per-virtual-pipeline-stage"
            chunk, layers = self._number(flag), flat["model.num_layers"]
            if chunk < 1 or layers % pp or (layers // pp) % chunk:
                raise self.refuse(
                    flag,
                    "number of layers per pipeline stage must be divisible number of layers per virtual pipeline stage "
                    "(megatron/training/arguments.py:validate_args)",
                )
            flat["parallel.virtual_pipeline_parallel"] = int(layers // pp // chunk)
