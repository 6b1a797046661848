"""A run as a Python module with the function that returns torchtitan's `Trainer.Config` (0.3.0)."""

from __future__ import annotations

import keyword
import re
from typing import Any

from train_ledger.spec.errors import ConfigError
from train_ledger.spec.run import Run
from train_ledger.spec.torchtitan_fields import local_batch_size, pipeline_fields

TEMPLATE = '''"""{run}: {model}, {world_size} ranks, for torchtitan 0.3.0.

Run from a folder that holds this file: torchrun … -m torchtitan.train --module {module} --config {function}
"""

from functools import partial

import torch
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import {rope_kind}, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.common.param_init import depth_scaled_std, skip_param_init
{family_imports}
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

DIM, LAYERS, VOCABULARY = {dim}, {layers}, {vocab}


def norm(width=DIM):
    return RMSNorm.Config(normalized_shape=width, eps={eps}, param_init={{"weight": torch.nn.init.ones_}})


def layer(i):
    linear = {{"weight": partial(torch.nn.init.trunc_normal_, std=0.02)}}
    deep = {{"weight": partial(torch.nn.init.trunc_normal_, std=depth_scaled_std(0.02, i))}}
    return {family}TransformerBlock.Config(
        attention_norm=norm(),
        ffn_norm=norm(),
        attention=make_gqa_config(
            dim=DIM,
            n_heads={heads},
            n_kv_heads={groups},
            head_dim={head_dim},
            wqkv_param_init=linear,
            wo_param_init=deep,
            inner_attention=get_attention_config("flex"),
            fuse_qkv=True,
            rope={rope_kind}.Config({rope}),
            qk_norm={qk_norm},
        ),
        feed_forward=make_ffn_config(dim=DIM, hidden_dim={ffn}, w1_param_init=linear, w2w3_param_init=deep),
    )


def model_spec():
    head = {{"weight": partial(torch.nn.init.trunc_normal_, std=DIM**-0.5, a=-3 * DIM**-0.5, b=3 * DIM**-0.5)}}
    return ModelSpec(
        name={spec_name!r},
        flavor={model!r},
        model={family}Model.Config(
            dim=DIM,
            vocab_size=VOCABULARY,
            enable_weight_tying={tied},
            tok_embeddings=Embedding.Config(
                num_embeddings=VOCABULARY, embedding_dim=DIM, param_init={{"weight": {embedding_init}}}
            ),
            norm=norm(),
            lm_head=Linear.Config(in_features=DIM, out_features=VOCABULARY, param_init=head),
            layers=[layer(i) for i in range(LAYERS)],
        ),
        parallelize_fn={parallelize},
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter={family}StateDictAdapter,
    )


def adamw(pattern, weight_decay):
    kwargs = {{"lr": {lr}, "betas": ({beta1}, {beta2}), "eps": {adam_eps}, "weight_decay": weight_decay}}
    return ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=kwargs)


def {function}() -> Trainer.Config:
    entropy = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    return Trainer.Config(
        model_spec=model_spec(),
        loss={loss},
        hf_assets_path="./assets/hf",
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test"),
        optimizer=OptimizersContainer.Config(param_groups=[{groups_of_params}]),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps={warmup}, decay_type="cosine", min_lr_factor={min_lr_factor}
        ),
        training=TrainingConfig(
            local_batch_size={local_batch},
            global_batch_size={global_batch},
            seq_len={seq_length},
            max_norm={max_norm},
            steps={steps},
            dtype="float32",
            mixed_precision_param={mixed_precision_param!r},
            mixed_precision_reduce={mixed_precision_reduce!r},
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree={replicate},
            data_parallel_shard_degree={shard},
            tensor_parallel_degree={tensor},
            enable_sequence_parallel={sequence},
            context_parallel_degree={context},
            fsdp_reshard_after_forward={reshard!r},
            spmd_backend={backend!r},{pipeline}
        ),
        activation_checkpoint={checkpoint},
        metrics=MetricsProcessor.Config(log_freq={log_freq}),
        debug=DebugConfig(seed={seed}),
    )
'''


def module_name(run: Run) -> str:
    """The run's name as a Python word: the module's and its function's."""
    word = re.sub(r"\W+", "_", run.name, flags=re.ASCII)
    return word if word.isidentifier() and not keyword.iskeyword(word) else f"run_{word}"


def module_text(run: Run) -> str:
    """Source of the module.

    Raises:
        ConfigError: the shape is no Llama 3 or Qwen 3 of torchtitan's, or its rotary scaling is not Llama 3's.
    """
    m, p, o, s = run.model, run.parallel, run.optimizer, run.settings
    name = module_name(run)
    # What norms queries and keys is a Qwen 3, as in launch/frameworks/torchtitan_config.py:model_spec.
    family, parallelize = ("Qwen3", "parallelize_qwen3") if m.qk_norm else ("Llama3", "parallelize_llama")
    package = f"torchtitan.models.{family.lower()}"
    return TEMPLATE.format(
        run=run.name,
        model=m.name,
        world_size=run.world_size,
        module=name,
        function=name,
        family=family,
        family_imports=f"from {package} import {family}StateDictAdapter, {parallelize}\n"
        f"from {package}.model import {family}Model, {family}TransformerBlock",
        spec_name=family.lower(),
        parallelize=parallelize,
        rope_kind="CosSinRoPE" if m.qk_norm else "ComplexRoPE",
        qk_norm=f"norm({m.head_dim})" if m.qk_norm else None,
        dim=m.hidden_size,
        layers=m.num_layers,
        vocab=m.vocab_size,
        eps=m.norm_eps,
        heads=m.num_attention_heads,
        groups=m.num_query_groups,
        head_dim=m.head_dim,
        rope=", ".join(f"{k}={v!r}" for k, v in _rope(run).items()),
        ffn=m.ffn_hidden_size,
        tied=m.tie_embeddings,
        embedding_init="skip_param_init" if m.tie_embeddings else "partial(torch.nn.init.normal_, std=1.0)",
        lr=o.lr,
        beta1=o.beta1,
        beta2=o.beta2,
        adam_eps=o.eps,
        loss=f"ChunkedLossWrapper.Config(loss_fn=entropy, num_chunks={s['num_chunks']})"
        if s["chunked_loss"]
        else "entropy",
        groups_of_params=("" if o.decay_norms else 'adamw(r"norm\\.weight$|\\.bias$", 0.0), ')
        + f'adamw(r".*", {o.weight_decay})',
        warmup=o.lr_warmup_steps,
        min_lr_factor=o.min_lr / o.lr,
        local_batch=local_batch_size(run),
        global_batch=run.global_batch,
        seq_length=run.seq_length,
        max_norm=o.clip_grad or 'float("inf")',
        steps=run.steps,
        mixed_precision_param=s["mixed_precision_param"],
        mixed_precision_reduce=s["mixed_precision_reduce"],
        replicate=p.data_parallel_replicate,
        shard=p.data_parallel_shard,
        tensor=p.tensor_parallel,
        sequence=p.sequence_parallel,
        context=p.context_parallel,
        reshard=s["fsdp_reshard_after_forward"],
        backend=s["spmd_backend"],
        pipeline="".join(f"\n            {k}={v!r}," for k, v in pipeline_fields(run).items()),
        checkpoint={"none": None, "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}[
            s["activation_checkpoint"]
        ],
        log_freq=s["log_freq"],
        seed=run.seed,
    )


def _rope(run: Run) -> dict[str, Any]:
    m = run.model
    out: dict[str, Any] = {
        "dim": m.head_dim,
        "max_seq_len": max(m.max_position_embeddings, run.seq_length),
        "theta": m.rope_theta,
    }
    scaling = m.rope_scaling
    if not scaling:
        return out
    if scaling.get("rope_type", scaling.get("type")) != "llama3":
        raise ConfigError("only llama3's is in torchtitan", file=run.source or None, key="model.rope_scaling")
    keys = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return out | {
        "scaling": "llama",
        "scaling_factor": scaling["factor"],
        **{k: scaling[k] for k in keys if k in scaling},
    }
