"""The command line: what it prints, how it fails, and how fast it starts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from train_ledger import cli
from train_ledger.spec.config import load_comparison
from train_ledger.spec.io import read_json

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "config/runs"
CUT = "model.layers.0.mlp.down_proj.weight"  # its master crosses two ranks of the distributed optimizer
MEGATRON, DEEPSPEED, TORCHTITAN = (
    str(RUNS / f"{name}.yaml") for name in ("megatron-tp2-pp2-dp2", "deepspeed-zero3-dp8", "torchtitan-fsdp4-tp2")
)
ALL_RUNS = sorted(str(p) for p in RUNS.glob("*.yaml"))
LAPTOP_RUNS = [str(RUNS / f"{name}.yaml") for name in load_comparison("laptop", ROOT / "config").runs]


def run(capsys, *argv: str, code: int = 0) -> str:
    """What the command prints on stdout, or on stderr where it fails."""
    assert cli.main(list(argv)) == code
    out = capsys.readouterr()
    if code:
        assert len(out.err.splitlines()) == 1, out.err
        return out.err
    return out.out


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (MEGATRON, {0: 4_495_638_528, 3: 4_495_638_528, 4: 4_495_663_104, 7: 4_495_663_104}),
        (TORCHTITAN, dict.fromkeys(range(8), 2_997_100_544)),
    ],
)
def test_state_of_the_paper_runs(capsys, path, expected):
    data = json.loads(run(capsys, "predict", path, "--model", "llama3.2-1b", "--format", "json"))
    state = {r["rank"]: r["state_bytes"] for r in data["ranks"]}
    assert len(state) == data["world_size"] == 8
    assert {rank: state[rank] for rank in expected} == expected


def test_resident_of_the_deepspeed_run(capsys):
    data = json.loads(run(capsys, "predict", DEEPSPEED, "--model", "llama3.2-1b", "--format", "json"))
    assert {r["resident_bytes"] for r in data["ranks"]} == {3_097_100_557}


@pytest.mark.parametrize("path", LAPTOP_RUNS)
def test_json_is_the_pipelines_file(capsys, tmp_path, path):
    file = tmp_path / "predict.json"
    file.write_text(run(capsys, "predict", path, "--comparison", "laptop", "--format", "json"))
    data = read_json(file, "train-ledger/predict/1", "predict")
    for rank in data["ranks"]:
        assert rank["resident_bytes"] == sum(c["bytes"] for c in rank["containers"])


@pytest.mark.parametrize("path", ALL_RUNS)
@pytest.mark.parametrize("more", [[], ["--model", "laptop"], ["--device", "h200"], ["--step", "first"]])
def test_tables_fit_a_page(capsys, path, more):
    text = run(capsys, "predict", path, *more)
    assert max(len(line) for line in text.splitlines()) <= 100
    for word in ("param", "exp_avg_sq", "the code that allocates them", "GiB"):
        assert word in text
    assert max(len(line) for line in run(capsys, "groups", path).splitlines()) <= 100


def test_alike_ranks_are_printed_once(capsys):
    text = run(capsys, "predict", MEGATRON)
    assert text.count("Calls of one step, rank 0-3") == 1
    assert text.count("Calls of one step, rank 4-7") == 1
    assert "4,495,638,528" in text


def test_rank_selects(capsys):
    data = json.loads(run(capsys, "predict", MEGATRON, "--rank", "5", "--rank", "2", "--format", "json"))
    assert [r["rank"] for r in data["ranks"]] == [5, 2]
    data = json.loads(run(capsys, "predict", MEGATRON, "--rank", "distinct", "--format", "json"))
    assert sum(c["count"] for c in data["rank_classes"]) == 8
    assert [c["rank"] for c in data["rank_classes"]] == [r["rank"] for r in data["ranks"]]


def test_comparison_overrides_as_the_workflow_does(capsys):
    from train_ledger.predict import predict

    for name, resolved in load_comparison("laptop", ROOT / "config").runs.items():
        data = json.loads(
            run(capsys, "predict", str(RUNS / f"{name}.yaml"), "--comparison", "laptop", "--format", "json")
        )
        assert data == json.loads(json.dumps(predict(resolved).to_dict()))


def test_set_and_seq_length_go_first(capsys):
    base = json.loads(run(capsys, "predict", MEGATRON, "--format", "json"))
    less = json.loads(run(capsys, "predict", MEGATRON, "--seq-length", "4096", "--format", "json"))
    assert less["ranks"][0]["state_bytes"] == base["ranks"][0]["state_bytes"]
    assert less["ranks"][0]["resident_bytes"] < base["ranks"][0]["resident_bytes"]
    one = json.loads(run(capsys, "predict", MEGATRON, "--set", "global_batch=2", "--format", "json"))
    assert sum(c["count"] for c in one["ranks"][0]["collectives"]) < 100


def test_groups_of_a_rank(capsys):
    data = json.loads(run(capsys, "groups", MEGATRON, "--rank", "5", "--format", "json"))
    assert data["groups"]
    assert all(5 in g["ranks"] for g in data["groups"])
    assert {"name": "tp", "ranks": [4, 5]} in data["groups"]


def test_device_adds_readings(capsys):
    data = json.loads(run(capsys, "predict", DEEPSPEED, "--device", "h200", "--rank", "0", "--format", "json"))
    reading = data["device"]["ranks"][0]
    assert reading["requested_bytes"] == 3_164_274_961 - 65_544  # less the batch that the measuring script held
    assert "It does not fit" in run(capsys, "predict", DEEPSPEED, "--model", "llama3-405b", "--device", "h100")


def test_diff_by_set_and_by_file(capsys):
    text = run(capsys, "diff", DEEPSPEED, "--set", "deepspeed.zero_optimization.stage=2")
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "reduce_bucket" in text
    data = json.loads(run(capsys, "diff", MEGATRON, TORCHTITAN, "--format", "json"))
    grad = next(c for c in data["containers"] if c["name"] == "grad")
    assert grad["before_bytes"] == 2 * grad["after_bytes"] + 4_096
    same = json.loads(run(capsys, "diff", MEGATRON, MEGATRON, "--format", "json"))
    assert all(c["before_bytes"] == c["after_bytes"] for c in same["containers"])
    assert all(c["before_count"] == c["after_count"] for c in same["calls"])


@pytest.mark.parametrize("path", ALL_RUNS)
def test_explain_answers_every_question(capsys, path):
    from train_ledger.predict.explain import QUESTIONS, explain
    from train_ledger.spec.config import load_run

    assert set(QUESTIONS) == {line.split()[0] for line in run(capsys, "explain", "list").splitlines()}
    for question in QUESTIONS:
        answer = explain(question, load_run(path))
        assert 1 <= len(answer.splitlines()) <= 2, (question, answer)
        assert any(c.isdigit() for c in answer), (question, answer)
    assert max(len(line) for line in run(capsys, "explain", "where", path).splitlines()) <= 100


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("deepspeed-zero3-dp8", "reduces its gradients and gathers many of the parameters anew"),
        ("deepspeed-zero2-dp2", "reduces its gradients; parameters are gathered once a step"),
        ("torchtitan-hsdp2", "reduces its gradients; parameters stay whole on every rank"),
        ("torchtitan-fsdp2", "reduces its gradients and gathers the parameters anew"),
        ("megatron-dp2", "keeps whole gradients until the last micro-batch, and parameters are gathered once a step"),
        ("torchtitan-1gpu", "over data parallel: nothing is sent."),
        ("torchtitan-pp2", "over data parallel: nothing is sent."),
    ],
)
def test_explain_accumulation_by_what_grows(capsys, name, told):
    answer = " ".join(run(capsys, "explain", "accumulation", str(ROOT / f"config/runs/{name}.yaml")).split())
    assert told in answer
    assert ("Here" in answer) == ("nothing is sent" not in answer)


@pytest.mark.parametrize(("policy", "told"), [("never", "kept until its backward"), ("always", "around each unit's")])
def test_explain_where_says_when_fsdp_frees(capsys, policy, told):
    file = str(ROOT / "config/runs/torchtitan-fsdp2.yaml")
    argv = ["explain", "where", file, "--set", f"torchtitan.fsdp_reshard_after_forward={policy}"]
    assert told in " ".join(run(capsys, *argv).split())


def test_explain_from_the_numbers_of_the_run(capsys):
    assert "reduce_bucket_size" in run(capsys, "explain", "stages", DEEPSPEED)
    assert "2.00 times" in run(capsys, "explain", "twice", MEGATRON)
    assert "18 bytes an element" in run(capsys, "explain", "per-parameter", MEGATRON)
    assert "16 bytes an element" in run(capsys, "explain", "per-parameter", DEEPSPEED)
    assert "2.997 GB -> 5.994 GB" in " ".join(run(capsys, "explain", "accumulation", DEEPSPEED).split())
    assert "1,498,482,688 counted, 1,235,814,400 trained" in run(capsys, "explain", "tied", DEEPSPEED)
    assert "has no zero.Init" in run(capsys, "explain", "tied", MEGATRON)
    # Half of the followed weight's master is on each tensor-parallel rank, and all of a half on one data-parallel rank.
    told = " ".join(run(capsys, "explain", "where", MEGATRON).split())
    assert "half 1 on ranks 0, 2, half 2 on ranks 1, 3, 2,097,152 elements each" in told
    assert "The ranks of a half hold equal copies; not on ranks 4-7 (other pipeline stages)" in told
    assert "all of half 1 on rank 0; all of half 2 on rank 1; none on ranks 2-3" in told
    # At another shape the range of the distributed optimizer ends elsewhere, and cuts some weights in two.
    many = " ".join(run(capsys, "explain", "where", MEGATRON, "--set", f"probe.lifeline_weight={CUT}").split())
    assert re.search(r"of half 1 elements 0 to [\d,]+ on rank 0, elements [\d,]+ to [\d,]+ on rank 2", many)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["predict"], "give RUN.yaml"),
        (["predict", "no-such.yaml"], "no-such.yaml: cannot be read"),
        (["predict", str(RUNS)], "cannot be read: Is a directory"),
        (["predict", MEGATRON, "--rank", "8"], "--rank: '8' is not a rank of a world of 8"),
        (["predict", MEGATRON, "--rank", "-1"], "is not a rank"),
        (["predict", MEGATRON, "--rank", "1e3"], "is not a rank"),
        (["predict", MEGATRON, "--rank", "9" * 5000], "--rank: '99"),
        (["groups", MEGATRON, "--rank", "9" * 5000], "--rank: '99"),
        (["check", MEGATRON, "--rank", "9" * 5000], "--rank: '99"),
        (["predict", MEGATRON, "--without", "x"], "--without: does not go with a run file"),
        (["predict", MEGATRON, "--set", "model=../x"], "--set: model: '../x' is not a name"),
        (["predict", MEGATRON, "--set", "probe.collective_steps=[0]"], "--set: probe.collective_steps[0]: 0 is less"),
        (["predict", MEGATRON, "--model", "../x"], "--model: model: '../x' is not a name"),
        (["predict", MEGATRON, "--seq-length", "many"], "--seq-length: seq_length: 'many' is not of type"),
        (["predict", MEGATRON, "--set", "parallel.tensor_parallel=3"], "world_size"),
        (["predict", MEGATRON, "--set", "paralel.x=3"], "--set: paralel: unknown key"),
        (["predict", MEGATRON, "--set", "steps"], "--set: 'steps' is not key=value"),
        (["predict", MEGATRON, "--set", "steps=.nan"], "--set: steps: nan"),
        (["predict", MEGATRON, "--device", "tpu"], "--device: there is no device 'tpu'"),
        (["predict", MEGATRON, "--comparison", "../x"], "comparison: '../x' is not a name"),
        (["predict", MEGATRON, "--world-size", "8"], "--world-size"),
        (["predict", MEGATRON, "--deepspeed", "x.json"], "give RUN.yaml, or one of"),
        (["groups", MEGATRON, "--rank", "99"], "is not a rank of a world of 8"),
        (["diff", MEGATRON], "give a second run"),
        (["explain", "why", MEGATRON], "is not a question"),
        (["predict", MEGATRON, "--model", "laptop", "--set", "model=llama3-8b"], "--model: is given twice"),
        (["predict", MEGATRON, "--seq-length", "8", "--set", "seq_length=9"], "--seq-length: is given twice"),
        (
            ["predict", MEGATRON, "--set", "probe.lifeline_weight=nope"],
            "--set: probe.lifeline_weight: the model has no",
        ),
        (
            ["weights", "--model", "laptop", "--config", str(ROOT / "config"), "--out", "/dev/null/x", "--record-only"],
            "train-ledger weights: /dev/null/x.json: File exists",
        ),
        (["weights", "--model", "laptop", "--seed", str(2**32), "--out", "/dev/null/x"], "--seed: 4294967296 is not"),
        (["export", MEGATRON, "/dev/null/x"], "/dev/null/x: cannot be written: Not a directory"),
    ],
)
def test_a_mistake_is_one_line(capsys, argv, words):
    assert words in run(capsys, *argv, code=2)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "train-ledger: the following arguments are required: COMMAND (see train-ledger --help)"),
        (["frob"], "train-ledger: COMMAND: invalid choice: 'frob'"),
        (["predict", MEGATRON, MEGATRON], "train-ledger predict: unrecognized arguments"),
        (["predict", MEGATRON, "--step", "x\ny"], "train-ledger predict: --step: invalid choice"),
        (["evidence", "pack"], "train-ledger evidence pack: the following arguments are required"),
        # Each would mean the default, or the working folder, to which a command then writes.
        (["predict", MEGATRON, "--comparison", ""], "train-ledger predict: --comparison: is empty"),
        (["predict", MEGATRON, "--seq-length="], "train-ledger predict: --seq-length: is empty"),
        (["export", MEGATRON, ""], "train-ledger export: an argument is empty"),
        (["probe", "x", "--out", ""], "train-ledger probe: --out: is empty"),
    ],
)
def test_a_wrong_option_is_one_line(capsys, argv, words):
    with pytest.raises(SystemExit) as e:
        cli.main(argv)
    out, err = capsys.readouterr()
    assert (e.value.code, out, err.count("\n")) == (2, "", 1)
    assert words in err


@pytest.mark.parametrize("path", [MEGATRON, DEEPSPEED, TORCHTITAN])
@pytest.mark.parametrize("world", ["cpu", "nccl"])
def test_a_prediction_is_of_a_gpu(capsys, path, world):
    data = json.loads(run(capsys, "predict", path, "--set", f"world={world}", "--format", "json"))
    found = {c["name"]: c["device"] for r in data["ranks"] for c in r["containers"]}
    assert {found[name] for name in ("param", "exp_avg", "exp_avg_sq")} == {"cuda"}
    on_host = {name for name, device in found.items() if device == "cpu"}
    assert on_host <= {"step", "batch", "device_mesh", "mtp_loss_scale"}


def test_options_stand_anywhere(capsys, tmp_path):
    text = run(capsys, "export", MEGATRON, "--model", "laptop", str(tmp_path / "out"), "--set", "steps=3")
    assert str(tmp_path / "out/run.sh") in text.split()
    assert run(capsys, "diff", MEGATRON, "--step", "first", DEEPSPEED) == run(
        capsys, "diff", "--step", "first", MEGATRON, DEEPSPEED
    )


def test_a_comparisons_override_is_blamed_on_the_comparison(capsys, tmp_path):
    for part in ("models", "runs", "comparisons"):
        (tmp_path / part).mkdir()
    (tmp_path / "models/laptop.yaml").write_text((ROOT / "config/models/laptop.yaml").read_text())
    path = tmp_path / "runs/a.yaml"
    path.write_text((ROOT / "config/runs/megatron-tp2-pp2-dp2.yaml").read_text())
    comparison = tmp_path / "comparisons/c.yaml"
    for override, words in (
        ("{parallel: {tensor_parallel: none}}", "c.yaml: runs.a.parallel.tensor_parallel: 'none' is not"),
        ("{megatron: {bucket: 1}}", "c.yaml: runs.a.megatron.bucket: unknown key"),
        ("{parallel: {tensor_parallel: 4}}", "c.yaml runs it): world_size: is 8, but"),
    ):
        comparison.write_text(f"model: laptop\nruns:\n  a: {override}\n")
        assert words in run(capsys, "predict", str(path), "--comparison", "c", code=2)


def test_starts_fast_and_without_torch():
    program = (
        "import sys; from train_ledger.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'numpy', 'pandas', 'megatron', 'deepspeed', 'torchtitan'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    for argv in (
        ["predict", DEEPSPEED],
        ["groups", MEGATRON],
        ["explain", "where", TORCHTITAN],
        ["diff", MEGATRON, DEEPSPEED],
    ):
        done = subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_a_closed_pipe_is_no_error():
    argv = [sys.executable, "-m", "train_ledger.cli", "predict", MEGATRON]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as done:
        assert done.stdout is not None
        done.stdout.close()
        assert done.stderr is not None
        assert "Traceback" not in done.stderr.read()


def test_sweep_ranks_by_fit(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    argv = ["sweep", "--model", "llama3-70b", "--world-size", "64", "--world-size", "128", "--global-batch", "512"]
    rows = json.loads(run(capsys, *argv, "--device", "h100", "--top", "400", "--format", "json"))
    fits = [row["fits"] for row in rows]
    assert fits == sorted(fits, reverse=True)
    assert rows[0]["fits"]
    assert rows[0]["state_bytes"] + 20 * 10**9 <= 80 * 10**9
    table = run(capsys, *argv).splitlines()
    assert max(map(len, table)) <= 100
    assert len(table[5:]) == len(set(table[5:])) == 10
    assert len({line.split("1, 2")[0] for line in table[5:]}) == 10  # no two rows differ in the micro-batch alone
    assert "--top: 'x' is not a whole number" in run(capsys, *argv, "--top", "x", code=2)
    assert "--world-size: '-4' is not a whole" in run(capsys, *argv[:3], "--world-size=-4", *argv[5:], code=2)


def test_a_terminal_that_knows_few_characters():
    """A cluster's default locale; the help holds an ellipsis."""
    env = {"PATH": "/usr/bin:/bin", "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    argv = [sys.executable, "-m", "train_ledger.cli"]
    for words in (["predict", "--help"], ["--help"], ["explain", "list"]):
        done = subprocess.run([*argv, *words], env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
