"""This project's prediction beside its peers', against bytes that were measured: signed errors and time a prediction.

    python benchmarks/peers.py [--json FILE]

Peers: DeepSpeed's `estimate_zero*_model_states_mem_needs`, Megatron's `compute_weight_and_optimizer_memory` (both from
the installed packages), and llm-analysis 0.2.2 (in build/llm-analysis, made on the first run from the package index).
Each gives what it calls the memory of weights, gradients and optimizer. The exact prediction adds the containers
beside those and the named library workspaces, as `train-ledger predict --device` prints them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from train_ledger.predict import predict
from train_ledger.predict.device import MIB, on_device
from train_ledger.predict.first_order import Layout, place, precision_of, state_bytes
from train_ledger.spec.config import load_run, model_shape, resolve_run
from train_ledger.spec.model import canonical_tensors
from train_ledger.spec.run import Run

ROOT = Path(__file__).resolve().parents[1]
BATCH_BYTES = 8193 * 8  # token ids of one sequence of 8192 and its label, int64, held by the measuring script

GPT = {"position_embedding": "learned", "normalization": "layernorm", "gated_mlp": False, "activation": "gelu"}
GPT |= {"qkv_bias": True, "attention_output_bias": True, "mlp_bias": True}
TWELVE_LAYERS = GPT | {"num_layers": 12, "hidden_size": 512, "num_attention_heads": 8, "ffn_hidden_size": 2048}
TWELVE_LAYERS |= {"vocab_size": 50257, "seq_length": 1024, "tie_embeddings": True}
SEVEN_B = GPT | {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8}
SEVEN_B |= {"ffn_hidden_size": 16384, "vocab_size": 131073, "seq_length": 8192}
#: Containers that Megatron's own layers have and Transformer Engine's have not.
NOT_IN_TRANSFORMER_ENGINE = {"global_memory_buffer", "rope_cache", "rope_frequencies"}


@dataclass(frozen=True)
class Case:
    """A run, the rank that was measured, and the bytes, less what the measuring script itself held.

    `workspaces`: how many of 32 MiB the libraries of that environment keep, where it is not this project's (cuBLAS and
    Transformer Engine of another PyTorch); None means as `predict --device` counts them.
    """

    name: str
    run: Run
    rank: int
    measured_bytes: int
    source: str
    workspaces: int | None = None


def cases() -> list[Case]:
    """Measured on real GPUs: by this project on H200s, and by Megatron's own continuous integration on H100s."""
    ours = "this project, torch 2.14.1, H200, requested_bytes at a step boundary"
    ci = "Megatron Core's CI, tag core_v0.18.0, 8 x H100, mem-allocated-bytes"
    paper = [
        ("megatron-tp2-pp2-dp2", 4_598_923_460 - 8 * BATCH_BYTES),
        ("deepspeed-zero3-dp8", 3_164_274_961 - BATCH_BYTES),
        ("torchtitan-fsdp4-tp2", 3_064_472_012),
        ("megatron-tp2", 13_590_237_452 - 8 * BATCH_BYTES - 8 * 8),  # and eight 8-byte loss records
        ("deepspeed-zero3-dp2", 12_155_171_089 - BATCH_BYTES),
        ("torchtitan-fsdp2", 12_055_232_972),
    ]
    out = [Case(f"1B {n}", gpu(load_run(ROOT / f"config/runs/{n}.yaml")), 0, b, ours) for n, b in paper]
    for name, model, batch, degrees, sharded, measured, workspaces in (
        ("7B TP4 DP2", SEVEN_B, 2, (4, 1, 2), True, 20_663_519_232, 3),
        ("12 layers DP8", TWELVE_LAYERS, 4, (1, 1, 8), True, 581_489_664, 3),
        ("12 layers DP8, local layers", TWELVE_LAYERS, 4, (1, 1, 8), True, 518_880_768, 1),
        ("12 layers TP2 PP2 DP2, ZeRO-0", TWELVE_LAYERS, 4, (2, 2, 2), False, 517_243_392, 3),
    ):
        run = megatron_run(name, model, batch, degrees, sharded)
        out.append(Case(name, run, run.world_size - 1, measured, ci, workspaces))
    return out


def gpu(run: Run) -> Run:
    """The run with its containers on GPUs."""
    return replace(run, world="nccl")


def megatron_run(name: str, model: dict[str, Any], batch: int, degrees: tuple[int, int, int], sharded: bool) -> Run:
    """A run of Megatron's CI."""
    tensor, pipeline, data = degrees
    own = {"use_distributed_optimizer": sharded, "overlap_param_gather": sharded}
    settings = {
        "framework": "megatron",
        "world": "nccl",
        "world_size": tensor * pipeline * data,
        "micro_batch": batch,
        "global_batch": batch * data,
        "parallel": {"tensor_parallel": tensor, "pipeline_parallel": pipeline, "data_parallel": data},
        "megatron": own,
    }
    return resolve_run("case", settings, name, "config", model=model_shape("case", model, name))


def exact(case: Case) -> int:
    """Containers and library workspaces on the GPU, bytes."""
    ledger = predict(case.run, [case.rank]).ranks[0]
    if case.workspaces is None:
        return on_device(case.run, ledger, "h200").requested_bytes
    kept = [c for c in ledger.containers if c.device == "cuda" and c.name not in NOT_IN_TRANSFORMER_ENGINE]
    return sum(c.bytes for c in kept) + case.workspaces * 32 * MIB


def first_order(case: Case) -> int:
    """The closed form: model state only, bytes."""
    st = state_bytes(case.run.model, precision_of(case.run))
    return place(case.run.model, st, Layout.of(case.run)).per_gpu.total_bytes


def deepspeed_estimate(case: Case) -> float | None:
    """DeepSpeed's estimator of the run's stage; that of stage 2 serves stage 1 too."""
    if case.run.framework != "deepspeed":
        return None
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    n = case.run.model.num_parameters
    largest = max(t.numel for t in canonical_tensors(case.run.model))
    world = case.run.world_size
    if case.run.settings["zero_optimization"]["stage"] == 3:
        return float(estimate_zero3_model_states_mem_needs(n, largest, world, 1, cpu_offload=False)[1])
    return float(estimate_zero2_model_states_mem_needs(n, world, 1, cpu_offload=False)[1])


def megatron_estimate(case: Case) -> float | None:
    """Megatron's formula for the shard that is loaded most, bytes."""
    if case.run.framework != "megatron":
        return None
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    m, p, s = case.run.model, case.run.parallel, case.run.settings
    multiple = s["make_vocab_size_divisible_by"] * p.tensor_parallel
    args = Namespace(
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        kv_channels=m.head_dim,
        num_attention_heads=m.num_attention_heads,
        num_query_groups=m.num_query_groups,
        group_query_attention=True,
        ffn_hidden_size=m.ffn_hidden_size,
        swiglu=m.gated_mlp,
        normalization={"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[m.normalization],
        padded_vocab_size=-(-m.vocab_size // multiple) * multiple,
        untie_embeddings_and_output_weights=not m.tie_embeddings,
        tensor_model_parallel_size=p.tensor_parallel,
        pipeline_model_parallel_size=p.pipeline_parallel,
        context_parallel_size=p.context_parallel,
        data_parallel_size=p.data_parallel,
        world_size=case.run.world_size,
        use_distributed_optimizer=s["use_distributed_optimizer"],
        add_bias_linear=m.mlp_bias,
        expert_tensor_parallel_size=p.tensor_parallel,
        expert_model_parallel_size=1,
        **dict.fromkeys(
            (
                "num_experts",
                "moe_shared_expert_intermediate_size",
                "mtp_num_layers",
                "moe_ffn_hidden_size",
                "q_lora_rank",
            )
        ),
        multi_latent_attention=False,
        moe_layer_freq=1,
        moe_router_topk=1,
    )
    return float(compute_weight_and_optimizer_memory(args))


def llm_analysis(found: list[Case]) -> list[dict[str, Any]]:
    """llm-analysis on every case, in its own environment; where that cannot be made, the reason."""
    folder = ROOT / "build/llm-analysis"
    python = folder / "bin/python"
    try:
        if not (folder / ".complete").exists():
            uv = str(ROOT / ".uv/bin/uv")
            install = [uv, "pip", "install", "-q", "--python", str(python)]
            # Its own pins (transformers 4.31, tokenizers 0.13) have no wheels for Python 3.12; it runs with later ones.
            for command in (
                [uv, "venv", "-q", "--clear", "--python", sys.executable, str(folder)],
                [*install, "--no-deps", "llm-analysis==0.2.2"],
                [*install, "fire<0.6", "transformers<5"],
            ):
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
            (folder / ".complete").touch()
        asked = [
            {
                "model": case.run.model.to_dict(),
                "parallel": {
                    "tensor": case.run.parallel.tensor_parallel,
                    "pipeline": case.run.parallel.pipeline_parallel,
                    "data": case.run.parallel.data_parallel,
                },
                "zero_stage": Layout.of(case.run).zero_stage,
                "seq_length": case.run.seq_length,
            }
            for case in found
        ]
        done = subprocess.run(
            [str(python), str(ROOT / "benchmarks/peer_llm_analysis.py")],
            input=json.dumps(asked),
            check=True,
            capture_output=True,
            text=True,
            timeout=600,
        )
        answers: list[dict[str, Any]] = json.loads(done.stdout.rpartition("\nANSWER ")[2])
        return answers
    except (OSError, subprocess.SubprocessError, ValueError) as e:
        reason = getattr(e, "stderr", None) or str(e)
        return [{"error": " ".join(str(reason).split())[-200:]}] * len(found)


def seconds(function: Callable[[], Any]) -> float:
    """Seconds of a call, once warm: the best of five."""
    function()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best


def measure(case: Case) -> dict[str, Any]:
    """What ours and the frameworks' own formulas say of one case, and how long they take."""
    out: dict[str, Any] = {}
    ways: dict[str, Callable[[], Any]] = {
        "exact": lambda: exact(case),
        "first order": lambda: first_order(case),
        "DeepSpeed": lambda: deepspeed_estimate(case),
        "Megatron": lambda: megatron_estimate(case),
    }
    for name, way in ways.items():
        start = time.perf_counter()
        value = way()
        cold = time.perf_counter() - start
        if value is not None:
            out[name] = {"bytes": value, "seconds": seconds(way), "first_call_seconds": cold}
    return out


def main() -> None:
    """Print the two tables; --json keeps the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = cases()
    rows = []
    for case, peer in zip(found, llm_analysis(found), strict=True):
        row = {"name": case.name, "measured_bytes": case.measured_bytes, "source": case.source, **measure(case)}
        if "state_bytes" in peer:
            row["llm-analysis"] = {"bytes": peer["state_bytes"], "seconds": peer["seconds"]}
        else:
            row["llm-analysis"] = {"error": peer["error"]}
        rows.append(row)
    names = ["exact", "first order", "DeepSpeed", "Megatron", "llm-analysis"]
    print("Signed error against measured bytes: (predicted - measured) / measured\n")
    print(f"{'case':32}{'measured, bytes':>17}" + "".join(f"{n:>14}" for n in names))
    for row in rows:
        measured = row["measured_bytes"]
        cells = []
        for name in names:
            value = row.get(name, {}).get("bytes")
            cells.append("-" if value is None else f"{(value - measured) / measured:+.4%}")
        print(f"{row['name']:32}{measured:17,}" + "".join(f"{c:>14}" for c in cells))
    print("\nTime of one prediction, microseconds: asked again, and asked first (of all cases after the first)\n")
    for name in names:
        spans = []
        for key in ("seconds", "first_call_seconds"):
            times = [1e6 * row[name][key] for row in rows[1:] if key in row.get(name, {})]
            spans.append(f"{min(times):12,.1f} to {max(times):10,.1f}" if times else "")
        errors = {row[name]["error"] for row in rows if "error" in row.get(name, {})}
        print(f"{name:14}{spans[0]}    {spans[1]} {'; '.join(sorted(errors))}")
    print("\nexact: containers and workspaces; the others: weights, gradients, optimizer. Sources:")
    for source in dict.fromkeys(case.source for case in found):
        print(f"  {source}: {', '.join(case.name for case in found if case.source == source)}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
