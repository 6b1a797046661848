"""The reckoning behind the figures: schedules, lanes, partitions, colours, folding."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from made_results import EVENTS, RUNS, make_paper, make_results, on_gpu

from train_ledger.plot import lifeline, resident, style, within
from train_ledger.plot.data import read_results, run_steps, unit_for
from train_ledger.plot.expected import HAND_ESTIMATE, predicted_figures
from train_ledger.plot.grids import partitions
from train_ledger.plot.lifeline import kept_apart, lanes, words
from train_ledger.plot.make import make_figures
from train_ledger.plot.placement import master_words, matrix_numel, part_of_matrix
from train_ledger.plot.resident import OTHERS, resident_frame
from train_ledger.plot.resident import _fold as fold
from train_ledger.plot.runs import panel_titles
from train_ledger.plot.schedule import pipelines
from train_ledger.plot.text import plural, shorten
from train_ledger.plot.traffic import busiest_rank, traffic_frame
from train_ledger.report.build import build_report, read_figures
from train_ledger.spec.placement import share
from train_ledger.spec.units import fmt_auto


def test_lanes_tell_equal_micro_batches_once(tmp_path: Path) -> None:
    results = read_results(make_results(tmp_path / "laptop"))
    found = {lane.framework: lane for lane in lanes(results)}
    assert found["megatron"].kinds == [list(range(8))]
    assert words(found["megatron"]) == "view (bfloat16)"
    assert words(found["deepspeed"]) == "empty → full (bfloat16) → empty → full (bfloat16) → empty"
    assert len(found["deepspeed"].slots) == 1 + len(EVENTS) + 3
    assert master_words(results, "deepspeed-zero3-dp8") == (
        "1/8 of the matrix each on ranks 0-7, in that order (main_param, float32)"
    )


def test_a_lane_prefers_a_rank_that_keeps_a_master(tmp_path: Path) -> None:
    def change(prediction: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        for r in ranks[:3]:
            for e in r["lifeline"]["events"]:
                e["master"] = None
        # The second micro-batch lives otherwise: both are told.
        ranks[3]["lifeline"]["events"][7]["state"] = "empty"

    results = read_results(make_results(tmp_path / "laptop", {"run": "deepspeed"}, change))
    (lane,) = lanes(results)
    assert lane.rank == 3
    assert lane.kinds == [[0], [1]]
    assert master_words(results, "run") == (
        "1/8 of the matrix each on ranks 3-7; none on ranks 0-2 (main_param, float32)"
    )


def test_share() -> None:
    assert share(450, 3600) == "1/8"
    assert share(3600, 3600) == "whole"
    assert share(1201, 3600) == "≈ 0.334"
    assert share(5, 0) == "none"


def test_shares_are_of_the_matrix_and_of_the_slice() -> None:
    assert part_of_matrix(450, 1800, 3600) == "1/8 of the matrix (1/4 of its tensor-parallel half)"
    assert part_of_matrix(1800, 1800, 3600) == "whole tensor-parallel half (1/2 of the matrix)"
    assert part_of_matrix(450, 3600, 3600) == "1/8 of the matrix"
    assert part_of_matrix(3600, 3600, 3600) == "whole matrix"
    assert part_of_matrix(450, 450, 3600) == "whole tensor-parallel slice (1/8 of the matrix)"


def test_the_matrix_follows_from_the_config(tmp_path: Path) -> None:
    results = read_results(make_results(tmp_path / "laptop", {"megatron-tp2-pp2-dp2": "megatron"}))
    (full,) = {lane.full_numel for lane in lanes(results)}
    assert matrix_numel(results, "megatron-tp2-pp2-dp2") == full  # no config: what the rank computes with

    def told(config: dict[str, Any]) -> int:
        runs = [{**r, "config": config} for r in results.runs]
        return matrix_numel(replace(results, runs=runs), "megatron-tp2-pp2-dp2")

    assert told({"parallel": {"tensor_parallel": 2}}) == 2 * full
    sizes = {"num_layers": 2, "num_attention_heads": 6, "num_query_groups": 2, "ffn_hidden_size": 150, "head_dim": 10}
    sizes |= {"vocab_size": 522, "seq_length": 32, "max_position_embeddings": 32}
    split = {"name": "x", **sizes, "hidden_size": full * 2 // 60}  # o_proj is (hidden, 60)
    assert told({"parallel": {"tensor_parallel": 2}, "model": split}) == 2 * full
    # A weight that tensor parallelism does not split is whole on every rank.
    assert told({"parallel": {"tensor_parallel": 2}, "model": {**split, "hidden_size": full // 60}}) == full


def test_an_empty_weight_is_said_to_be_in_the_flat_container(tmp_path: Path) -> None:
    results = read_results(make_results(tmp_path / "laptop"))
    kept = {lane.framework: kept_apart(results, lane) for lane in lanes(results)}
    assert kept["deepspeed"].startswith("bfloat16 shard (1/8 of the matrix) stays in the flat param container")
    assert kept["megatron"] == kept["torchtitan"] == ""
    (drawn,) = lifeline.draw(results)
    assert kept["deepspeed"] in drawn.caption


def test_a_run_looks_alike_in_every_figure() -> None:
    first = style.run_styles(["a", "b", "c"])
    assert style.run_styles(["a", "b", "c", "b", "reference"])["c"] == first["c"]
    assert len(set(first.values())) == 3


def test_titles_tell_runs_of_one_framework_apart() -> None:
    found = panel_titles([("torchtitan", "torchtitan-tp2"), ("torchtitan", "torchtitan-tp2-x"), ("megatron", "m")])
    assert found == {"torchtitan-tp2": "torchtitan tp2", "torchtitan-tp2-x": "torchtitan tp2-x", "m": "Megatron Core"}


def test_the_peak_within_a_step_is_the_trace_s(tmp_path: Path) -> None:
    results = read_results(make_results(tmp_path / "laptop", {"run": "deepspeed"}, on_gpu))
    found, run, rank, _ = within.traces([results])[0]
    peak = within.peak_bytes(found, run, rank)
    assert peak == int(results["peaks"]["peak_bytes"].max())
    (drawn,) = within.draw([results])
    assert f"peak {fmt_auto(peak)}" in drawn.alt


def test_figures_are_numbered_in_page_order_whatever_the_list(tmp_path: Path) -> None:
    folder = make_results(tmp_path / "laptop", {"run": "deepspeed"})
    make_figures(folder)
    listing = folder / "figures" / "figures.json"
    data = json.loads(listing.read_text())
    listing.write_text(json.dumps({**data, "figures": data["figures"][::-1]}))
    names = [f["name"] for f in data["figures"]]
    assert [read_figures(folder / "figures")[n]["number"] for n in names] == list(range(1, len(names) + 1))


def test_partitions_merge_names_and_leave_out_groups_of_one() -> None:
    groups = [
        {"name": "world", "ranks": [0, 1, 2, 3]},
        {"name": "tp", "ranks": [0, 1]},
        {"name": "tp", "ranks": [2, 3]},
        {"name": "cp", "ranks": [0]},
        {"name": "ep", "ranks": [2, 3]},
        {"name": "ep", "ranks": [0, 1]},
    ]
    assert partitions(groups) == [(["world"], [(0, 1, 2, 3)]), (["tp", "ep"], [(0, 1), (2, 3)])]


def test_colours_belong_to_names() -> None:
    assert style.container_colour("param") == style.CONTAINER_COLOURS["param"]
    assert style.container_colour("new_thing") == style.container_colour("new_thing")
    assert len(set(style.CONTAINER_COLOURS.values())) == len(style.CONTAINER_COLOURS)
    assert style.container_order(["unclaimed", "zeta", "grad", "param"]) == ["param", "grad", "zeta", "unclaimed"]
    assert style.tint("#000000", 0.5) == "#808080"


def test_small_containers_are_folded_without_losing_a_byte(tmp_path: Path) -> None:
    frame = resident_frame(read_results(make_results(tmp_path / "laptop")))
    folded, how_many = fold(frame)
    assert how_many >= 2
    assert OTHERS in set(folded["container"])
    assert folded["predicted_bytes"].sum() == frame["predicted_bytes"].sum()
    assert {"param", "grad", "exp_avg"} <= set(folded["container"])


def test_the_main_figure_is_drawn_for_one_column_too(tmp_path: Path) -> None:
    """3.4 in wide, the same fonts: it is placed in a paper as it is, where the wide one would be shrunk."""
    folder = make_results(tmp_path / "laptop")
    listed = make_figures(folder)
    assert [f["name"] for f in listed if f["column"]] == ["resident"]
    wide, narrow = ((folder / "figures" / f"resident{kind}.svg").read_text() for kind in ("", "_column"))
    widths = [float(re.search(r'viewBox="0 0 ([0-9.]+) ', text)[1]) for text in (wide, narrow)]
    assert widths == pytest.approx([7.1 * 72, 3.4 * 72])
    assert "figures/resident_column.pdf" in build_report(folder).read_text(encoding="utf-8")
    many = read_results(make_results(tmp_path / "many", {f"run{i}": "deepspeed" for i in range(5)}))
    (drawn,) = resident.draw(many)
    assert drawn.column is None


def test_figures_of_a_prediction(tmp_path: Path) -> None:
    paper = read_results(make_paper(tmp_path / "paper"))
    prediction = paper.predictions["deepspeed-zero3-dp8"]
    figures = predicted_figures(prediction)
    assert figures.resident_bytes == prediction["ranks"][0]["resident_bytes"]
    assert figures.data_wire_bytes > 0
    assert figures.tensor_wire_bytes == figures.pipeline_wire_bytes == 0
    assert predicted_figures(paper.predictions["megatron-tp2-pp2-dp2"]).pipeline_wire_bytes > 0
    assert set(HAND_ESTIMATE) < set(RUNS)


def test_traffic_without_a_measurement_is_the_prediction(tmp_path: Path) -> None:
    measured = read_results(make_results(tmp_path / "laptop"))
    for file in (tmp_path / "laptop" / "reconcile").iterdir():
        file.unlink()
    predicted = read_results(tmp_path / "laptop")
    both = [
        traffic_frame(r).groupby(["run", "rank", "op"])[["predicted_count", "predicted_bytes"]].sum()
        for r in (measured, predicted)
    ]
    pd.testing.assert_frame_equal(both[0], both[1])
    assert busiest_rank(traffic_frame(measured)) == 0
    assert pipelines(predicted) == []  # made-up predictions carry no config


def test_steps_of_a_run_are_those_of_all_ranks(tmp_path: Path) -> None:
    def change(prediction: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        for r in ranks[1:]:
            for s in r["steps"]:
                s["loss"] = None

    results = read_results(make_results(tmp_path / "laptop", {"run": "deepspeed"}, change))
    assert [(s.step, s.loss) for s in run_steps(results, "run")] == [(1, 6.4), (2, 6.3), (3, 6.2), (4, 6.1)]


def test_words() -> None:
    assert unit_for(5e9) == ("GB", 1e9)
    assert unit_for(12) == ("B", 1.0)
    assert shorten("a" * 50, 11) == "aaaaaa…aaaa"
    assert shorten("a\x00b", 9) == "a b"
    assert plural(1, "rank") == "1 rank"
    assert plural(2000, "entry", "entries") == "2,000 entries"
