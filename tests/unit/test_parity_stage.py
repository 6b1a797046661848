"""The parity stage on launches that reference trainings stand in for: what it accepts, catches and refuses."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_weights import TINY

from train_ledger.commands.parity import make, verdict_line
from train_ledger.commands.reference import make as make_reference
from train_ledger.launch.reference import Order, Trained, train
from train_ledger.launch.weights import generate, write_weights
from train_ledger.parity.bounds import DEVIATIONS, RESOLUTION, measure, read_reference
from train_ledger.parity.difference import difference, exported
from train_ledger.parity.problem import Problem, select
from train_ledger.spec.errors import ConfigError, DataError
from train_ledger.spec.io import read_json
from train_ledger.spec.registry import FRAMEWORKS
from train_ledger.spec.run import Optimizer, Parallel, Probe, Run
from train_ledger.spec.steps import global_steps

STEPS = 4
RUN = Run(
    name="one",
    framework="deepspeed",
    model=TINY,
    world="cpu",
    world_size=2,
    parallel=Parallel(data_parallel=2),
    seq_length=16,
    micro_batch=1,
    global_batch=8,
    steps=STEPS,
    seed=3,
    optimizer=Optimizer(lr=3e-3, min_lr=3e-4, clip_grad=0.5, decay_norms=False, lr_warmup_steps=4),
    probe=Probe(),
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reference")
    make_reference(Problem.of(RUN), None, out)
    return out / "reference.json"


def trained(order: Order = Order(2, 2), dtype: torch.dtype = torch.bfloat16, run: Run = RUN, **change: Any) -> Trained:  # noqa: B008
    """A training of RUN's problem in an order of sums of its own, with what `change` changes."""
    common = {k: getattr(run, k) for k in ("seed", "seq_length", "global_batch", "steps", "optimizer")}
    read = change.pop("read", generate(TINY, run.seed))
    return train(TINY, read, **{**common, **change}, dtype=dtype, order=order)


def launched(
    folder: Path, run: Run, done: Trained, weights: bool = True, change: Callable[[dict[str, Any]], None] | None = None
) -> Path:
    """What a launch of `run` on two ranks would have written, had it trained `done`; `change` of each rank's record."""
    folder.mkdir(parents=True)
    entries = []
    for rank in range(2):
        steps = [
            {"step": i, "loss": loss, "grad_norm": norm, "time_s": 0.1, "memory": None}
            for i, (loss, norm) in enumerate(zip(done.losses, done.grad_norms, strict=True), 1)
        ]
        identity = {"run": run.name, "framework": run.framework, "world": "cpu", "world_size": 2}
        identity["config_sha256"] = run.sha256()
        record = {"schema": "train-ledger/rank/1", **identity, "rank": rank, "coords": {}, "host": {}}
        record |= {"versions": {FRAMEWORKS[run.framework].distribution: FRAMEWORKS[run.framework].version}}
        record |= {"device": {"type": "cpu"}, "groups": [], "steps": steps, "collectives": [], "lifeline": None}
        record |= {"census": {"step": run.steps, "containers": [], "other": []}}
        if change:
            change(record)
        content = json.dumps(record)
        (folder / f"rank{rank}.json").write_text(content)
        sha256 = hashlib.sha256(content.encode()).hexdigest()
        entries.append({"rank": rank, "exit": 0, "file": f"rank{rank}.json", "sha256": sha256})
        if weights:
            names = list(done.weights)[rank::2]
            write_weights(folder / f"weights{rank}.safetensors", {n: done.weights[n] for n in names})
    (folder / "run.json").write_text(json.dumps({"schema": "train-ledger/launch/1", **identity, "ranks": entries}))
    return folder


def judge(reference: Path, tmp_path: Path, runs: Mapping[str, tuple[Run, Trained]], **options: Any) -> dict[str, Any]:
    dirs = {name: launched(tmp_path / name, run, done) for name, (run, done) in runs.items()}
    return make({n: run for n, (run, _) in runs.items()}, dirs, reference, None, tmp_path / "out", **options)


def rows(tmp_path: Path, table: str) -> list[dict[str, str]]:
    with (tmp_path / "out" / f"{table}.csv").open() as f:
        return list(csv.DictReader(f))


def test_runs_that_differ_in_order_only_are_equal(reference: Path, tmp_path: Path) -> None:
    two = replace(RUN, name="two", framework="megatron")
    runs = {"one": (RUN, trained()), "two": (two, trained(Order(4, 3, True)))}
    summary = judge(reference, tmp_path, runs)
    assert summary == read_json(tmp_path / "out" / "parity.json", "train-ledger/parity/1", "parity")
    assert summary["failures"] == []
    assert [(p["left"], p["right"]) for p in summary["pairs"]] == [
        ("one", "two"),
        *(("one", "reference-bf16"), ("one", "reference-fp32"), ("two", "reference-bf16"), ("two", "reference-fp32")),
    ]
    assert len(rows(tmp_path, "losses")) == len(rows(tmp_path, "grad_norms")) == 5 * STEPS
    assert len(rows(tmp_path, "weights")) == 5 * 21
    assert len(rows(tmp_path, "curves")) == 4 * STEPS
    assert verdict_line(summary).startswith("parity: 2 runs and the reference agree over 4 steps")


def _swap_kv(read: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
    swap = {"k_proj": "v_proj", "v_proj": "k_proj"}

    def wrong(name: str) -> torch.Tensor:
        part = name.split(".")[-2]
        return read(name.replace(part, swap.get(part, part)))

    return wrong


def _swap_norms(read: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
    def wrong(name: str) -> torch.Tensor:
        other = {"input_layernorm": "post_attention_layernorm", "post_attention_layernorm": "input_layernorm"}
        part = name.split(".")[-2]
        return read(name.replace(part, other.get(part, part)))

    return wrong


@pytest.mark.parametrize(
    ("change", "seen_in"),
    [
        ({"read": _swap_kv(generate(TINY, 3))}, "loss of step 1"),
        ({"read": _swap_norms(generate(TINY, 3))}, "loss of step"),
        ({"read": lambda n: generate(TINY, 3)(n).bfloat16().float()}, "trained tensors"),
        ({"seed": 4}, "loss of step 1"),
        ({"optimizer": replace(RUN.optimizer, decay_norms=True)}, "5 of 21 trained tensors"),
        ({"optimizer": replace(RUN.optimizer, beta1=0.5)}, "trained tensors"),
        ({"optimizer": replace(RUN.optimizer, lr_warmup_steps=0)}, "grad_norm of step 2"),
        ({"optimizer": replace(RUN.optimizer, eps=1e-4)}, "trained tensors"),
    ],
    ids=["swapped kv", "swapped norms", "rounded masters", "other tokens", "decayed norms", "beta1", "warm-up", "eps"],
)
def test_mistakes_are_caught(change: dict[str, Any], seen_in: str, reference: Path, tmp_path: Path) -> None:
    summary = judge(reference, tmp_path, {"one": (RUN, trained(**change))})
    assert summary["verdict"] == "differs"
    assert seen_in in " ".join(summary["failures"])
    assert "differences beyond rounding" in verdict_line(summary)


def test_step_one_has_a_limit_of_its_own(reference: Path, tmp_path: Path) -> None:
    judge(reference, tmp_path, {"one": (RUN, trained())})
    bounds = {int(r["step"]): float(r["bound"]) for r in rows(tmp_path, "losses") if r["right"] == "reference-bf16"}
    assert bounds[1] == min(1e-3, bounds[2])


def test_fp32_runs_have_the_bound_of_fp32(reference: Path, tmp_path: Path) -> None:
    """The type of the compute chooses the bound: bf16 in an fp32 run is a fault."""
    fine = replace(RUN, framework="torchtitan", settings={"mixed_precision_param": "float32"})
    runs = {"one": (fine, trained(dtype=torch.float32))}
    assert judge(reference, tmp_path / "fp32", runs)["failures"] == []
    summary = judge(reference, tmp_path / "bf16", {"one": (fine, trained())})
    pairs = {p["right"]: p["verdict"] for p in summary["pairs"]}
    assert pairs == {"reference-bf16": "equal", "reference-fp32": "differs"}


def test_other_problems_are_shown_but_not_compared(reference: Path, tmp_path: Path) -> None:
    small = replace(RUN, name="small", global_batch=2)
    constant = replace(RUN, name="constant", optimizer=replace(RUN.optimizer, min_lr=3e-3))
    again = replace(RUN, name="again")
    runs = {r.name: (r, trained(run=r)) for r in (small, RUN, constant, again)}
    summary = judge(reference, tmp_path, runs)
    described = {r["run"]: (r["compared"], r["reason"]) for r in summary["runs"]}
    assert described == {
        "small": ("no", "global_batch is 2, not 8"),
        "one": ("all", ""),
        "constant": ("first_step", "optimizer.min_lr is 0.003, not 0.0003"),
        "again": ("all", ""),
    }
    assert summary["verdict"] == "equal"
    steps = {r["step"] for r in rows(tmp_path, "losses") if "constant" in (r["left"], r["right"])}
    assert steps == {"1"}
    assert not [r for r in rows(tmp_path, "weights") if "constant" in (r["left"], r["right"])]
    assert {r["run"] for r in rows(tmp_path, "curves")} >= {"small", "constant"}


def test_every_name_is_accounted_for(reference: Path, tmp_path: Path) -> None:
    done = trained()
    folder = launched(tmp_path / "one", RUN, done)
    held = dict(list(done.weights.items())[1::2])
    first = next(iter(held))
    held |= {"model.embed_tokens.weight": done.weights["model.embed_tokens.weight"], "extra": torch.zeros(1)}
    del held[first]
    write_weights(folder / "weights1.safetensors", held)
    summary = make({"one": RUN}, {"one": folder}, reference, None, tmp_path / "out")
    assert summary["runs"][0]["weights"] == {
        "expected": 21,
        "missing": [first],
        "double": ["model.embed_tokens.weight"],
        "unknown": ["extra"],
    }
    assert f"one: tensor {first} is exported by no rank" in summary["failures"]
    assert "one: tensor model.embed_tokens.weight comes twice" in summary["failures"]
    assert "one: tensor extra is unknown" in summary["failures"]


def test_no_weights_fail_unless_they_were_not_asked_for(reference: Path, tmp_path: Path) -> None:
    folder = launched(tmp_path / "one", RUN, trained(), weights=False)
    summary = make({"one": RUN}, {"one": folder}, reference, None, tmp_path / "out")
    assert summary["failures"] == ["one exported no weights"]
    summary = make({"one": RUN}, {"one": folder}, reference, None, tmp_path / "out", need_weights=False)
    assert summary["failures"] == []
    assert summary["runs"][0]["weights"] is None


def test_missing_steps_are_a_failure(reference: Path, tmp_path: Path) -> None:
    folder = launched(tmp_path / "one", RUN, trained(), change=lambda record: record["steps"][1].update(loss=None))
    summary = make({"one": RUN}, {"one": folder}, reference, None, tmp_path / "out")
    assert summary["failures"] == ["one reports no loss of steps [2]"]


def test_a_gradient_of_nothing_differs(reference: Path, tmp_path: Path) -> None:
    """A norm of 0 to divide by is a finding like another, and parity.json can hold it."""

    def dead(record: dict[str, Any]) -> None:
        for step in record["steps"]:
            step["grad_norm"] = step["grad_norm"] and 0.0

    runs = {name: replace(RUN, name=name) for name in ("alive", "dead")}
    changes = {"alive": None, "dead": dead}
    folders = {name: launched(tmp_path / name, run, trained(), change=changes[name]) for name, run in runs.items()}
    summary = make(runs, folders, reference, None, tmp_path / "out")
    assert any("grad_norm" in line for line in summary["failures"])
    assert json.loads((tmp_path / "out/parity.json").read_text())["failures"] == summary["failures"]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda d: d["problem"].update(seed=77), "problem"),
        (lambda d: d["runs"][1].update(name=d["runs"][0]["name"]), "runs[1].name"),
        (lambda d: d["runs"][1]["losses"].__setitem__(0, 0.0), "runs[1].losses[0]"),
        (lambda d: d["runs"][1]["grad_norms"].__setitem__(0, -1.0), "runs[1].grad_norms[0]"),
    ],
)
def test_a_reference_that_nothing_trained_is_refused(reference: Path, tmp_path: Path, change: Any, key: str) -> None:
    data = json.loads(reference.read_text())
    change(data)
    (tmp_path / "reference.json").write_text(json.dumps(data))
    with pytest.raises(DataError) as e:
        read_reference(tmp_path / "reference.json", Problem.of(RUN))
    assert e.value.key == key


def test_wrong_files_are_refused_by_name(reference: Path, tmp_path: Path) -> None:
    folder = launched(tmp_path / "one", RUN, trained())
    out = tmp_path / "out"

    def refused(key: str, run: Run = RUN, at: Path = reference) -> str:
        with pytest.raises(DataError) as e:
            make({"one": run}, {"one": folder}, at, None, out)
        assert e.value.key == key
        return str(e.value)

    assert "another model, seed, batch or optimizer" in refused("problem_sha256", replace(RUN, steps=2))
    refused("config_sha256", replace(RUN, micro_batch=2))
    rank = folder / "rank1.json"
    honest = rank.read_text()
    rank.write_text(honest.replace('"loss": ', '"loss": 1'))
    assert "changed afterwards" in refused("sha256")
    rank.write_text(honest)
    file = folder / "weights1.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    last = "model.norm.weight"
    assert "truncated" in refused(last)
    file.write_bytes(whole)
    write_weights(folder / "weights0.safetensors", {"lm_head.weight": torch.zeros(3, 3)})
    assert "shape [3, 3], expected [50, 24]" in refused("lm_head.weight")
    short = json.loads(reference.read_text())
    short["runs"][1]["losses"].pop()
    (tmp_path / "reference.json").write_text(json.dumps(short))
    assert "3 of 4 steps" in refused("runs[1].losses", at=tmp_path / "reference.json")
    (folder / "rank1.json").write_text("{")
    refused(None)  # type: ignore[arg-type]


def test_a_comparison_that_trains_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="world fake"):
        select({"one": replace(RUN, world="fake")})


def test_bounds_are_five_times_what_was_measured(reference: Path) -> None:
    read = read_reference(reference, Problem.of(RUN))
    plain = next(r for r in read.runs if r["name"] == "bf16")
    gaps = [
        (a - b) / b
        for r in read.runs
        if r["dtype"] == "bfloat16" and r is not plain
        for a, b in zip(r["losses"], plain["losses"], strict=True)
    ]
    bounds = measure(read, "bfloat16", "bfloat16")
    assert bounds.loss.samples == len(gaps) == 3 * STEPS
    assert bounds.loss.bound == pytest.approx(DEVIATIONS * np.sqrt(np.mean(np.square(gaps))))
    assert 1e-6 < bounds.loss.bound < 1e-2
    exact = measure(read, "float32", "float32")
    assert RESOLUTION <= exact.loss.bound < 3e-6
    for kind, bound in exact.update.items():
        assert 0 < bound.bound < bounds.update[kind].bound / 100


def test_kinds_have_bounds_of_their_own_and_none_below_the_median(reference: Path) -> None:
    bounds = measure(read_reference(reference, Problem.of(RUN)), "bfloat16", "bfloat16")
    assert len(bounds.update) == 12  # nine in a layer, embedding, last norm, head
    assert bounds.update["model.layers.*.mlp.up_proj.weight"].samples == 3 * TINY.num_layers
    assert bounds.of_tensor("model.layers.1.mlp.up_proj.weight") == bounds.of_tensor(
        "model.layers.0.mlp.up_proj.weight"
    )
    typical = DEVIATIONS * np.median([b.rms for b in bounds.update.values()])
    for bound in bounds.update.values():
        assert bound.bound == pytest.approx(max(DEVIATIONS * bound.rms, typical))


def test_reference_of_one_type_and_without_weights(tmp_path: Path) -> None:
    """What is not there is not compared; what is there still is."""
    one, done = Problem.of(RUN), trained()
    make_reference(one, None, tmp_path / "bf16", types=["bfloat16"])
    summary = judge(tmp_path / "bf16" / "reference.json", tmp_path / "one", {"one": (RUN, done)})
    assert [(p["right"], p["verdict"]) for p in summary["pairs"]] == [("reference-bf16", "equal")]
    assert summary["pairs"][0]["update"]["bound"] > 0
    make_reference(one, None, tmp_path / "none", types=["bfloat16"], with_weights=False)
    summary = judge(tmp_path / "none" / "reference.json", tmp_path / "two", {"one": (RUN, done)}, need_weights=False)
    assert summary["failures"] == []
    assert summary["pairs"][0]["update"] is None
    assert summary["pairs"][0]["loss"]["bound"] > 0


def test_difference_of_tensors() -> None:
    rng = np.random.default_rng(0)
    initial, step, noise = rng.standard_normal((3, 4000)).astype(np.float32)
    trained_ = initial + 0.01 * step
    same = difference(trained_, trained_, initial, trained_)
    assert (same.update, same.along, same.max_abs) == (0, 0, 0)
    random = difference(trained_ + 0.001 * noise, trained_, initial, trained_)
    assert random.update == pytest.approx(0.1, rel=0.1)
    assert abs(random.along) < 0.4
    shrunk = difference(trained_ - 0.001 * initial, trained_, initial, trained_)
    assert shrunk.along == pytest.approx(-0.1 * 4000**0.5, rel=0.1)
    untouched = difference(initial + 1, initial, initial, initial)
    assert untouched.update == 1


def test_exported_without_files_is_all_missing() -> None:
    nothing = exported([], TINY)
    assert not nothing.complete
    assert len(nothing.missing) == 21
    with pytest.raises(DataError, match="in no rank's weights"):
        nothing.get("lm_head.weight")


def test_global_steps_from_both_habits() -> None:
    """Global means repeated on some ranks, and means of each rank's own tokens, give the same figure."""

    def ranks(*losses: float | None) -> list[dict[str, Any]]:
        return [{"steps": [{"step": 1, "loss": loss, "grad_norm": 0.3}]} for loss in losses]

    assert global_steps(ranks(None, None, 2.1, 2.1, 2.1))[0].loss == 2.1
    assert global_steps(ranks(2.0, 2.2))[0].loss == pytest.approx(2.1)
    assert global_steps(ranks(2.0, 2.2))[0].grad_norm == 0.3
    assert global_steps(ranks(None))[0].loss is None
    assert global_steps([]) == []
