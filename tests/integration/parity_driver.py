"""Launches one framework in several layouts, and with faults planted in its loader; one import, a fork a launch.

Run as a program: parity_driver.py FRAMEWORK OUT_DIR JOB ...   A JOB is a layout, a fault, or `again` (a layout twice).
Writes OUT_DIR/<job>/, what `train-ledger launch --export` writes. A fault is planted in the process that forks the
ranks: in the weights file that this framework gets, in its reading of labels, or in its choice of what decays.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from train_ledger.launch.launcher import launch
from train_ledger.launch.loop import program
from train_ledger.launch.weights import generate, write_weights
from train_ledger.spec.io import fill_defaults, schema
from train_ledger.spec.model import ModelShape, canonical_tensors
from train_ledger.spec.run import Optimizer, Parallel, Probe, Run, check_layout

MODEL = ModelShape(
    name="tiny",
    num_layers=2,
    hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=90,
    vocab_size=260,
    seq_length=24,
    head_dim=12,
    max_position_embeddings=24,
    rope_theta=500000.0,
)
#: Every option that the frameworks' loaders treat otherwise; torchtitan's Llama has none of them.
GPT = replace(
    MODEL,
    name="tiny-gpt",
    position_embedding="learned",
    normalization="layernorm",
    gated_mlp=False,
    activation="gelu",
    tie_embeddings=True,
    qkv_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
)
#: Rotary frequencies stretched as in Llama 3.1, with a boundary inside the sequence. Megatron Core has it fixed
#: at 8192 (`rotary_pos_embedding.py:_apply_scaling`), so its prediction refuses this shape.
SCALED = replace(
    MODEL,
    name="tiny-scaled",
    rope_theta=1000.0,
    rope_scaling={
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
)
MODELS = {"gpt": GPT, "scaled": SCALED}
STEPS = 4

#: Layout by name: degrees, and settings of the framework. Small buckets, so that there are several even here.
LAYOUTS: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "megatron": {
        "plain": ({}, {}),
        "tp2": ({"tensor_parallel": 2, "sequence_parallel": True}, {}),
        "pp2": ({"pipeline_parallel": 2}, {}),
        "dp2": ({"data_parallel": 2}, {}),
        "gpt-tp2": ({"tensor_parallel": 2}, {}),
        "gpt-pp2": ({"pipeline_parallel": 2}, {}),
    },
    "deepspeed": {
        **{f"zero{s}": ({"data_parallel": 2}, {"zero_optimization": {"stage": s}}) for s in (0, 1, 2, 3)},
        "scaled-zero2": ({"data_parallel": 2}, {"zero_optimization": {"stage": 2}}),
        "gpt-zero3": ({"data_parallel": 2}, {"zero_optimization": {"stage": 3}}),
    },
    "torchtitan": {
        "fsdp2": ({"data_parallel_shard": 2}, {}),
        "tp2": ({"tensor_parallel": 2, "sequence_parallel": True}, {}),
        "hsdp": ({"data_parallel_replicate": 2, "data_parallel_shard": 2}, {}),
        "scaled-fsdp2": ({"data_parallel_shard": 2}, {}),
        "fp32": ({"data_parallel_shard": 2}, {"mixed_precision_param": "float32"}),
        "fsdp2-tp2": ({"data_parallel_shard": 2, "tensor_parallel": 2, "sequence_parallel": True}, {}),
        "pp2": ({"pipeline_parallel": 2}, {}),
        "pp2-fsdp2": ({"pipeline_parallel": 2, "data_parallel_shard": 2}, {"local_batch_size": 2}),
    },
}
#: Where the faults are planted: a layout that cuts the weights.
FAULTY = {"megatron": "tp2", "deepspeed": "zero3", "torchtitan": "fsdp2"}
FAULTS = ("swapped-kv", "interleaved-rope", "decayed-norms", "shifted-label")

_SETTINGS: dict[str, dict[str, Any]] = {
    "megatron": {"bucket_size": 8000, "make_vocab_size_divisible_by": 1},
    "deepspeed": {
        "zero_optimization": {
            "reduce_bucket_size": 8000,
            "stage3_prefetch_bucket_size": 8000,
            "stage3_param_persistence_threshold": 100,
            "stage3_max_live_parameters": 20000,
            "stage3_max_reuse_distance": 8000,
        }
    },
    "torchtitan": {},
}


def make_run(framework: str, layout: str) -> Run:
    """A run of the one problem that all layouts share: 8 sequences a step, clipping acts, norms do not decay."""
    degrees, special = LAYOUTS[framework][layout]
    parallel = Parallel(**degrees)
    total = parallel.data_parallel * parallel.data_parallel_replicate * parallel.data_parallel_shard
    parallel = replace(parallel, data_parallel=total)
    settings = {**_SETTINGS[framework], **special}
    if framework == "deepspeed":
        settings = {
            "zero_optimization": {**_SETTINGS["deepspeed"]["zero_optimization"], **special["zero_optimization"]}
        }
    run = Run(
        name=f"{framework}-{layout}",
        framework=framework,
        model=MODELS.get(layout.split("-")[0], MODEL),
        world="cpu",
        world_size=parallel.tensor_parallel * parallel.pipeline_parallel * total,
        parallel=parallel,
        seq_length=MODEL.seq_length,
        micro_batch=1,
        global_batch=8,
        steps=STEPS,
        seed=7,
        optimizer=Optimizer(lr=3e-3, min_lr=3e-4, clip_grad=0.5, lr_warmup_steps=4, decay_norms=False),
        probe=Probe(),
        settings=fill_defaults(settings, schema(framework)),
    )
    check_layout(run)
    return run


def wrong_weights(model: ModelShape, fault: str) -> dict[str, torch.Tensor]:
    """The canonical weights, but for one mistake of a loader; right ones for any other fault."""
    read = generate(model, 7)
    weights = {t.name: read(t.name) for t in canonical_tensors(model)}
    for i in range(model.num_layers):
        at = f"model.layers.{i}.self_attn"
        if fault == "swapped-kv":
            k, v = weights[f"{at}.k_proj.weight"], weights[f"{at}.v_proj.weight"]
            weights[f"{at}.k_proj.weight"], weights[f"{at}.v_proj.weight"] = v, k
        if fault == "interleaved-rope":  # rows as a model wants them that turns neighbours, not halves
            for letter in "qk":
                name = f"{at}.{letter}_proj.weight"
                rows = weights[name].view(-1, 2, model.head_dim // 2, model.hidden_size)
                weights[name] = rows.transpose(1, 2).reshape(weights[name].shape)
    return weights


def plant(framework: str, fault: str) -> None:
    """Change the loader's code in this process."""
    if fault == "decayed-norms":
        _decay_norms(framework)
    if fault == "shifted-label":
        _shift_labels(framework)


def _decay_norms(framework: str) -> None:
    """The exclusion of norms from weight decay is missed."""
    if framework == "megatron":
        from megatron.core import optimizer

        optimizer.get_standard_config_overrides = lambda config: {}
    elif framework == "deepspeed":
        from train_ledger.launch.frameworks import deepspeed

        deepspeed.param_groups = lambda model, run: list(model.parameters())
    else:
        from train_ledger.launch.frameworks import torchtitan_config

        right = torchtitan_config._adamw
        torchtitan_config._adamw = lambda o: right(replace(o, decay_norms=True))


def _shift_labels(framework: str) -> None:
    """Each token is its own label: the shift by one is missed."""
    if framework == "deepspeed":
        from train_ledger.launch.llama import Llama

        right: Callable[..., Any] = Llama.forward
        Llama.forward = lambda self, tokens, labels: right(self, tokens, tokens)
    elif framework == "megatron":
        from train_ledger.launch.frameworks.megatron import MegatronSession

        batches = MegatronSession._batches

        def wrong(self: Any, chunk: Any, step: int) -> Any:
            for tokens, _ in batches(self, chunk, step):
                yield tokens, tokens

        MegatronSession._batches = wrong
    else:
        from train_ledger.launch.frameworks.torchtitan_config import SyntheticLoader

        batch = SyntheticLoader._batch

        def own(self: Any, indices: list[int]) -> Any:
            inputs, _ = batch(self, indices)
            return inputs, inputs["input"].clone()

        SyntheticLoader._batch = own


def main(framework: str, out: Path, jobs: list[str]) -> int:
    """One fork a job: a planted fault and a framework's global state end with it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    program(framework).warm_up()
    for job in jobs:
        fault = job if job in FAULTS else ""
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                run = make_run(framework, job if job in LAYOUTS[framework] else FAULTY[framework])
                weights = out / f"{job}.safetensors"
                write_weights(weights, wrong_weights(run.model, fault))
                plant(framework, fault)
                launch(run, out / job, 200, weights, export=True)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
