"""Every figure in the README that is computed, against the measurements that are kept and today's prediction."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from train_ledger.commands.evidence import check
from train_ledger.plot import resident
from train_ledger.plot.data import Results, read_results
from train_ledger.plot.placement import slices as measured_slices
from train_ledger.plot.save import save
from train_ledger.predict import predict
from train_ledger.predict.owner import slices as predicted_slices
from train_ledger.report.gpu_tables import evidence_table, nccl_table, time_table
from train_ledger.report.tables import to_csv
from train_ledger.spec.config import load_comparison
from train_ledger.spec.run import Run

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXT = " ".join(README.split())
#: The sets with what the probes cost, by how busy the host was.
QUIET, BUSY = "llama3.2-1b_h200_2026-11-29", "llama3.2-1b_h200_2026-11-30"
#: What the README calls a run of the paper.
RUNS = {
    "Megatron Core TP2 x PP2 x DP2": "megatron-tp2-pp2-dp2",
    "DeepSpeed ZeRO-3 DP8": "deepspeed-zero3-dp8",
    "torchtitan FSDP4 x TP2": "torchtitan-fsdp4-tp2",
    "torchtitan FSDP4 x TP2, batch 16": "torchtitan-fsdp4-tp2-matched",
}
COLUMNS = ("container_bytes", "library_bytes", "requested_bytes", "left_bytes", "peak_bytes")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Results], list[str]]:
    """All that is kept, by comparison, reconciled with today's prediction; and the verdict lines."""
    out = tmp_path_factory.mktemp("evidence")
    lines, differs = check(ROOT / "reference", out)
    assert differs == []
    return {folder.name: read_results(folder) for folder in sorted(out.glob("*/*"))}, lines


def ranks_of(text: str) -> set[int]:
    """`0-1, 4` as numbers."""
    parts = [part.split("-") for part in text.split(", ")]
    return {rank for part in parts for rank in range(int(part[0]), int(part[-1]) + 1)}


def readme_rows() -> list[tuple[str, set[int], dict[str, int]]]:
    """Run, ranks and figures of each row of the README's table of GPU evidence."""
    found, name = [], ""
    for line in README.splitlines():
        cells = [cell.strip().strip("*") for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and re.fullmatch(r"\d(-\d)?", cells[1]):
            name = cells[0] or name
            figures = [int(cell.replace(",", "")) for cell in cells[2:]]
            found.append((RUNS[name], ranks_of(cells[1]), dict(zip(COLUMNS, figures, strict=True))))
    return found


def test_the_table_of_gpu_evidence_is_the_reports(kept):
    """As tables/evidence.csv has it: bytes of every rank equal, the peak that of the fullest of a row's ranks."""
    results, _ = kept
    csv_rows = list(csv.DictReader(to_csv(evidence_table([results["paper-fake"]])).splitlines()))
    rows = readme_rows()
    assert {run for run, _, _ in rows} == set(RUNS.values()) == {r["run"] for r in csv_rows}
    told: Counter[tuple[str, int]] = Counter()
    for run, ranks, figures in rows:
        mine = [r for r in csv_rows if r["run"] == run and ranks_of(r["ranks"]) & ranks]
        assert set().union(*(ranks_of(r["ranks"]) for r in mine)) == ranks
        for column in COLUMNS[:-1]:
            assert {int(r[column]) for r in mine} == {figures[column]}, (run, column)
        assert max(int(r["peak_bytes"]) for r in mine) == figures["peak_bytes"], run
        assert {(r["verdict"], r["world"], r["gpu"]) for r in mine} == {("exact", "fake", "NVIDIA H200")}
        told.update((run, rank) for rank in ranks)
    assert set(told.values()) == {1}
    assert {(run, rank) for run in RUNS.values() for rank in range(8)} == set(told)


def test_the_shape_and_the_batch_are_the_measured_ones(kept):
    results, _ = kept
    configs = {r["run"]: r["config"] for r in results["paper-fake"].runs}
    assert {c["model"]["name"] for c in configs.values()} == {"llama3.2-1b"}
    assert f"sequence {configs['deepspeed-zero3-dp8']['seq_length']}" in TEXT
    assert {c["seq_length"] for c in configs.values()} == {8192}
    assert (
        configs["torchtitan-fsdp4-tp2-matched"]["global_batch"] == 16 != configs["torchtitan-fsdp4-tp2"]["global_batch"]
    )


def test_counts_of_nccls_kernels(kept):
    results, _ = kept
    rows = nccl_table([results["two-gpus"]]).rows

    def counted(run: str, op: str, column: str) -> int:
        return sum(int(r[column]) for r in rows if r["run"] == run and r["op"] == op)

    def told(run: str) -> list[int]:
        return [counted(run, op, "kernels") for op in ("all_gather", "reduce_scatter", "all_reduce")]

    a, b, c = told("megatron-tp2")
    assert f"Megatron TP2 {a} all-gathers, {b} reduce-scatters and {c} all-reduces" in TEXT
    assert "DeepSpeed ZeRO-3 {}, {} and {}".format(*told("deepspeed-zero3-dp2")) in TEXT
    assert "torchtitan FSDP {}, {} and {}".format(*told("torchtitan-fsdp2")) in TEXT
    words = {10: "ten"}
    assert f"{words[len(results['two-gpus'].runs)]} further layouts" in TEXT
    assert {r["world"] for r in results["two-gpus"].runs} == {"nccl"}


def largest_loss_difference(results: Results) -> str:
    """As the README writes it: 4.4e-5."""
    assert results.parity is not None
    summary = results.parity.summary
    assert summary["steps"] == 20
    assert {r["framework"] for r in results.runs} == {"megatron", "deepspeed", "torchtitan"}
    worst = max(p["loss"]["worst"] for p in summary["pairs"] if p["loss"])
    mantissa, exponent = f"{worst:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def test_losses_of_all_three_at_full_size_and_beside_a_cpus_reference(kept):
    results, lines = kept
    assert f"differ by {largest_loss_difference(results['paper-shared'])} of the loss at most" in TEXT
    assert f"a reference trained on a CPU by {largest_loss_difference(results['parity'])}." in TEXT
    assert "Twenty training steps at 1B, sequence 1024" in TEXT
    assert {r["config"]["seq_length"] for r in results["paper-shared"].runs} == {1024}
    assert len([line for line in lines if "3 runs and the reference agree over 20 steps" in line]) == 2


def test_the_rates_without_parallelism(kept):
    results, _ = kept
    rows = {r["run"]: r for r in time_table([results["one-gpu"]]).rows}
    told = [f"{rows[f'{name}-1gpu']['mfu_measured']:.1f}" for name in ("megatron", "torchtitan", "deepspeed")]
    assert f"reach {told[0]}, {told[1]} and {told[2]}% of the bf16 matrix rate" in TEXT
    rates = [r["matrix_tflop_per_s"] for r in rows.values()]
    assert f"{min(rates):.0f} to {max(rates):.0f} Tflop/s" in TEXT


def probe_costs(kept_set: str) -> list[dict[str, Any]]:
    """Modes of every probe_cost file of a set; all of them take no device memory."""
    files = sorted((ROOT / "reference" / kept_set).glob("probe_cost.*.json"))
    modes = [mode for file in files for mode in json.loads(file.read_text())["modes"]]
    assert len(modes) == 4 * len(files) > 0
    assert {m["device_bytes"] for m in modes} == {0}
    return modes


def test_what_the_probes_cost():
    quiet, busy = probe_costs(QUIET), probe_costs(BUSY)
    assert "The probes cost no device memory" in TEXT
    assert max(m["ratio"] for m in quiet if m["mode"] == "memory") < 1.001
    assert "On a quiet host the memory probe costs less than 0.1% of a step" in TEXT
    recording = [
        [100 * (m["ratio"] - 1) for m in modes if m["mode"] in {"collectives", "lifeline"}] for modes in (quiet, busy)
    ]
    assert f"the call-level ones {min(recording[0]):.0f} to {max(recording[0]):.0f}% of the steps" in TEXT
    assert f"on a busy one up to {max(recording[1]):.0f}%" in TEXT


def test_no_eight_gpus_are_claimed(kept):
    """The README says that eight GPUs with NCCL were not measured; it must be changed when they are."""
    results, _ = kept
    largest = max(len(r["ranks"]) for each in results.values() for r in each.runs if r["world"] == "nccl")
    assert ("Not measured so far: eight GPUs with NCCL" in TEXT) == (largest < 8)


def test_the_masters_lie_where_the_prediction_says(kept):
    """`train-ledger explain where` and the report's answer: the same slices, ranks and elements, run by run."""
    results, _ = kept
    compared = 0
    for each in results.values():
        for found in each.runs:
            predicted = predicted_slices(Run.from_dict(found["config"]))
            measured = measured_slices(each, found["run"])
            assert [(s.count, s.numel, s.ranks) for s in measured] == [(s.count, s.numel, s.ranks) for s in predicted]
            for a, b in zip(measured, predicted, strict=True):
                assert [(k.rank, k.numel, k.first) for k in a.kept] == [(k.rank, k.numel, k.first) for k in b.kept]
            compared += 1
    assert compared == 23


def test_the_first_figure_is_what_the_laptop_runs_hold_today(tmp_path):
    """docs/resident.svg is results/laptop/figures/resident.svg where every container holds what is predicted."""
    runs = load_comparison("laptop", ROOT / "config").runs
    predictions = {name: predict(run).to_dict() for name, run in runs.items()}
    rows = [
        {"run": name, "rank": r["rank"], "container": c["name"], "owner": c["owner"], "verdict": "exact"}
        | {"predicted_bytes": c["bytes"], "measured_bytes": c["bytes"]}
        for name, p in predictions.items()
        for r in p["ranks"]
        for c in r["containers"]
    ]
    measured = [
        {"run": name, "framework": run.framework, "world": run.world, "config": run.to_dict()}
        for name, run in runs.items()
    ]
    (drawn,) = resident.draw(Results("laptop", measured, {"resident": pd.DataFrame(rows)}, predictions))
    save(drawn, tmp_path)
    again = "draw it again: make report, then cp results/laptop/figures/resident.svg docs/ (CONTRIBUTING.md)"
    assert (tmp_path / "resident.svg").read_bytes() == (ROOT / "docs" / "resident.svg").read_bytes(), again
    assert "](docs/resident.svg)" in README
