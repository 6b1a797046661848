"""The stage on files: what is damaged is refused by name, what is whole comes back whole, differences end in exit 1."""

from __future__ import annotations

import copy
import csv
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from made_results import RUNS, made_run, make_results, write_launch

from train_ledger.cli import main
from train_ledger.reconcile.compare import difference_lines, reconcile_files, summary_line
from train_ledger.reconcile.read import read_prediction
from train_ledger.reconcile.tidy import read_tidy, write_tidy
from train_ledger.spec.errors import DataError
from train_ledger.spec.groups import rank_ranges
from train_ledger.spec.launched import read_launch

UNCLAIMED = {"dtype": "int64", "shape": [3], "bytes": 24, "count": 1, "device": "cpu"}


@pytest.fixture
def launch(tmp_path: Path) -> Path:
    return write_launch(tmp_path / "launch", *copy.deepcopy(made_run("run", "deepspeed")))


def edit(file: Path, change: Any) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def refused(launch: Path, file: str, key: str | None = None) -> str:
    with pytest.raises(DataError) as e:
        read_launch(launch)
    assert Path(str(e.value.file)).name == file
    if key:
        assert e.value.key == key
    return str(e.value)


def test_a_whole_launch_is_read_in_rank_order(launch):
    edit(launch / "run.json", lambda d: d["ranks"].reverse())
    assert [r["rank"] for r in read_launch(launch).ranks] == list(range(8))


def test_no_run_json(launch):
    (launch / "run.json").unlink()
    refused(launch, "run.json")


def test_missing_rank_file(launch):
    (launch / "rank3.json").unlink()
    assert "rank 3" in refused(launch, "rank3.json")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda d: d["groups"][0].update(ranks=[3, 3]), "groups[0].ranks"),
        (lambda d: d["groups"][0].update(ranks=[3, 8]), "groups[0].ranks"),
        (lambda d: d["collectives"][0].update(ranks=[99]), "collectives[0].ranks"),
        (lambda d: d["collectives"][0].update(step=77), "collectives[0].step"),
        (lambda d: d["census"].update(step=77), "census.step"),
        (lambda d: d["steps"][1].update(time_s=-0.5), "steps[1].time_s"),
        (lambda d: d["steps"][1].update(loss=float("nan")), "steps[1].loss"),
        (lambda d: d["census"]["containers"][1].update(name="\ud800"), "census.containers[1].name"),
    ],
)
def test_what_no_rank_measures(launch, change, key):
    """In a file whose hash was made good."""
    edit(launch / "rank3.json", change)
    sha256 = hashlib.sha256((launch / "rank3.json").read_bytes()).hexdigest()
    edit(launch / "run.json", lambda d: next(r for r in d["ranks"] if r["rank"] == 3).update(sha256=sha256))
    refused(launch, "rank3.json", key)


def test_truncated_rank_file(launch):
    file = launch / "rank3.json"
    file.write_text(file.read_text()[:200])
    assert "truncated" in refused(launch, "rank3.json")


def test_rank_file_that_was_changed_afterwards(launch):
    edit(launch / "rank3.json", lambda d: d["steps"][0].update(loss=1.0))
    refused(launch, "rank3.json", "sha256")


def test_wrong_schema(launch):
    edit(launch / "rank3.json", lambda d: d.update(schema="train-ledger/rank/2"))
    refused(launch, "rank3.json", "schema")


def test_unknown_key(launch):
    edit(launch / "rank3.json", lambda d: d.update(extra=1))
    refused(launch, "rank3.json", "extra")


def test_missing_rank_entry(launch):
    edit(launch / "run.json", lambda d: d["ranks"].pop(2))
    assert "ranks [2] of 8" in refused(launch, "run.json", "ranks")


def test_rank_that_failed(launch):
    edit(launch / "run.json", lambda d: d["ranks"][1].update(exit=-9))
    assert "rank 1 ended with -9" in refused(launch, "run.json", "ranks[1].exit")


def test_file_name_that_leads_elsewhere(launch):
    edit(launch / "run.json", lambda d: d["ranks"][1].update(file="../run.json"))
    refused(launch, "run.json", "ranks[1].file")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda r: r.update(config_sha256="f" * 64), "config_sha256"),
        (lambda r: r.update(run="another"), "run"),
        (lambda r: r.update(world="fake"), "world"),
        (lambda r: r["versions"].update(deepspeed="0.19.3"), "versions.deepspeed"),
        (lambda r: r["versions"].pop("deepspeed"), "versions.deepspeed"),
        (lambda r: r["versions"].update(torch="2.13.0"), "versions"),
        (lambda r: r.update(rank=4), "rank"),
    ],
)
def test_rank_of_something_else(tmp_path, change, key):
    prediction, ranks = copy.deepcopy(made_run("run", "deepspeed"))
    launch = write_launch(tmp_path / "launch", prediction, ranks)
    changed = copy.deepcopy(ranks[5])
    change(changed)
    (launch / "rank5.json").write_text(json.dumps(changed))
    digest = __import__("hashlib").sha256((launch / "rank5.json").read_bytes()).hexdigest()
    edit(launch / "run.json", lambda d: d["ranks"][5].update(sha256=digest))
    refused(launch, "rank5.json", key)


def _launch_with(tmp_path: Path, change: Any) -> Path:
    prediction, ranks = copy.deepcopy(made_run("run", "deepspeed"))
    change(ranks[5])
    return write_launch(tmp_path / "launch", prediction, ranks)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda r: r.update(steps=[]), "steps"),
        (lambda r: r["steps"].pop(), "steps"),
        (lambda r: r["steps"].append(r["steps"][-1]), "steps"),
        (lambda r: r["census"]["containers"][1].update(bytes=-1), "census.containers[1].bytes"),
        (lambda r: r["census"]["containers"][1].update(bytes=2**63), "census.containers[1].bytes"),
        (lambda r: r["census"]["other"].append({**UNCLAIMED, "count": -1}), "census.other[0].count"),
        (lambda r: r["collectives"][0].update(in_numel=-5), "collectives[0].in_numel"),
        (lambda r: r["collectives"][0].update(count=-5), "collectives[0].count"),
        (lambda r: r["lifeline"]["events"][0].update(storage_bytes=-5), "lifeline.events[0].storage_bytes"),
    ],
)
def test_figures_that_no_rank_can_have(tmp_path, change, key):
    refused(_launch_with(tmp_path, change), "rank5.json", key)


def test_ranks_of_a_fake_world_may_be_few(tmp_path):
    prediction, ranks = copy.deepcopy(made_run("run", "deepspeed"))
    some = [ranks[0], ranks[5]]
    for r in some:
        r["world"] = "fake"
    launch = write_launch(tmp_path / "launch", prediction, some)
    assert [r["rank"] for r in read_launch(launch).ranks] == [0, 5]


def test_tidy_table_holds_all_that_the_files_hold(tmp_path):
    prediction, ranks = copy.deepcopy(made_run("run", "megatron"))
    ranks[0]["steps"][-1]["memory"] = {"requested_bytes.all.current": 123456789012, "num_ooms": 0}
    ranks[1]["memory_events"] = [{"event": "forward", "allocated_bytes": 5}]
    ranks[1]["kernels"] = [{"kind": "AllGather", "count": 2, "time_s": 0.25}]
    ranks[1]["timeline"] = {"steps": [{"step": 4, "compute_s": 0.5}]}
    ranks[1]["peak"] = {"peak_bytes": 9, "owners": [{"site": "a.py:f", "bytes": 9, "blocks": 1}]}
    ranks[2]["steps"][0]["loss"] = None
    launch = read_launch(write_launch(tmp_path / "launch", prediction, ranks))
    write_tidy(launch, tmp_path / "run.parquet")
    for before, after in zip(ranks, read_tidy(tmp_path / "run.parquet"), strict=True):
        assert after == before
    first = (tmp_path / "run.parquet").read_bytes()
    write_tidy(launch, tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == first


@pytest.mark.parametrize("damage", ["missing", "truncated", "foreign"])
def test_damaged_tidy_table(tmp_path, damage):
    results = make_results(tmp_path, {"run": "deepspeed"})
    file = results / "probe" / "run0.parquet"
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-500])
    else:
        import pandas as pd

        pd.DataFrame({"a": [1]}).to_parquet(file)
    with pytest.raises(DataError) as e:
        reconcile_files([results / "predict" / "run0.json"], [file])
    assert e.value.file == file


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A tidy table that nobody changes, with a row of each kind that a CPU gives."""

    def change(prediction: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        ranks[0]["census"]["other"] = [UNCLAIMED]

    return make_results(tmp_path_factory.mktemp("whole"), {"run": "deepspeed"}, change) / "probe" / "run0.parquet"


def _respell(file: Path, change: Any) -> None:
    """The table with its rows changed; types, columns and metadata stay."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(file)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), file)


def _first(kind: str, /, **cells: Any) -> Any:
    return lambda rows: next(r for r in rows if r["kind"] == kind).update(cells)


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        *(("container", c) for c in ("owner", "device", "step", "name", "dtype", "numel", "bytes", "count", "detail")),
        *(("other", c) for c in ("dtype", "device", "bytes", "count", "detail")),
        *(
            ("collective", c)
            for c in ("step", "op", "ranks", "name", "dtype", "in_numel", "out_numel", "count", "site")
        ),
        *(("group", "ranks"), ("coord", "count"), ("step", "step"), ("census", "step"), ("weight", "name")),
        *(("lifeline", c) for c in ("micro_batch", "event", "state", "bytes")),
        *(("rank", "detail"), ("rank", "rank"), ("rank", "kind")),
    ],
)
def test_empty_cell_that_its_row_needs(tmp_path, whole, kind, column):
    file = Path(shutil.copy(whole, tmp_path))
    _respell(file, _first(kind, **{column: None}))
    with pytest.raises(DataError) as e:
        read_tidy(file)
    assert (e.value.file, e.value.key) == (file, column)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (_first("group", ranks="0 x"), "ranks"),
        (_first("container", detail="{"), "detail"),
        (_first("container", bytes=-1), "rank 0.census.containers[0].bytes"),
        (_first("collective", phase="lunch"), "rank 0.collectives[0].phase"),
        (_first("rank", kind="rnak"), "kind"),
        (_first("step", name="luck"), "name"),
        (lambda rows: rows.extend([r for r in rows if r["rank"] == 3]), "rank"),
        (lambda rows: rows.remove(next(r for r in rows if r["kind"] == "census")), "kind"),
        (lambda rows: rows.remove(next(r for r in rows if r["name"] == "loss")), "rank 0.steps[0].loss"),
        (lambda rows: rows.append(next(r for r in rows if r["kind"] == "coord")), "name"),
        (
            lambda rows: [rows.remove(r) for r in list(rows) if (r["kind"], r["rank"], r["step"]) == ("step", 2, 4)],
            "steps",
        ),
    ],
)
def test_tidy_row_that_no_stage_writes(tmp_path, whole, change, key):
    file = Path(shutil.copy(whole, tmp_path))
    _respell(file, change)
    with pytest.raises(DataError) as e:
        read_tidy(file)
    assert (e.value.file, e.value.key) == (file, key)


def test_a_flipped_bit_is_refused_or_without_effect(tmp_path, whole):
    """Pages carry checksums: no figure changes unseen."""
    good, content, file = read_tidy(whole), whole.read_bytes(), tmp_path / "flipped.parquet"
    refusals = 0
    for at in range(0, len(content), len(content) // 60):
        file.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        try:
            assert read_tidy(file) == good
        except DataError:
            refusals += 1
    assert refusals > 30


def test_tidy_column_of_another_type(tmp_path):
    import pyarrow.parquet as pq

    file = make_results(tmp_path, {"run": "deepspeed"}) / "probe" / "run0.parquet"
    table = pq.read_table(file)
    at = table.schema.get_field_index("bytes")
    pq.write_table(table.set_column(at, "bytes", table["bytes"].cast("string")), file)
    with pytest.raises(DataError, match="is of type string, expected int64") as e:
        read_tidy(file)
    assert e.value.key == "bytes"


def test_prediction_whose_sums_do_not_hold(tmp_path):
    results = make_results(tmp_path, {"run": "deepspeed"})
    file = results / "predict" / "run0.json"
    edit(file, lambda d: d["ranks"][2]["containers"][1].update(bytes=1))
    with pytest.raises(DataError) as e:
        read_prediction(file)
    assert e.value.key == "ranks[2].containers[1].bytes"


def test_prediction_with_a_rank_twice(tmp_path):
    results = make_results(tmp_path, {"run": "deepspeed"})
    file = results / "predict" / "run0.json"
    edit(file, lambda d: d["ranks"].append(d["ranks"][2]))
    with pytest.raises(DataError, match="rank 2 is there twice") as e:
        read_prediction(file)
    assert e.value.key == "ranks[8].rank"


def test_run_without_its_other_side(tmp_path):
    results = make_results(tmp_path)
    predicts, probes = sorted(results.glob("predict/*")), sorted(results.glob("probe/*"))
    with pytest.raises(DataError, match="no measurement"):
        reconcile_files(predicts, probes[1:])
    with pytest.raises(DataError, match="no prediction"):
        reconcile_files(predicts[1:], probes)
    with pytest.raises(DataError, match="is also in"):
        reconcile_files([*predicts, predicts[0]], probes)


def test_half_of_the_ranks_is_not_the_run(tmp_path, capsys):
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    results = make_results(tmp_path, {"run": "deepspeed"})
    predict, probe = results / "predict" / "run0.json", results / "probe" / "run0.parquet"
    table = pq.read_table(probe)
    pq.write_table(table.filter(pc.less(table["rank"], 4)), probe)
    sides = ["--predict", str(predict), "--probe", str(probe), "--out", str(tmp_path / "out")]
    assert main(["reconcile", *sides]) == 2
    assert f"{probe}: ranks: run 'run': ranks 4-7 are predicted, but not measured" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["reconcile", *sides, "--partial"]) == 0
    assert capsys.readouterr().out == "1 run, 4 ranks: 0 bytes, 0 calls unexplained\n"


def test_commands_from_raw_files_to_a_clean_verdict(tmp_path, capsys):
    prediction, ranks = made_run("run", "torchtitan")
    write_launch(tmp_path / "launch", prediction, ranks)
    (tmp_path / "run.json").write_text(json.dumps(prediction))
    assert main(["probe", str(tmp_path / "launch"), "--out", str(tmp_path / "run.parquet")]) == 0
    sides = ["--predict", str(tmp_path / "run.json"), "--probe", str(tmp_path / "run.parquet")]
    assert main(["reconcile", *sides, "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == "1 run, 8 ranks: 0 bytes, 0 calls unexplained\n"
    with (tmp_path / "out" / "resident.csv").open() as f:
        head = next(csv.reader(f))
    assert head[:8] == [
        *("run", "rank", "container", "predicted_bytes", "measured_bytes", "residual_bytes", "verdict", "cause")
    ]
    with (tmp_path / "out" / "collectives.csv").open() as f:
        head = next(csv.reader(f))
    assert head[:12] == [
        *("run", "rank", "op", "group", "dtype", "predicted_count", "measured_count"),
        *("predicted_bytes", "measured_bytes", "residual_bytes", "verdict", "cause"),
    ]


@pytest.mark.parametrize("command", ["probe", "reconcile"])
@pytest.mark.parametrize("blocked", ["folder", "file above", "no permission"])
def test_output_that_cannot_be_written(tmp_path, command, blocked, capsys):
    results = make_results(tmp_path / "r", {"run": "deepspeed"})
    target = tmp_path / "out"
    if blocked == "file above":
        target.write_text("a file")
        target = target / "run"
    elif blocked == "no permission":
        target = Path("/proc/run")  # where root may not write either
    elif command == "probe":
        target.mkdir()
    else:
        (target / "resident.csv").mkdir(parents=True)
    words = {
        "probe": ["probe", str(results / "launch" / "run0")],
        "reconcile": [
            *("reconcile", "--predict", str(results / "predict" / "run0.json")),
            *("--probe", str(results / "probe" / "run0.parquet")),
        ],
    }[command]
    assert main([*words, "--out", str(target)]) == 2
    assert f"{target}" in (said := capsys.readouterr().err)
    assert "cannot be written" in said
    assert not list(tmp_path.rglob("*.tmp"))


def _spoil(prediction: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    if prediction["framework"] == "megatron":
        for r in ranks[:4]:
            r["census"]["containers"][1]["bytes"] += 512
        ranks[7]["collectives"][0]["count"] += 2
        ranks[6]["coords"]["tp"] = 9


def test_differences_are_one_line_each_and_fail(tmp_path, capsys):
    results = make_results(tmp_path, change=_spoil)
    result = reconcile_files(sorted(results.glob("predict/*")), sorted(results.glob("probe/*")))
    assert summary_line(result) == (
        "all 4 runs, 32 ranks: 2,048 bytes, 2 calls unexplained, 1 coordinates or groups differ"
    )
    lines = difference_lines(result)
    assert len(lines) == 3
    assert lines[0].startswith("megatron-tp2-pp2-dp2, ranks 0-3: grad float32 of framework: differs")
    assert "residual +512 B" in lines[0]
    assert "rank 7" in lines[1]
    sides = [
        *("--predict", *map(str, sorted(results.glob("predict/*")))),
        *("--probe", *map(str, sorted(results.glob("probe/*")))),
        *("--out", str(tmp_path / "out")),
    ]
    assert main(["reconcile", *sides]) == 1
    assert (tmp_path / "out" / "runs.json").is_file()
    assert capsys.readouterr().err.count("differs:") == 3
    assert main(["reconcile", *sides, "--allow-differences"]) == 0


def test_another_recorded_step_that_differs_is_shown(tmp_path):
    def change(prediction: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        for r in ranks:
            r["collectives"] += [{**c, "step": 3} for c in r["collectives"]]
        ranks[2]["collectives"][-1]["count"] += 1

    results = make_results(tmp_path, {"run": "deepspeed"}, change)
    result = reconcile_files(sorted(results.glob("predict/*")), sorted(results.glob("probe/*")))
    assert [(r.rank, r.step) for r in result.differences()] == [(2, 3)]


def test_rank_ranges():
    assert rank_ranges([3, 1, 2, 7, 5, 6]) == "1-3, 5-7"
    assert rank_ranges([4]) == "4"
    assert len(RUNS) == 4
