"""What the page says of measurements on GPUs: their verdict, what their set says of itself, peaks and rates."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from made_results import RUNS, make_parity, make_results, on_gpu
from test_report_content import Page

from train_ledger.cli import main
from train_ledger.plot import style
from train_ledger.plot.data import read_results
from train_ledger.plot.make import make_figures
from train_ledger.report.answers import gpu_answer_table
from train_ledger.report.build import build_report
from train_ledger.report.gpu_tables import evidence_table, large_peaks, peak_table, time_table
from train_ledger.spec.config import load_run

ROOT = Path(__file__).parents[2]


def test_evidence_from_gpus_stands_beside(tmp_path):
    folder = make_results(tmp_path / "laptop", {"deepspeed-zero3-dp8": "deepspeed"})
    evidence = make_results(tmp_path / "llama_h200", {"deepspeed-zero3-dp8": "deepspeed"}, on_gpu)
    assert main(["report", str(folder), "--evidence", str(evidence), "--strict"]) == 0
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert "llama_h200 : 1 run, 8 ranks: 0 bytes, 0 calls unexplained" in page.text
    assert "Figure" in page.text
    assert "Memory within one step" in page.text
    assert "67,108,864" in page.text  # the workspaces
    with (folder / "tables" / "evidence.csv").open(encoding="utf-8") as f:
        rows = list(csv.DictReader(f))
    assert [(r["ranks"], r["left_bytes"], r["verdict"]) for r in rows] == [("0-7", "0", "exact")]
    with (folder / "tables" / "nccl.csv").open(encoding="utf-8") as f:
        assert all(r["calls"] == r["records"] == r["kernels"] for r in csv.DictReader(f))
    assert "linear" in page.text
    assert "✓ on NVIDIA H200: 1 run, 8 ranks: 0 bytes, 0 calls unexplained" in page.text
    assert "The same at full size on GPUs" in page.text


def test_what_a_set_of_measurements_says_of_itself_is_told(tmp_path):
    said = json.loads((ROOT / "reference/llama3.2-1b_2xh200_2026-11-30/provenance.json").read_text())
    folder = make_results(tmp_path / "laptop", {"run": "deepspeed"})
    evidence = [make_results(tmp_path / name, {"run": "deepspeed"}, on_gpu) for name in ("one", "two")]
    for each in evidence:
        (each / "provenance.json").write_text(json.dumps(said))
    make_figures(folder, evidence_dirs=evidence)
    text = Page(build_report(folder, evidence_dirs=evidence).read_text(encoding="utf-8")).text
    for word in (said["hardware"], said["commit"], *said["notes"]):
        assert text.count(word) == 1  # once for a set, however many of its folders are shown


def test_strict_judges_the_evidence_too(tmp_path, capsys):
    """A byte, a call, or a loss that is not explained in a folder of --evidence fails, and so does an empty one."""

    def byte(prediction: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        on_gpu(prediction, ranks)
        ranks[3]["census"]["containers"][0]["bytes"] += 1

    def call(prediction: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        on_gpu(prediction, ranks)
        ranks[3]["collectives"][0]["count"] += 1

    folder = make_results(tmp_path / "laptop", {"run": "deepspeed"})
    good = make_results(tmp_path / "good", {"run": "deepspeed"}, on_gpu)
    unequal = make_results(tmp_path / "unequal", {"run": "deepspeed"}, on_gpu)
    make_parity(unequal)
    told = unequal / "parity" / "parity.json"
    told.write_text(told.read_text().replace('"verdict": "equal"', '"verdict": "differs"', 1))
    unmeasured = make_results(tmp_path / "unmeasured", {"run": "deepspeed"}, on_gpu)
    shutil.rmtree(unmeasured / "reconcile")
    bad = {
        make_results(tmp_path / "byte", {"run": "deepspeed"}, byte): "1 byte, 0 calls unexplained",
        make_results(tmp_path / "call", {"run": "deepspeed"}, call): "0 bytes, 1 call unexplained",
        unequal: "the losses are not equal",
        unmeasured: "nothing was measured",
    }
    command = ["report", str(folder), "--evidence", str(good)]
    assert main([*command, "--strict"]) == 0
    for evidence, why in bad.items():
        assert main([*command, "--evidence", str(evidence)]) == 0
        capsys.readouterr()
        assert main([*command, "--evidence", str(evidence), "--strict"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"train-ledger report: {evidence.name}: ")
        assert why in line


def test_small_owners_of_a_peak_are_told_together_without_losing_a_byte(tmp_path):
    def change(prediction: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        on_gpu(prediction, ranks)
        for r in ranks:
            top = r["peak"]["owners"][0]
            small = [{"site": f"a.py:f{i}", "bytes": 100 + i, "blocks": 1} for i in range(3)]
            top["bytes"] -= sum(o["bytes"] for o in small)
            r["peak"]["owners"] += small

    table = peak_table([read_results(make_results(tmp_path / "gpu", {"run": "deepspeed"}, change))])
    shown = large_peaks(table)
    assert len(table.rows) == 5
    assert [r["site"] for r in shown.rows][-1] == "the rest"
    assert len(shown.rows) == 3
    for key in ("bytes", "blocks"):
        assert sum(r[key] for r in shown.rows) == sum(r[key] for r in table.rows)


def test_the_peak_is_the_recorded_steps_and_a_gpu_that_all_share_is_named_once(tmp_path):
    def twice(prediction: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        on_gpu(prediction, ranks)
        for r in ranks:
            r["steps"][0]["memory"]["allocated_bytes.all.peak"] *= 7  # another step's

    results = read_results(make_results(tmp_path / "gpu", {"run": "deepspeed"}, twice))
    table = evidence_table([results])
    assert {r["peak_bytes"] for r in table.rows} == set(results["peaks"]["peak_bytes"])
    assert "gpu" not in {c.key for c in table.printed().columns}
    assert "NVIDIA H200" in table.caption
    other = make_results(tmp_path / "other", {"run": "deepspeed"}, lambda p, r: (on_gpu(p, r), _rename(r)))
    both = evidence_table([results, read_results(other)])
    assert "gpu" in {c.key for c in both.printed().columns}


def _rename(ranks: list[dict[str, Any]]) -> None:
    for r in ranks:
        r["device"]["name"] = "NVIDIA A100"


def test_the_share_of_a_gpus_rate_by_datasheet_and_as_measured(tmp_path):
    """Eight ranks measured 700, 702, … 714 Tflop/s; the median counts. A run without it has no empty column."""
    config = load_run(Path(__file__).parents[2] / "config/runs/deepspeed-zero3-dp8.yaml").to_dict()

    def now(prediction, ranks):
        on_gpu(prediction, ranks)
        prediction["config"] = config

    measured = read_results(make_results(tmp_path / "measured", {"run": "deepspeed"}, now))
    (row,) = time_table([measured]).rows
    assert row["matrix_tflop_per_s"] == pytest.approx(707)
    assert row["mfu_measured"] / row["mfu"] == pytest.approx(989 / 707)
    assert {"mfu_measured", "matrix_tflop_per_s"} <= {c.key for c in time_table([measured]).printed().columns}

    def before(prediction, ranks):
        now(prediction, ranks)
        for r in ranks:
            del r["timeline"]["matrix_flop_per_s"]

    old = time_table([read_results(make_results(tmp_path / "old", {"run": "deepspeed"}, before))])
    assert old.rows[0]["mfu"] == row["mfu"]
    assert not {"mfu_measured", "matrix_tflop_per_s"} & {c.key for c in old.printed().columns}
    # Head and caption say against what: no one takes the datasheet's rate for a measured one.
    assert "What these GPUs reach in a matrix product was not measured." in old.caption
    assert "the measured rate is that of 8192 x 8192" in time_table([measured]).caption
    assert "MFU against the datasheet's dense bf16 rate [%]" in {c.label for c in old.columns}
    assert "(NVIDIA H200: 989 Tflop/s)" in old.caption


def test_losses_on_gpus_are_drawn_in_the_colours_of_the_page(tmp_path):
    """The figure stands in the section on GPUs; a run of the page's name keeps its look in whatever order."""
    runs = dict(itertools.islice(RUNS.items(), 2))
    folder = make_results(tmp_path / "laptop", runs)
    evidence = make_results(tmp_path / "shared", dict(reversed(runs.items())), on_gpu)
    make_parity(evidence)
    (listed,) = [f for f in make_figures(folder, evidence_dirs=[evidence]) if f["name"] == "parity_gpu"]
    assert listed["section"] == "evidence"
    assert "Source: shared/parity/losses.csv." in listed["caption"]
    page = build_report(folder, evidence_dirs=[evidence]).read_text(encoding="utf-8")
    assert page.index('id="h-evidence"') < page.index('id="figure-parity_gpu"') < page.index('id="h-losses"')
    first = style.run_styles([*runs, *reversed(runs)])
    assert first == style.run_styles(list(runs))


def test_the_answer_at_full_size_is_of_the_largest_model(tmp_path):
    large, small = (read_results(make_results(tmp_path / n, {"run": "deepspeed"}, on_gpu)) for n in ("large", "small"))
    for results, model in ((large, "llama3.2-1b"), (small, "laptop")):
        run = load_run(ROOT / "config/runs/deepspeed-zero3-dp8.yaml", overrides={"model": model})
        results.runs[0]["config"] = run.to_dict()
    assert [row["run"] for row in gpu_answer_table([small, large]).rows] == ["run"]
    assert gpu_answer_table([small, large]).rows == gpu_answer_table([large]).rows
    assert {row["model"] for row in evidence_table([small, large]).rows} == {"laptop", "llama3.2-1b"}


def test_runs_of_two_folders_are_told_apart_in_the_answer(tmp_path):
    folder = make_results(tmp_path / "laptop", {"run": "deepspeed"})
    both = [make_results(tmp_path / name, {"run": "deepspeed"}, on_gpu) for name in ("one", "two")]
    found = gpu_answer_table([read_results(each) for each in both])
    assert [row["run"] for row in found.rows] == ["one/run, two/run"]
    assert "one/run, two/run" in Page(build_report(folder, evidence_dirs=both).read_text(encoding="utf-8")).text
