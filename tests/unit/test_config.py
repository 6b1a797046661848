"""From config files to runs: what goes before what, what is refused, and which file and key an error names."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from train_ledger.spec.config import load_compared_run, load_comparison, load_model, load_run, override, resolve_run
from train_ledger.spec.errors import ConfigError, DataError
from train_ledger.spec.io import check_name, read_json, read_text, read_yaml, write_json
from train_ledger.spec.run import Run

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "config"
RUNS = sorted((CONFIG / "runs").glob("*.yaml"))


@pytest.fixture
def folder(tmp_path):
    """A config folder with one model, one run and one comparison."""
    for part in ("models", "runs", "comparisons"):
        (tmp_path / part).mkdir()
    (tmp_path / "models/small.yaml").write_text(
        "{num_layers: 2, hidden_size: 8, num_attention_heads: 2, ffn_hidden_size: 16, vocab_size: 10, seq_length: 4}"
    )
    (tmp_path / "runs/a.yaml").write_text(
        "framework: megatron\nworld_size: 2\nmodel: small\nparallel: {data_parallel: 2}\n"
    )
    (tmp_path / "comparisons/c.yaml").write_text(
        "model: small\nsteps: 7\nseed: 5\nworld: fake\nruns: {a: {seq_length: 2}}\n"
    )
    return tmp_path


def said(function, *args, **kwargs) -> str:
    """The error's one line."""
    with pytest.raises((ConfigError, DataError)) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("path", RUNS, ids=lambda p: p.stem)
def test_a_resolved_run_survives_its_own_form(path):
    run = load_run(path)
    assert Run.from_dict(run.to_dict(), source=run.source) == run
    assert len(run.sha256()) == 64


def test_what_goes_before_what(folder):
    alone = load_run(folder / "runs/a.yaml")
    assert (alone.steps, alone.seed, alone.world, alone.seq_length) == (4, 1234, "cpu", 4)
    compared = load_comparison("c", folder).runs["a"]
    assert (compared.steps, compared.seed, compared.world, compared.seq_length) == (7, 5, "fake", 2)
    assert load_compared_run(folder / "runs/a.yaml", "c", overrides={"seq_length": 3}).seq_length == 3
    assert load_comparison("c", folder, world="cpu").runs["a"].world == "cpu"
    (folder / "runs/a.yaml").write_text((folder / "runs/a.yaml").read_text() + "steps: 9\n")
    assert load_comparison("c", folder).runs["a"].steps == 9


def test_a_whole_number_with_a_point_is_an_integer(folder):
    path = folder / "runs/a.yaml"
    path.write_text("framework: megatron\nworld_size: 2.0\nmodel: small\nparallel: {data_parallel: 2.0}\n")
    assert load_run(path) == load_run(path)
    assert isinstance(load_run(path).world_size, int)
    assert isinstance(load_run(path).parallel.data_parallel, int)


def test_merge_keys_and_aliases_are_fine_in_measure(folder):
    path = folder / "runs/a.yaml"
    path.write_text("framework: megatron\nworld_size: &n 2\nmodel: small\nparallel: {data_parallel: *n}\n")
    assert load_run(path).parallel.data_parallel == 2


def test_numbers_as_people_write_them():
    assert override(["a=3e-4", "b.c=5e8", "d=1_000", "e=", "f=x"]) == {
        "a": 3e-4,
        "b": {"c": 5e8},
        "d": 1000,
        "e": None,
        "f": "x",
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("framework: megatron\nworld_size: 2\nworld_size: 3", "key 'world_size' is given twice"),
        ("framework: megatron\nworld_size: 2\nbatch: 3", "a.yaml: batch: unknown key; known here"),
        ("framework: megatron", "a.yaml: world_size: is missing"),
        ("framework: jax\nworld_size: 1", "a.yaml: framework: 'jax' is not one of"),
        ("framework: megatron\nworld_size: 0", "a.yaml: world_size: 0 is less than the minimum"),
        ("framework: megatron\nworld_size: -8", "a.yaml: world_size: -8 is less"),
        ("framework: megatron\nworld_size: 1.5", "a.yaml: world_size: 1.5 is not of type 'integer'"),
        ("framework: megatron\nworld_size: 1000000000000", "a.yaml: world_size: 1000000000000 is greater"),
        ("framework: megatron\nworld_size: '8'", "a.yaml: world_size: '8' is not of type 'integer'"),
        ("framework: megatron\nworld_size: .inf", "a.yaml: world_size: inf is not of type 'integer'"),
        ("framework: megatron\nworld_size: true", "a.yaml: world_size: True is not of type 'integer'"),
        (
            "framework: megatron\nworld_size: 1\noptimizer: {lr: .nan}",
            "a.yaml: optimizer.lr: nan is not a finite number",
        ),
        ("framework: megatron\nworld_size: 1\nmodel: ../secrets", "a.yaml: model: '../secrets' is not a name"),
        ("framework: megatron\nworld_size: 1\nmodel: none-such", "there is no model 'none-such'"),
        ("framework: megatron\nworld_size: 1\ndeepspeed: {}", "settings of deepspeed in a run of megatron"),
        (
            "framework: megatron\nworld_size: 8\nmodel: small",
            "world_size: is 8, but tensor 1 x context 1 x pipeline 1 x data 1",
        ),
        ("framework: megatron\nworld_size: 3\nmodel: small\nparallel: {tensor_parallel: 3}", "3 does not divide"),
        ("framework: megatron\nworld_size: 1\nmodel: small\nmegatron: {bucket_size: x}", "megatron.bucket_size: 'x'"),
        ("framework: megatron\nworld_size: 1\nmodel: small\nparallel: {data_parallel_shard: 2}", "is torchtitan's"),
        (
            "framework: megatron\nworld_size: 1\nmodel: small\nsteps: 2\nprobe: {collective_steps: [3]}",
            "come after the last step",
        ),
        (
            "framework: megatron\nworld_size: 1\nmodel: small\nmicro_batch: 3\nglobal_batch: 4",
            "global_batch: 4 sequences do not",
        ),
        ("- a list", "must hold a mapping"),
        ("a: [", "is not valid YAML"),
        ("1: 2", "key 1 is not a word"),
    ],
)
def test_refusals_name_file_and_key(folder, text, words):
    path = folder / "runs/a.yaml"
    path.write_text(text)
    message = said(load_run, path)
    assert words in message
    assert message.startswith(str(path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("num_layers: 0", "num_layers: 0 is less than the minimum"),
        ("num_attention_heads: 3", "num_attention_heads: 3 heads do not divide hidden_size 8"),
        ("head_dim: 3", "head_dim: 3 is odd"),
        ("norm_eps: 2", "norm_eps: 2 is greater than the maximum"),
        ("position_embedding: alibi", "position_embedding: 'alibi' is not one of"),
        ("experts: 8", "experts: unknown key"),
        ("rope_scaling: {rope_type: [llama3]}", "rope_scaling: needs rope_type"),
        ("rope_scaling: {factor: 2.0}", "rope_scaling: needs rope_type"),
        ("rope_scaling: {type: linear}", "rope_scaling: linear scaling needs factor"),
        ("rope_scaling: {type: linear, factor: 0}", "rope_scaling: factor is '0', not a number above 0"),
        ("rope_scaling: {rope_type: llama3, factor: eight}", "rope_scaling: factor is 'eight', not a number"),
    ],
)
def test_models_are_checked(folder, change, words):
    path = folder / "models/small.yaml"
    key = change.partition(":")[0]
    old = read_yaml(path)
    old.pop(key, None)
    path.write_text("\n".join([*(f"{k}: {v}" for k, v in old.items()), change]))
    assert words in said(load_model, str(path), folder)


def test_rope_scaling_of_kind_default_is_none(folder):
    path = folder / "models/small.yaml"
    path.write_text(
        "\n".join([*(f"{k}: {v}" for k, v in read_yaml(path).items()), "rope_scaling: {rope_type: default}"])
    )
    assert load_model(str(path), folder).rope_scaling is None


def test_a_comparison_names_its_own_file(folder):
    path = folder / "comparisons/c.yaml"
    for text, words in (
        ("model: none-such\nruns: {a: }", "c.yaml: model: there is no model"),
        ("model: small\nruns: {b: }", "c.yaml: runs.b: there is no file"),
        ("model: small\nruns: {'../a': }", "c.yaml: runs"),
        ("model: small\nruns: {}", "c.yaml: runs: {} should be non-empty"),
        ("model: small\nruns: {a: {seq_length: 0}}", "c.yaml: runs.a.seq_length: 0 is less"),
        ("model: small\nruns: {a: {seq_length: 0, x: 1}}", "c.yaml: runs.a."),
        ("model: small\nruns: {a: {global_batch: 3}}", "c.yaml: runs.a.global_batch: 3 sequences"),
        ("model: small\nruns: {a: {micro_batch: 3}}", "a.yaml (as "),
    ):
        path.write_text(text)
        assert words in said(load_comparison, "c", folder), text
    path.write_text("model: small\nruns: {a: }")
    assert "holds no run 'b'; its runs: a" in said(load_compared_run, folder / "runs/b.yaml", "c")


def test_files_that_cannot_be_read(tmp_path):
    assert "Is a directory" in said(read_yaml, tmp_path)
    assert "No such file" in said(read_yaml, tmp_path / "none.yaml")
    assert "null byte" in said(read_yaml, "a\0b")
    large = tmp_path / "large.yaml"
    large.write_text("a" * 2_000_000)
    assert "is larger than" in said(read_text, large)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("a: é".encode("latin-1"))
    assert "is not UTF-8 text" in said(read_yaml, latin)


def test_data_files_are_checked(tmp_path):
    path = tmp_path / "x.json"
    assert "cannot be read" in said(read_json, path, "s/1")
    path.write_text('{"schema": "s/1"')
    assert "may be truncated" in said(read_json, path, "s/1")
    path.write_text('{"schema": "other/2"}')
    assert "is 'other/2', expected 's/1'" in said(read_json, path, "s/1")
    write_json(path, {"schema": "s/1", "a": [1, None]})
    assert read_json(path, "s/1")["a"] == [1, None]
    with pytest.raises(ValueError, match="Out of range"):
        write_json(path, {"a": math.nan})
    assert read_json(path, "s/1")["a"] == [1, None]
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("name", ["../x", "", ".hidden", "a/b", "a b", "x" * 101, "a\n", "é"])
def test_names_are_fit_for_files(name):
    assert "is not a name" in said(check_name, name, key="run")


def test_runs_that_were_not_read_from_a_run_file(folder):
    model = load_model("small", folder)
    data = {"framework": "megatron", "world_size": 1}
    assert resolve_run("x", data, "x.sh", folder, model=model).model == model
    assert "x.sh: world_size: is missing" in said(
        resolve_run, "x", {"framework": "megatron"}, "x.sh", folder, model=model
    )


def test_a_models_name_away_from_config(folder, tmp_path, monkeypatch):
    """Beside the run file's folder first, then ./config, then the checkout."""
    away = tmp_path / "elsewhere/deep/a.yaml"
    away.parent.mkdir(parents=True)
    away.write_text((folder / "runs/a.yaml").read_text())
    assert "no model 'small'; known: none in" in said(load_run, away)
    assert load_run(away, overrides={"model": "laptop"}).model == load_model("laptop", CONFIG)
    (tmp_path / "here/config/models").mkdir(parents=True)
    (tmp_path / "here/config/models/small.yaml").write_text((folder / "models/small.yaml").read_text())
    monkeypatch.chdir(tmp_path / "here")
    assert load_run(away).model == load_model("small", folder)
    assert "small in config/models; laptop, " in said(load_run, away, overrides={"model": "nope"})


@pytest.mark.parametrize("name", ["nope", "model.layers.99.self_attn.o_proj.weight", "lm_head"])
def test_the_followed_weight_is_one_of_the_models(folder, name):
    words = said(load_run, folder / "runs/a.yaml", overrides={"probe": {"lifeline_weight": name}})
    assert f"probe.lifeline_weight: the model has no weight {name!r}; names are Hugging Face Llama's" in words


def test_following_no_weight_and_one_of_a_single_layer(folder):
    path, none = folder / "runs/a.yaml", {"probe": {"lifeline_weight": ""}}
    assert load_run(path).probe.lifeline_weight == "model.layers.1.self_attn.o_proj.weight"
    assert load_run(path, overrides=none).probe.lifeline_weight == ""
    model = folder / "models/small.yaml"
    model.write_text(model.read_text().replace("num_layers: 2", "num_layers: 1"))
    assert load_run(path).probe.lifeline_weight == "model.layers.0.self_attn.o_proj.weight"
    assert load_run(path, overrides=none).probe.lifeline_weight == ""
    asked = {"probe": {"lifeline_weight": "model.layers.1.self_attn.o_proj.weight"}}
    assert "the model has no weight" in said(load_run, path, overrides=asked)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_are_as_private_as_the_umask_says(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        write_json(tmp_path / "a.json", {})
    finally:
        os.umask(before)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == mode


def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch):
    write_json(tmp_path / "a.json", {"old": 1})

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as e:
        write_json(tmp_path / "a.json", {"new": 1})
    assert e.value.filename == str(tmp_path / "a.json")
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert "old" in (tmp_path / "a.json").read_text()
