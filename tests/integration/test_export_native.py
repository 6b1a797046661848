"""Exported files, read by the frameworks' own parsers from the installed packages, and back to the same prediction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from train_ledger.interop import deepspeed, megatron
from train_ledger.interop.export import export
from train_ledger.interop.lists import ignored, neutral
from train_ledger.interop.torchtitan_export import module_name
from train_ledger.predict.distinct import predict_distinct
from train_ledger.spec.config import load_comparison, load_run, model_shape, resolve_run
from train_ledger.spec.run import Run

ROOT = Path(__file__).parents[2]
RUNS = [load_run(path) for path in sorted((ROOT / "config/runs").glob("*.yaml"))]
RUNS += [replace(r, name=f"{r.name}-laptop") for r in load_comparison("laptop", ROOT / "config").runs.values()]


RUNS += [
    resolve_run(e["name"], e["run"], e["name"], "config", model=model_shape(e["name"], e["model"], e["name"]))
    for name in ("megatron", "torchtitan")
    for e in yaml.safe_load((ROOT / f"tests/data/{name}_sweep.yaml").read_text())
]


def ask(which: str, *items: str) -> Any:
    """What native_parsers.py prints, in a process of its own: frameworks are not imported into the tests' process."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "native_parsers.py"), which, *items],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("\nANSWER ")[2])


def parsed(which: str, tmp_path: Path, file: str) -> list[tuple[Run, Any]]:
    """Every run of a framework beside what its parser made of the exported file."""
    runs = [run for run in RUNS if run.framework == which]
    items = []
    for run in runs:
        export(run, tmp_path / run.name)
        items.append(f"{run.world_size}:{tmp_path / run.name / file.format(module_name(run))}")
    return list(zip(runs, ask(which, *items), strict=True))


def test_megatron_reads_every_run(tmp_path):
    for run, args in parsed("megatron", tmp_path, "run.sh"):
        m, p, s = run.model, run.parallel, run.settings
        expected = {
            "data_parallel_size": p.data_parallel,
            "tensor_model_parallel_size": p.tensor_parallel,
            "pipeline_model_parallel_size": p.pipeline_parallel,
            "virtual_pipeline_model_parallel_size": p.virtual_pipeline_parallel
            if p.virtual_pipeline_parallel > 1
            else None,
            "sequence_parallel": p.sequence_parallel,
            "global_batch_size": run.global_batch,
            "micro_batch_size": run.micro_batch,
            "num_layers": m.num_layers,
            "hidden_size": m.hidden_size,
            "ffn_hidden_size": m.ffn_hidden_size,
            "kv_channels": m.head_dim,
            "num_query_groups": m.num_query_groups,
            "vocab_size": m.vocab_size,
            "make_vocab_size_divisible_by": s["make_vocab_size_divisible_by"],
            "seq_length": run.seq_length,
            "swiglu": m.gated_mlp,
            "add_bias_linear": m.mlp_bias,
            "untie_embeddings_and_output_weights": not m.tie_embeddings,
            "rotary_base": m.rope_theta,
            "use_distributed_optimizer": s["use_distributed_optimizer"],
            "overlap_grad_reduce": s["overlap_grad_reduce"],
            "overlap_param_gather": s["overlap_param_gather"],
            "accumulate_allreduce_grads_in_fp32": s["grad_reduce_in_fp32"],
            "clip_grad": run.optimizer.clip_grad,
            "lr": run.optimizer.lr,
            "ddp_bucket_size": s["bucket_size"],
            "bf16": True,
        }
        assert {key: args[key] for key in expected} == expected, run.name


def test_deepspeed_reads_every_run(tmp_path):
    for run, config in parsed("deepspeed", tmp_path, "ds_config.json"):
        zero = run.settings["zero_optimization"]
        expected = {
            "stage": zero["stage"],
            "train_batch_size": run.global_batch,
            "micro_batch": run.micro_batch,
            "gradient_accumulation_steps": run.num_micro_batches,
            "gradient_clipping": run.optimizer.clip_grad,
            "bf16": True,
            "reduce_bucket_size": zero["reduce_bucket_size"],
            "stage3_prefetch_bucket_size": zero["stage3_prefetch_bucket_size"],
            "stage3_param_persistence_threshold": zero["stage3_param_persistence_threshold"],
            "sub_group_size": zero["sub_group_size"],
            "overlap_comm": zero["overlap_comm"],
        }
        assert {key: config[key] for key in expected} == expected, run.name
        assert config["optimizer"][0].lower() == "adamw"


def test_torchtitan_reads_every_run_and_the_ledger_reads_it_back(tmp_path):
    for run, answer in parsed("torchtitan", tmp_path, "{}"):
        back = Run.from_dict(answer["run"])
        (left, classes), (right, others) = predict_distinct(replace(run, world="nccl")), predict_distinct(back)
        assert classes == others
        assert [x.to_dict() for x in left.ranks] == [x.to_dict() for x in right.ranks], run.name
        assert back.steps == run.steps
        assert back.optimizer == replace(
            run.optimizer, min_lr=back.optimizer.min_lr, lr_warmup_steps=back.optimizer.lr_warmup_steps
        )
        assert not answer["notes"]


@pytest.fixture(scope="module")
def names() -> dict[str, list[str]]:
    return ask("flags")


def test_every_listed_flag_is_megatrons(names):
    """No name in our lists is a slip of the pen, and every flag of the parser has a place: read, listed, or refused."""
    listed = {*megatron.modelled(), *ignored("megatron"), *neutral("megatron")}
    assert listed <= set(names["megatron"]), sorted(listed - set(names["megatron"]))
    refused = set(names["megatron"]) - listed
    # A look at both ends: what moves bytes or calls is not among the ignored, and no flag of the run is refused.
    assert {
        "num-experts",
        "use-megatron-fsdp",
        "tp-comm-overlap",
        "optimizer-cpu-offload",
        "calculate-per-token-loss",
    } <= refused
    assert len(refused) > 300


def test_every_listed_key_is_deepspeeds(names):
    keys = {*deepspeed.RENAMED, *ignored("deepspeed"), *neutral("deepspeed")}
    keys |= {f"zero_optimization.{key}" for key in deepspeed.ZERO}
    for section in ("zero_optimization", "bf16", "fp16"):
        ours = {key.split(".")[1] for key in keys if key.startswith(f"{section}.")}
        assert ours <= set(names[section]), sorted(ours - set(names[section]))


def test_predict_takes_a_torchtitan_config_on_the_command_line(tmp_path):
    run = next(r for r in RUNS if r.framework == "torchtitan")
    export(run, tmp_path)
    done = subprocess.run(
        ["sh", str(tmp_path / "predict.sh"), "--rank", "0", "--format", "json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    printed = json.loads(done.stdout[done.stdout.index("{") :])["ranks"][0]
    assert printed == json.loads(json.dumps(predict_distinct(replace(run, world="nccl"))[0].ranks[0].to_dict()))


def test_split_sequences_need_flex_attention(tmp_path):
    """A config with PyTorch's attention is refused by the field's name: torchtitan takes it in one backend only."""
    run = next(r for r in RUNS if r.framework == "torchtitan" and r.parallel.context_parallel > 1)
    export(run, tmp_path)
    module = module_name(run)
    file = tmp_path / f"{module}.py"
    text = file.read_text()
    assert text.count('get_attention_config("flex")') == 1
    file.write_text(
        text.replace('get_attention_config("flex")', "ScaledDotProductAttention.Config()").replace(
            "from torchtitan.trainer", "from torchtitan.models.common.attention import ScaledDotProductAttention\n"
            "from torchtitan.trainer"
        )
    )  # fmt: skip
    done = subprocess.run(
        ["sh", str(tmp_path / "predict.sh")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode != 0
    assert "model_spec.model.layers[0].attention.inner_attention" in done.stderr
    assert "ScaledDotProductAttention.Config is not modelled with context parallelism" in done.stderr
    assert "Traceback" not in done.stderr
