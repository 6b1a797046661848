"""Whatever a person writes into a file or on the command line ends in an answer or in one LedgerError."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from train_ledger import cli
from train_ledger.interop import read
from train_ledger.predict.distinct import predict_distinct
from train_ledger.spec.config import load_comparison, load_model, load_run, override
from train_ledger.spec.errors import LedgerError
from train_ledger.spec.io import SCHEMAS, read_yaml

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "config"
#: `derandomize`: the same examples on every machine.
FUZZ = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

NUMBERS = [0, -1, 1, 1.0, 1.5, 2**31, 2**63, 10**30, -(10**30), 1e308, 1e-308]
NUMBERS += [float(word) for word in ("nan", "inf", "-inf")]
WORDS = ["", " ", "../x", "/etc/passwd", "a\nb", "<script>", "$(id)", "null", "1e3", "8", "é" * 200, "\u202e"]
NASTY = st.sampled_from([None, True, False, *NUMBERS, *WORDS, [], [[]], [1], [None], {}, {"a": 1}, {"": None}])
PLAIN = st.recursive(
    NASTY | st.text(max_size=20) | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


def only_ledger_errors(function, *args, **kwargs):
    """Calls it; a LedgerError must be one line that says something."""
    try:
        return function(*args, **kwargs)
    except LedgerError as e:
        said = str(e)
    assert said.strip()
    assert "\n" not in said
    return None


def folder() -> Path:
    """A config folder with the laptop model, and room for a run and a comparison."""
    path = Path(tempfile.mkdtemp(prefix="fuzz-"))
    for part in ("models", "runs", "comparisons"):
        (path / part).mkdir()
    (path / "models/laptop.yaml").write_bytes((CONFIG / "models/laptop.yaml").read_bytes())
    return path


@pytest.fixture(scope="module")
def place() -> Path:
    return folder()


@FUZZ
@given(raw=st.binary(max_size=300) | st.text(max_size=300).map(lambda s: s.encode("utf-8", "surrogatepass")))
@example(raw=b'framework: megatron\nworld_size: 1\nmodel: "\\ud800"')
@example(raw=b"a: &a [*a]")
@example(raw=b"a: &a {<<: *a}")
@example(raw=b"{{{{{{" * 500)
@example(raw=b"? {a: 1}\n: 2")
@example(raw=b"!!python/object/apply:os.system ['true']")
@example(raw=b"a: !!binary 'x'")
@example(raw=b"a: !!int x")
@example(raw=b"a: !!float ''")
@example(raw=b"a: 2020-99-99")
@example(raw=b"a: 1_000:99:99")
@example(raw=b"\xef\xbb\xbfframework: megatron")
@example(raw=b"--- a\n--- b")
@example(raw=b"%YAML 9.9\n---\na: 1")
@example(raw=b"a: " + b"9" * 5000)
@example(raw=b"a: " + b"[" * 100 + b"]" * 100)
@example(raw=b"a: 1e999999999")
def test_any_bytes_as_a_file(place, raw):
    for path, load in (
        (place / "runs/a.yaml", load_run),
        (place / "models/b.yaml", lambda p: load_model(str(p), place)),
        (place / "comparisons/c.yaml", lambda p: load_comparison(p, place)),
        (place / "runs/a.yaml", read_yaml),
    ):
        path.write_bytes(raw)
        only_ledger_errors(load, path)


def test_an_alias_bomb_is_refused_at_once(place):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    path = place / "runs/bomb.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(LedgerError, match="values once its aliases are written out"):
        load_run(path)
    merges = ["a0: &a0 {x0: 1}"]
    merges += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}], x{i}: 1}}" for i in range(1, 30)]
    path.write_text("\n".join(merges))
    with pytest.raises(LedgerError, match="values once its aliases are written out"):
        load_run(path)


def _base(framework: str) -> dict:
    name = {
        "megatron": "megatron-tp2-pp2-dp2",
        "deepspeed": "deepspeed-zero3-dp8",
        "torchtitan": "torchtitan-fsdp4-tp2",
    }
    return {**read_yaml(CONFIG / "runs" / f"{name[framework]}.yaml"), "model": "laptop", "seq_length": 32}


def _keys(framework: str) -> list[tuple[str, ...]]:
    """Every key of a run file, nested ones as tuples, those of the framework too."""
    out: list[tuple[str, ...]] = []

    def walk(properties: dict, prefix: tuple[str, ...]) -> None:
        for key, sub in properties.items():
            out.append((*prefix, key))
            walk(sub.get("properties", {}), (*prefix, key))

    walk(read_yaml(SCHEMAS / "run.yaml")["properties"], ())
    walk(read_yaml(SCHEMAS / f"{framework}.yaml")["properties"], (framework,))
    return out


@st.composite
def mutated_run(draw):
    """A real run with one to three keys set to anything, or keys that do not exist."""
    framework = draw(st.sampled_from(["megatron", "deepspeed", "torchtitan"]))
    data = _base(framework)
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from(_keys(framework)) | st.tuples(st.text(max_size=8), st.text(max_size=8)))
        at = data
        for part in key[:-1]:
            if not isinstance(at.get(part), dict):
                at[part] = {}
            at = at[part]
        at[key[-1]] = draw(PLAIN)
    return data


@FUZZ
@given(data=mutated_run())
def test_mutated_runs_are_refused_or_predicted(place, data):
    path = place / "runs/m.yaml"
    path.write_text(yaml.safe_dump(data, allow_unicode=True), encoding="utf-8")
    run = only_ledger_errors(load_run, path)
    if run is None or run.world_size > 4096:
        return
    found = only_ledger_errors(predict_distinct, run)
    if found is not None:
        json.dumps(found[0].to_dict(), allow_nan=False)


@FUZZ
@given(
    key=st.sampled_from([k for (k, *rest) in _keys("megatron") if not rest] + ["runs", "steps", "x"]),
    value=PLAIN,
    name=st.sampled_from(["m", "../m", "a b", "", "x" * 300, "m.yaml", ".hidden"]),
)
def test_mutated_comparisons(place, key, value, name):
    (place / "runs/m.yaml").write_text(yaml.safe_dump(_base("megatron")))
    data = {"model": "laptop", "runs": {"m": {}, name: {key: value}}, "seed": 1}
    path = place / "comparisons/c.yaml"
    path.write_text(yaml.safe_dump(data, allow_unicode=True), encoding="utf-8")
    only_ledger_errors(load_comparison, path, place)


@st.composite
def layouts(draw):
    """A run that the schema allows. Three in four are tame: of sizes and degrees that are likely to fit together."""
    framework = draw(st.sampled_from(["megatron", "deepspeed", "torchtitan"]))
    tame = draw(st.sampled_from([True, True, True, False]))

    def pick(likely: list, others: list):
        return draw(st.sampled_from(likely if tame else [*likely, *others]))

    heads = pick([8], [1, 2, 3, 4, 6])
    flag = [False] if tame and framework == "torchtitan" else [True, False]
    biases = draw(st.sampled_from(flag))
    model = {
        "num_layers": pick([4, 8], [1, 3, 5, 9]),
        "hidden_size": pick([30, 60, 64], [1, 7]),
        "num_attention_heads": heads,
        "num_query_groups": draw(st.sampled_from([g for g in (2, 4, 8, 1, 3) if heads % g == 0])),
        "head_dim": pick([2, 4, 10], [5]),
        "ffn_hidden_size": pick([8, 152, 256], [1, 150]),
        "vocab_size": pick([512, 640], [1, 522, 701]),
        "seq_length": pick([16, 32], [1, 7]),
        "position_embedding": pick(["rope"], [])
        if flag == [False]
        else draw(st.sampled_from(["rope", "learned", "none"])),
        "normalization": pick(["rmsnorm"], []) if flag == [False] else draw(st.sampled_from(["rmsnorm", "layernorm"])),
        "gated_mlp": draw(st.sampled_from([True] if flag == [False] else [True, False])),
        "tie_embeddings": draw(st.booleans()),
        "qk_norm": draw(st.sampled_from(flag)),
        "mlp_bias": biases,
        "attention_output_bias": biases if tame else draw(st.booleans()),
        "qkv_bias": biases if tame else draw(st.booleans()),
    }
    tp, pp, cp, dp = pick([1, 2, 4], [3, 8]), pick([1, 2, 4], [3]), pick([1], [2]), pick([1, 2, 3, 4, 8], [7])
    if framework == "deepspeed":
        tp = pp = cp = 1
    micro, count = draw(st.integers(1, 3)), pick([4, 8], [1, 2, 3])
    parallel = {
        "tensor_parallel": tp,
        "sequence_parallel": draw(st.booleans()) if tp > 1 or not tame else False,
        "pipeline_parallel": pp,
        "virtual_pipeline_parallel": pick([1, 2], [3]) if pp > 1 or not tame else 1,
        "context_parallel": cp,
    }
    parallel |= {"data_parallel_shard": dp} if framework == "torchtitan" else {"data_parallel": dp}
    options = {
        key: draw(st.sampled_from(values))
        for key, values in {
            "megatron": {
                "use_distributed_optimizer": [True, False],
                "overlap_grad_reduce": [True, False],
                "overlap_param_gather": [True, False],
                "grad_reduce_in_fp32": [True, False],
                "bucket_size": [None, 1, 100, 10_000],
                "recompute_granularity": [None, None, "full", "selective"],
                "make_vocab_size_divisible_by": [1, 128],
            },
            "deepspeed": {
                "activation_checkpointing": [True, False],
                "zero_init": [True, False],
                "communication_data_type": [None, "fp32"],
                "zero_optimization": [
                    {"stage": stage, "reduce_bucket_size": bucket, "stage3_prefetch_bucket_size": bucket}
                    for stage in (0, 1, 2, 3)
                    for bucket in (1, 1000, 5e8)
                ],
            },
            "torchtitan": {
                "fsdp_reshard_after_forward": ["default", "always", "never"],
                "activation_checkpoint": ["none", "selective", "full"],
                "chunked_loss": [True, False],
                "num_chunks": [1, 3, 8],
                "spmd_backend": ["spmd_types", "partial_dtensor", "full_dtensor"],
                "local_batch_size": [None, None, micro * count, 2],
                "pipeline_parallel_schedule": ["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble"],
                "pipeline_parallel_layers_per_stage": [None, None, 1, 3],
                "pipeline_parallel_first_stage_less_layers": [1, 0, 3],
                "pipeline_parallel_last_stage_less_layers": [1, 0, 2],
                "module_fqns_per_model_part": [None, None, None, [["tok_embeddings", "layers.0"], ["lm_head"]]],
            },
        }[framework].items()
    }
    run = {
        "framework": framework,
        "world_size": tp * pp * cp * dp,
        "model": "fuzz",
        "micro_batch": micro,
        "global_batch": micro * count * dp,
        "parallel": parallel,
        "optimizer": {"clip_grad": draw(st.sampled_from([0, 1.0])), "decay_norms": draw(st.booleans())},
        framework: options,
    }
    return model, run, draw(st.sampled_from(["steady", "first", "log"]))


@settings(FUZZ, max_examples=300)
@given(case=layouts())
def test_layouts_are_refused_by_name_or_predicted(place, case):
    model, data, step = case
    (place / "models/fuzz.yaml").write_text(yaml.safe_dump(model))
    path = place / "runs/layout.yaml"
    path.write_text(yaml.safe_dump(data))
    try:
        run = load_run(path)
        prediction, classes = predict_distinct(run, step)
    except LedgerError as e:
        refused = e
    else:
        refused = None
    if refused:
        assert refused.key, f"no key is named: {refused}"
        return
    assert sorted(rank for ranks in classes for rank in ranks) == list(range(run.world_size))
    names = {g.name for g in prediction.groups}
    for ledger in prediction.ranks:
        assert ledger.resident_bytes >= ledger.state_bytes > 0
        for c in ledger.containers:
            assert min(c.numel, c.pad_numel) >= 0
            assert sum(n * count for n, count in c.blocks) in (0, c.bytes), c
        for call in ledger.collectives:
            assert call.count > 0
            assert call.group in names, call
            assert min(call.in_numel, call.out_numel) >= 0
    json.dumps(prediction.to_dict(), allow_nan=False)


FLAGS = "num-layers hidden-size bf16 seq-length vocab-size num-attention-heads save tensor-model-parallel-size foo=bar"
SCRIPT_WORDS = [f"--{flag}" for flag in FLAGS.split()]
SCRIPT_WORDS += [
    "-1",
    "0",
    "2",
    "nan",
    "1e999",
    "'a",
    "b'",
    '"x',
    "$A",
    "${B[@]}",
    "(",
    ")",
    ";",
    "|",
    ">",
    "\\",
    "#",
    "--",
]
SCRIPT_WORDS += ["pretrain_gpt.py", "A=1", "B=(", "torchrun"]


@FUZZ
@given(text=st.text(max_size=200) | st.lists(st.sampled_from(SCRIPT_WORDS), max_size=25).map(" ".join))
def test_any_text_as_a_launch_script(place, text):
    for name in ("run.sh", "flags.yaml"):
        path = place / name
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        only_ledger_errors(read, "megatron_args", str(path), world_size="8")


DS = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    "zero_optimization": {"stage": 3},
}
HF = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 32,
}


MORE_KEYS = "train_batch_size fp16 zero_optimization rope_scaling rope_parameters head_dim hidden_act data_types "
MORE_KEYS += "tie_word_embeddings num_key_value_heads gradient_clipping quantization_config"


@FUZZ
@given(
    where=st.sampled_from(["ds", "hf"]),
    key=st.sampled_from([*DS, *HF, *MORE_KEYS.split()]) | st.text(max_size=10),
    value=PLAIN,
    family=st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "bert"]),
)
def test_mutated_deepspeed_and_hugging_face_files(place, where, key, value, family):
    ds, hf = copy.deepcopy(DS), {**HF, "model_type": family}
    (ds if where == "ds" else hf)[key] = value
    for name, data in (("ds_config.json", ds), ("config.json", hf)):
        (place / name).write_text(json.dumps(data), encoding="utf-8")
    found = only_ledger_errors(
        read, "deepspeed", str(place / "ds_config.json"), world_size="8", hf_config=str(place / "config.json")
    )
    if found is not None:
        only_ledger_errors(predict_distinct, found.run)


@FUZZ
@given(raw=st.binary(max_size=100), size=st.sampled_from(["8", "0", "-1", "x", "", "1e3", "9" * 40, None]))
def test_any_bytes_as_json(place, raw, size):
    (place / "ds_config.json").write_bytes(raw)
    (place / "config.json").write_bytes(raw)
    only_ledger_errors(
        read, "deepspeed", str(place / "ds_config.json"), world_size=size, hf_config=str(place / "config.json")
    )


@FUZZ
@given(
    assignments=st.lists(
        st.text(max_size=30) | st.tuples(st.text(max_size=8), st.text(max_size=8)).map("=".join), max_size=3
    )
)
def test_any_assignment(assignments):
    only_ledger_errors(override, assignments)


COMMANDS = ["predict", "groups", "diff", "explain", "export", "list", str(CONFIG / "runs/deepspeed-zero3-dp8.yaml")]
OPTIONS = (
    "--rank 0 distinct --format json --set steps=2 --model laptop ../x --device h200 --world-size 8 --comparison -h"
)


@settings(FUZZ, max_examples=100)
@given(argv=st.lists(st.sampled_from([*COMMANDS, *OPTIONS.split(), "--deepspeed", "/dev/null", "\x00"]), max_size=6))
def test_any_command_line(argv, capsys, monkeypatch, place):
    monkeypatch.chdir(place)
    try:
        code = cli.main(argv)
    except SystemExit as e:  # argparse's own way out
        code = e.code
    assert code in (0, 1, 2)
    assert "Traceback" not in capsys.readouterr().err
