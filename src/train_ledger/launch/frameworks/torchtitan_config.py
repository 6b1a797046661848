"""A run as torchtitan's own `Trainer.Config`, with the small components of ours that the configuration names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CommConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm, RoPE, TransformerBlock
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.param_init import depth_scaled_std, skip_param_init
from torchtitan.models.llama3 import Llama3StateDictAdapter, parallelize_llama
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.qwen3 import Qwen3StateDictAdapter, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from train_ledger.launch import tokens
from train_ledger.launch.schedule import lr_at
from train_ledger.spec.model import ModelShape
from train_ledger.spec.run import Optimizer, Run
from train_ledger.spec.torchtitan_fields import local_batch_size, pipeline_fields

#: On a slow machine a rank may wait long for the others; torchtitan's own 100 s after the first step are meant for
#: GPUs.
TIMEOUT_S = 3600


def trainer_config(run: Run) -> Trainer.Config:
    """The configuration that torchtitan trains `run` with."""
    s, p = run.settings, run.parallel
    checkpoint = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
    return Trainer.Config(
        model_spec=model_spec(run.model, run.seq_length, split_sequence=p.context_parallel > 1),
        loss=_loss(run),
        tokenizer=NumberTokenizer.Config(vocab_size=run.model.vocab_size),
        dataloader=SyntheticLoader.Config(
            seed=run.seed, vocab_size=run.model.vocab_size, global_batch=run.global_batch
        ),
        optimizer=_adamw(run.optimizer),
        lr_scheduler=SharedSchedule.Config(optimizer=run.optimizer),
        training=TrainingConfig(
            local_batch_size=local_batch_size(run),
            global_batch_size=run.global_batch,
            seq_len=run.seq_length,
            # clip_grad 0 means no clipping; torchtitan has no switch for it, but an infinite bound clips nothing.
            max_norm=run.optimizer.clip_grad or math.inf,
            steps=run.steps,
            dtype="float32",
            mixed_precision_param=s["mixed_precision_param"],
            mixed_precision_reduce=s["mixed_precision_reduce"],
            # A replayed graph would hide its collectives from a probe of calls, and needs CUDA.
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=p.data_parallel_replicate,
            data_parallel_shard_degree=p.data_parallel_shard,
            tensor_parallel_degree=p.tensor_parallel,
            context_parallel_degree=p.context_parallel,
            enable_sequence_parallel=p.sequence_parallel,
            fsdp_reshard_after_forward=s["fsdp_reshard_after_forward"],
            spmd_backend=s["spmd_backend"],
            **pipeline_fields(run),
        ),
        activation_checkpoint=checkpoint[s["activation_checkpoint"]],
        metrics=KeptMetrics.Config(log_freq=s["log_freq"], disable_color_printing=True),
        comm=CommConfig(init_timeout_seconds=TIMEOUT_S, train_timeout_seconds=TIMEOUT_S),
        debug=DebugConfig(seed=run.seed, enable_structured_logging=False),
    )


def _loss(run: Run) -> BaseLoss.Config:
    entropy = CrossEntropyLoss.Config(global_vocab_size=run.model.vocab_size)
    if not run.settings["chunked_loss"]:
        return entropy
    return ChunkedLossWrapper.Config(loss_fn=entropy, num_chunks=run.settings["num_chunks"])


def _adamw(o: Optimizer) -> OptimizersContainer.Config:
    """AdamW as `components/optimizer/optimizer.py:default_adamw` sets it up, which decays every parameter, norms too.

    The rate is 1 here because `SharedSchedule` multiplies it with the rate itself, so that no rounding comes between.
    """

    def group(pattern: str, weight_decay: float) -> ParamGroupConfig:
        kwargs = {"lr": 1.0, "betas": (o.beta1, o.beta2), "eps": o.eps, "weight_decay": weight_decay}
        return ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=kwargs)

    everything = group(r".*", o.weight_decay)
    return OptimizersContainer.Config(
        param_groups=[everything] if o.decay_norms else [group(r"norm\.weight$|\.bias$", 0.0), everything]
    )


def model_spec(m: ModelShape, seq_length: int, split_sequence: bool = False) -> ModelSpec:
    """Llama 3, or Qwen 3 where queries and keys are normed, of any shape, built as `models/llama3/__init__.py` and
    `models/qwen3/__init__.py` build their flavours, with two differences.

    Attention is PyTorch's, since FlexAttention needs a compiler, but for context parallelism (`split_sequence`), for
    which torchtitan has nothing else (`distributed/full_dtensor.py:validate_config`). Embeddings are tied only where
    the shape says so.
    """
    linear = {"weight": partial(torch.nn.init.trunc_normal_, std=0.02)}
    ones = {"weight": torch.nn.init.ones_}
    std = m.hidden_size**-0.5
    head = {"weight": partial(torch.nn.init.trunc_normal_, std=std, a=-3 * std, b=3 * std)}
    embedding = {"weight": skip_param_init if m.tie_embeddings else partial(torch.nn.init.normal_, std=1.0)}

    def norm(width: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=width, eps=m.norm_eps, param_init=ones)

    def block(i: int) -> TransformerBlock.Config:
        deep = {"weight": partial(torch.nn.init.trunc_normal_, std=depth_scaled_std(0.02, i))}
        kind = Qwen3TransformerBlock if m.qk_norm else Llama3TransformerBlock
        return kind.Config(
            attention_norm=norm(m.hidden_size),
            ffn_norm=norm(m.hidden_size),
            attention=make_gqa_config(
                dim=m.hidden_size,
                n_heads=m.num_attention_heads,
                n_kv_heads=m.num_query_groups,
                head_dim=m.head_dim,
                wqkv_param_init=linear,
                wo_param_init=deep,
                inner_attention=FlexAttention.Config() if split_sequence else Attention.Config(),
                fuse_qkv=True,
                rope=_rope(m, seq_length),
                qk_norm=norm(m.head_dim) if m.qk_norm else None,
            ),
            feed_forward=make_ffn_config(
                dim=m.hidden_size, hidden_dim=m.ffn_hidden_size, w1_param_init=linear, w2w3_param_init=deep
            ),
        )

    config = (Qwen3Model if m.qk_norm else Llama3Model).Config(
        dim=m.hidden_size,
        vocab_size=m.vocab_size,
        enable_weight_tying=m.tie_embeddings,
        tok_embeddings=Embedding.Config(num_embeddings=m.vocab_size, embedding_dim=m.hidden_size, param_init=embedding),
        norm=norm(m.hidden_size),
        lm_head=Linear.Config(in_features=m.hidden_size, out_features=m.vocab_size, param_init=head),
        layers=[block(i) for i in range(m.num_layers)],
    )
    return ModelSpec(
        name="qwen3" if m.qk_norm else "llama3",
        flavor=m.name,
        model=config,
        parallelize_fn=parallelize_qwen3 if m.qk_norm else parallelize_llama,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=Qwen3StateDictAdapter if m.qk_norm else Llama3StateDictAdapter,
    )


def _rope(m: ModelShape, seq_length: int) -> RoPE.Config:
    """Rotary positions as the shape has them: pairs that lie side by side in Llama 3, halves in Qwen 3."""
    longest = max(m.max_position_embeddings, seq_length)
    if m.qk_norm:
        return CosSinRoPE.Config(dim=m.head_dim, max_seq_len=longest, theta=m.rope_theta)
    config = ComplexRoPE.Config(dim=m.head_dim, max_seq_len=longest, theta=m.rope_theta)
    if m.rope_scaling:
        config.scaling = "llama"
        config.scaling_factor = m.rope_scaling["factor"]
        config.low_freq_factor = m.rope_scaling["low_freq_factor"]
        config.high_freq_factor = m.rope_scaling["high_freq_factor"]
        config.original_max_position_embeddings = m.rope_scaling["original_max_position_embeddings"]
    return config


class Attention(ScaledDotProductAttention):
    """Flash attention where it can run, as in the other frameworks; never cuDNN's, which come in many versions."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        pass

    sdpa_backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]  # noqa: RUF012 - as in the class above it


class NumberTokenizer(BaseTokenizer):
    """The tokens are numbers already; as text they stand with blanks between."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        vocab_size: int

    def __init__(self, config: Config, *, tokenizer_path: str | None = None) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size

    def encode(self, text: str) -> list[int]:
        """Numbers in a text."""
        return [int(word) for word in text.split()]

    def decode(self, tokens: list[int]) -> str:
        """Numbers as a text."""
        return " ".join(map(str, tokens))

    def get_vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.vocab_size


class SyntheticLoader(BaseDataLoader):
    """The shared token stream by global sample index.

    Micro-batch j of data-parallel rank r takes the b samples of a step from (j·R + r)·b on, R ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        seed: int
        vocab_size: int
        global_batch: int

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
    ) -> None:
        self.config, self.dp_world_size, self.dp_rank = config, dp_world_size, dp_rank
        self.seq_len, self.local_batch_size = seq_len, local_batch_size
        #: What trainer.py:batch_generator holds until it is asked again: the last batch stays alive between steps.
        self.held: list[Any] = []

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        step = 0
        while True:
            step += 1
            samples = tokens.step_samples(step, self.config.global_batch)
            width = self.local_batch_size * self.dp_world_size
            for first in range(self.dp_rank * self.local_batch_size, len(samples), width):
                yield self._batch([samples[first + i] for i in range(self.local_batch_size)])

    def _batch(self, indices: list[int]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        c, length = self.config, self.seq_len + 1
        rows = torch.stack([torch.from_numpy(tokens.sample(c.seed, i, length, c.vocab_size)) for i in indices])
        positions = torch.arange(self.seq_len).repeat(len(indices), 1)
        inputs = {"input": rows[:, :-1].clone(), "positions": positions}
        labels = rows[:, 1:].clone()
        self.held = [inputs, labels]
        return inputs, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        return None


class SharedSchedule(LRSchedulersContainer):
    """The learning rate that all frameworks share, through torchtitan's own container of `LambdaLR`s."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        optimizer: Optimizer

        def build(self, *, optimizers: OptimizersContainer, training_steps: int) -> LRSchedulersContainer:
            # LambdaLR counts from 0 and asks once more after the last step.
            return SharedSchedule(
                optimizers, lambda n: lr_at(self.optimizer, min(n + 1, training_steps), training_steps)
            )


class KeptMetrics(MetricsProcessor):
    """torchtitan's metrics, with the loss and the gradient norm of the last logged step kept for us."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    last: tuple[int, float, float] | None = None

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        self.last = (step, global_avg_loss, grad_norm)
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
