"""Reading what people already have: Megatron-LM's flags, ds_config.json, config.json. No framework is imported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from train_ledger import cli
from train_ledger.interop import deepspeed, megatron, read
from train_ledger.interop.export import export
from train_ledger.interop.hf import read_config
from train_ledger.interop.shell import read_flags
from train_ledger.predict import predict
from train_ledger.predict.distinct import predict_distinct
from train_ledger.spec.config import load_comparison, load_model, load_run, model_shape, resolve_run
from train_ledger.spec.errors import ConfigError
from train_ledger.spec.run import Run

ROOT = Path(__file__).parents[2]
RUNS = [load_run(path) for path in sorted((ROOT / "config/runs").glob("*.yaml"))]
RUNS += [
    replace(run, name=f"{run.name}-{name}")
    for name in ("laptop", "paper")
    for run in load_comparison(name, ROOT / "config").runs.values()
]

SCRIPT = r"""#!/bin/bash
# Llama 8B
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8
TP=2; PP="${PP:-2}"
HIDDEN=4096 # width
MODEL_ARGS=(
    --num-layers 32
    --hidden-size $HIDDEN   # as above
    --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights
)
MODEL_ARGS+=(--vocab-size 128256)
PARALLEL="--tensor-model-parallel-size ${TP} --pipeline-model-parallel-size ${PP} --sequence-parallel"
if [ -n "$DEBUG" ]; then
  echo debug > /dev/null
fi
torchrun --nproc_per_node ${GPUS} --nnodes=1 "$ROOT/pretrain_gpt.py" \
    "${MODEL_ARGS[@]}" $PARALLEL \
    --micro-batch-size 1 --global-batch-size 16 --bf16 \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --lr 3e-4 --save 'a folder' --log-interval 10 2>&1 | tee log.txt
"""


def flags(tmp_path, text: str, name: str = "run.sh") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def same_prediction(a, b) -> None:
    """Every rank keeps and sends the same."""
    (left, classes), (right, others) = predict_distinct(a), predict_distinct(b)
    assert classes == others
    assert [x.to_dict() for x in left.ranks] == [x.to_dict() for x in right.ranks]
    assert left.groups == right.groups


def test_a_launch_script_is_read_without_running_it(tmp_path):
    found = read("megatron_args", flags(tmp_path, SCRIPT), world_size="8")
    run = found.run
    assert (run.parallel.tensor_parallel, run.parallel.pipeline_parallel, run.parallel.data_parallel) == (2, 2, 2)
    assert run.model.num_parameters == 8_030_261_248
    assert run.parallel.sequence_parallel
    assert run.settings["overlap_param_gather"]
    assert run.num_micro_batches == 8
    assert set(found.ignored) == {"--save", "--log-interval"}
    assert any("transformer_engine" in note for note in found.notes)


def test_a_plain_list_and_a_mapping_say_the_same(tmp_path):
    script = read("megatron_args", flags(tmp_path, SCRIPT), world_size="8").run
    found = read_flags(flags(tmp_path, SCRIPT))
    lines = [" ".join([f"--{flag}", *(f"'{v}'" for v in values)]) for flag, values in found.items()]
    plain = read("megatron_args", flags(tmp_path, "\n".join(lines), "run.txt"), world_size="8").run
    mapping = {f"--{flag}": (True if not v else v[0] if len(v) == 1 else v) for flag, v in found.items()}
    as_yaml = read("megatron_args", flags(tmp_path, json.dumps(mapping), "run.yaml"), world_size="8").run
    nested = json.dumps({"ENV_VARS": {"A": 1}, "MODEL_ARGS": mapping, "TEST_TYPE": "regular"})
    nested_yaml = read("megatron_args", flags(tmp_path, nested, "run.yml"), world_size="8").run
    assert script == replace(plain, source=script.source) == replace(as_yaml, source=script.source)
    assert script == replace(nested_yaml, source=script.source)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("--bf16 --num-experts 8", "--num-experts: could change bytes or calls and is not modelled"),
        ("--bf16 --tp-comm-overlap", "--tp-comm-overlap: could change"),
        ("--bf16 --no-such-flag", "--no-such-flag: could change"),
        ("--bf16 --expert-model-parallel-size 2", "--expert-model-parallel-size: '2' could change"),
        ("--bf16 --optimizer sgd", "--optimizer: 'sgd' could change"),
        ("--bf16 --transformer-impl inference_optimized", "--transformer-impl: 'inference_optimized' is not modelled"),
        ("--bf16 --num-layers many", "--num-layers: 'many' is not a number"),
        ("--bf16 --num-layers nan", "--num-layers: 'nan' is not a finite number"),
        ("--bf16 --num-layers -3", "--num-layers: -3 is less than the minimum"),
        ("--bf16 --num-layers 3 4", "--num-layers: takes one value, not 2"),
        ("--bf16 --swiglu yes", "--swiglu: is a switch"),
        (
            "--bf16 --tensor-model-parallel-size 3",
            "world size (8) is not divisible by tensor 3 x pipeline 2 x context 1",
        ),
        ("--bf16 --seq-length $(seq 1)", "--seq-length: '$' is known to the shell only"),
        ("--bf16 --hidden-size $UNKNOWN", "--hidden-size: '$UNKNOWN' is known to the shell only"),
        ("--bf16 --context-parallel-size 2", "--cp-comm-type: 'p2p' is not modelled; known: all_gather"),
        ("--fp16", "--bf16: is missing"),
        (
            "--bf16 --num-layers-per-virtual-pipeline-stage 5",
            "--num-layers-per-virtual-pipeline-stage: number of layers",
        ),
    ],
)
def test_flags_are_refused_by_name(tmp_path, change, words):
    path = flags(tmp_path, SCRIPT.replace("--bf16", change))
    with pytest.raises(ConfigError) as caught:
        read("megatron_args", path, world_size="8", without=["fp16"])
    assert words in str(caught.value)
    assert str(caught.value).startswith(path)


def test_without_leaves_a_flag_out(tmp_path):
    path = flags(tmp_path, SCRIPT.replace("--bf16", "--bf16 --tp-comm-overlap"))
    assert read("megatron_args", path, world_size="8", without=["--tp-comm-overlap"]).run.framework == "megatron"


def test_virtual_stages_by_either_flag(tmp_path):
    by_layers = SCRIPT.replace("--bf16", "--bf16 --num-layers-per-virtual-pipeline-stage 4")
    by_count = SCRIPT.replace("--bf16", "--bf16 --num-virtual-stages-per-pipeline-rank 4")
    runs = [read("megatron_args", flags(tmp_path, text), world_size="8").run for text in (by_layers, by_count)]
    assert runs[0] == runs[1]
    assert runs[0].parallel.virtual_pipeline_parallel == 4


def test_context_parallel_with_gathered_keys_and_values(tmp_path):
    own = load_run(
        ROOT / "config/runs/megatron-tp2-pp2-dp2.yaml",
        overrides={"parallel": {"context_parallel": 2, "data_parallel": 1}, "global_batch": 4},
    )
    export(own, tmp_path)
    assert "--context-parallel-size 2 --cp-comm-type all_gather" in (tmp_path / "run.sh").read_text()
    same_prediction(read("megatron_args", str(tmp_path / "run.sh"), world_size="8").run, replace(own, world="nccl"))


def test_defaults_are_megatrons(tmp_path):
    text = "--bf16 --num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --vocab-size 50257"
    run = read("megatron_args", flags(tmp_path, text + " --max-position-embeddings 1024"), world_size="8").run
    m = run.model
    assert (m.ffn_hidden_size, m.normalization, m.position_embedding) == (2048, "layernorm", "learned")
    assert m.tie_embeddings
    assert m.qkv_bias
    assert not run.settings["use_distributed_optimizer"]
    # Published for this very model: 64,109,568 parameters with the vocabulary padded to 50,304.
    assert m.num_parameters + (50_304 - 50_257) * 512 == 64_109_568
    swiglu = read(
        "megatron_args", flags(tmp_path, text + " --swiglu --position-embedding-type rope"), world_size="8"
    ).run
    assert swiglu.model.ffn_hidden_size == 1344


DS = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e7,
        "stage3_prefetch_bucket_size": 5e7,
        "stage3_param_persistence_threshold": 1e5,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "sub_group_size": 1e9,
    },
    "wall_clock_breakdown": True,
    "memory_breakdown": False,
    "flops_profiler": {"enabled": True, "profile_step": 20, "module_depth": -1, "top_modules": 3, "detailed": False},
}


def ds(tmp_path, **changes) -> str:
    data = {**DS, **changes}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))
    return str(path)


def test_the_design_texts_ds_config(tmp_path):
    found = read(
        "deepspeed", ds(tmp_path), world_size="8", overrides={"model": str(ROOT / "config/models/llama3.2-1b.yaml")}
    )
    own = load_run(ROOT / "config/runs/deepspeed-zero3-dp8.yaml")
    same_prediction(found.run, replace(own, world="nccl"))
    assert "flops_profiler.enabled" in found.ignored


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fp16": {"enabled": True}}, "fp16.enabled: True could change"),
        ({"bf16": {"enabled": False}}, "bf16.enabled: is not true"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer.device: cpu could",
        ),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "zero_hpz_partition_size: 8 could"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: 4 is not one of"),
        ({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}, "reduce_bucket_size: is 'auto'"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type: 'OneBitAdam' is not modelled"),
        ({"pipeline": {"stages": 2}}, "pipeline.stages: could change"),
        ({"train_batch_size": 17}, "train_batch_size is not equal to micro_batch_per_gpu"),
        ({"train_micro_batch_size_per_gpu": None, "gradient_accumulation_steps": None}, "Either train_batch_size or"),
        ({"train_micro_batch_size_per_gpu": 1.5}, "train_micro_batch_size_per_gpu: 1.5 has to be an integer"),
    ],
)
def test_keys_are_refused_by_name(tmp_path, changes, words):
    with pytest.raises(ConfigError) as caught:
        read(
            "deepspeed",
            ds(tmp_path, **changes),
            world_size="8",
            overrides={"model": str(ROOT / "config/models/laptop.yaml")},
        )
    assert words in str(caught.value)


def test_a_key_given_twice_is_refused(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"bf16": {"enabled": true}, "bf16": {"enabled": false}}')
    with pytest.raises(ConfigError, match="key 'bf16' is given twice"):
        read("deepspeed", str(path), world_size="8")


#: config.json as published (tests/data/huggingface), with the parameter counts that the models' authors state.
HUGGING_FACE = {
    "llama3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "gpt2": 124_439_808,
    "pythia-160m": 162_322_944,
}
PUBLISHED = ROOT / "tests/data/huggingface"


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_published_models_have_their_published_size(tmp_path, name):
    path, parameters = PUBLISHED / f"{name}.json", HUGGING_FACE[name]
    shape = model_shape(name, read_config(str(path)).model, path)
    assert shape.num_parameters == parameters
    found = read("deepspeed", ds(tmp_path), world_size="8", hf_config=str(path))
    assert predict_distinct(found.run)[0].ranks[0].state_bytes >= 2 * parameters


def test_rope_parameters_of_transformers_5(tmp_path):
    old = json.loads((PUBLISHED / "llama3.2-1b.json").read_text())
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_theta": 500000.0, **old["rope_scaling"]}
    shapes = []
    for data in (old, new):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(data))
        shapes.append(model_shape("m", read_config(str(path)).model, path))
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mixtral"}, "model_type: 'mixtral' is not one of llama"),
        ({"num_local_experts": 8}, "num_local_experts: could change"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: could change"),
        ({"hidden_size": "big"}, "hidden_size: 'big' is not of type 'integer'"),
        ({"num_attention_heads": None}, "num_attention_heads: is missing"),
        ({"hidden_act": "relu"}, "hidden_act: 'relu' is not modelled"),
        ({"attention_bias": 1}, "attention_bias: '1' is not true or false"),
        ({"num_hidden_layers": 2.5}, "config.json: num_hidden_layers: 2.5 is not of type 'integer'"),
        ({"num_hidden_layers": None}, "config.json: num_hidden_layers: is missing"),
        ({"num_key_value_heads": 5}, "config.json: num_key_value_heads: 32 attention heads do not divide"),
    ],
)
def test_hugging_face_keys_are_refused_by_name(tmp_path, change, words):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads((PUBLISHED / "llama3.2-1b.json").read_text()), **change}))
    with pytest.raises(ConfigError) as caught:
        read("deepspeed", ds(tmp_path), world_size="8", hf_config=str(path))
    assert words in str(caught.value)


@pytest.mark.parametrize("path", sorted((ROOT / "config/models").glob("*.yaml")), ids=lambda p: p.stem)
def test_a_shape_survives_hugging_faces_form(tmp_path, path):
    shape = load_model(str(path), ROOT / "config")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(deepspeed.hf_config(shape)))
    back = model_shape(shape.name, read_config(str(file)).model, file)
    assert replace(back, seq_length=shape.seq_length) == shape


@pytest.mark.parametrize("run", [r for r in RUNS if r.framework != "torchtitan"], ids=lambda r: r.name)
def test_exported_runs_come_back_to_the_same_prediction(tmp_path, monkeypatch, capsys, run):
    """Of torchtitan's runs tests/integration/test_export_native.py says so, since reading one imports torchtitan."""
    export(run, tmp_path)
    if run.framework == "megatron":
        back = read("megatron_args", str(tmp_path / "run.sh"), world_size=str(run.world_size)).run
    else:
        back = read(
            "deepspeed",
            str(tmp_path / "ds_config.json"),
            world_size=str(run.world_size),
            hf_config=str(tmp_path / "config.json"),
            overrides={"seq_length": run.seq_length},
        ).run
    same_prediction(back, replace(run, world="nccl"))
    # predict.sh names the command that reads it back.
    command = (tmp_path / "predict.sh").read_text().splitlines()[-1].removesuffix(' "$@"').split()
    monkeypatch.chdir(tmp_path)
    assert cli.main([*command[1:], "--rank", "0", "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)["ranks"][0]
    assert printed == json.loads(json.dumps(predict_distinct(replace(run, world="nccl"))[0].ranks[0].to_dict()))


def swept(framework: str) -> list[Run]:
    """The runs of a framework's table of configurations."""
    entries = yaml.safe_load((ROOT / f"tests/data/{framework}_sweep.yaml").read_text())
    return [
        resolve_run(e["name"], e["run"], e["name"], "config", model=model_shape(e["name"], e["model"], e["name"]))
        for e in entries
    ]


def test_megatrons_table_of_configurations_comes_back(tmp_path):
    for run in swept("megatron"):
        export(run, tmp_path)
        back = read("megatron_args", str(tmp_path / "run.sh"), world_size=str(run.world_size)).run
        same_prediction(back, replace(run, world="nccl"))


def test_deepspeeds_table_of_configurations_comes_back(tmp_path, monkeypatch, capsys):
    """Shapes that no Hugging Face family has come back through a model file."""
    monkeypatch.chdir(tmp_path)
    for run in swept("deepspeed"):
        for file in tmp_path.iterdir():
            file.unlink()
        written = {path.name for path in export(run, tmp_path)}
        assert len(written & {"config.json", "model.yaml"}) == 1
        command = (tmp_path / "predict.sh").read_text().splitlines()[-1].removesuffix(' "$@"').split()
        assert cli.main([*command[1:], "--rank", "0", "--format", "json"]) == 0
        printed = json.loads(capsys.readouterr().out)["ranks"][0]
        assert printed == json.loads(json.dumps(predict(replace(run, world="nccl"), [0]).ranks[0].to_dict())), run.name


def test_every_flag_has_one_place():
    lists = (megatron.modelled(), megatron.IGNORED, frozenset(megatron.NEUTRAL))
    assert sum(map(len, lists)) == len(frozenset().union(*lists))
    read_keys = {*deepspeed.RENAMED, *deepspeed.OTHER, *(f"zero_optimization.{key}" for key in deepspeed.ZERO)}
    assert not read_keys & deepspeed.IGNORED
    assert not read_keys & set(deepspeed.NEUTRAL)


@pytest.mark.parametrize("size", ["0", "-8", "x", "", "1e3", "9" * 30])
def test_world_size_must_be_a_count(tmp_path, size):
    with pytest.raises(ConfigError, match="--world-size"):
        read("megatron_args", flags(tmp_path, SCRIPT), world_size=size)
    with pytest.raises(ConfigError, match="--world-size: is needed"):
        read("megatron_args", flags(tmp_path, SCRIPT), world_size=None)


def test_a_model_that_is_given_twice_is_refused(tmp_path):
    hf = str(PUBLISHED / "llama3.2-1b.json")
    with pytest.raises(ConfigError, match="--hf-config: the model is given twice"):
        read("deepspeed", ds(tmp_path), world_size="8", hf_config=hf, overrides={"model": "laptop"})


def test_torchtitan_must_name_a_function():
    for target in ("nothing", "no.such.module:f", "json:loads", "builtins:exit"):
        with pytest.raises(ConfigError, match="--torchtitan"):
            read("torchtitan", target, world_size="8")
