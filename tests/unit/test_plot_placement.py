"""Which ranks are said to hold which part of the followed weight and of its fp32 master."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_results import make_results

from train_ledger.plot.data import Results, read_results
from train_ledger.plot.placement import master_words, slices
from train_ledger.plot.runs import batch_titles
from train_ledger.spec.placement import copies

Change = dict[int, int]


def told(folder: Path, framework: str, kept: Change, tensor_parallel: int = 1, replicas: int = 0) -> Results:
    """A run whose ranks keep so many elements of the master of a weight of 3,600 on each rank; 0 is none."""

    def change(prediction: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        prediction["config"] = {"parallel": {"tensor_parallel": tensor_parallel}}
        for r, ledger in zip(ranks, prediction["ranks"], strict=True):
            if replicas:
                at = {"dp_replicate": r["rank"] * replicas // 8, "dp_shard": r["rank"] % (8 // replicas)}
                r["coords"] = ledger["coords"] = at
            for event in (r["lifeline"] or {"events": []})["events"]:
                event["master"] = {**event["master"], "numel": kept[r["rank"]]} if kept.get(r["rank"]) else None

    return read_results(make_results(folder, {"run": framework}, change))


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ({0: 3600, 1: 3600}, "all of half 1 on rank 0; all of half 2 on rank 1; none on ranks 2-3"),
        ({2: 3600, 3: 3600}, "all of half 1 on rank 2; all of half 2 on rank 3; none on ranks 0-1"),
        (
            # The range of the distributed optimizer ends within the weight: on the ranks of half 1, not of half 2.
            {0: 1200, 2: 2400, 3: 3600},
            "of half 1 elements 0 to 1,199 on rank 0, elements 1,200 to 3,599 on rank 2; all of half 2 on rank 3; "
            "none on rank 1",
        ),
        (
            {0: 1800, 1: 1800, 2: 1800, 3: 1800},
            "1/2 of half 1 each on ranks 0, 2, in that order; 1/2 of half 2 each on ranks 1, 3, in that order",
        ),
        # Without a distributed optimizer each data-parallel rank keeps all of it.
        (dict.fromkeys(range(4), 3600), "all of half 1 each on ranks 0, 2; all of half 2 each on ranks 1, 3"),
    ],
)
def test_megatron_halves_and_who_keeps_which_of_the_master(tmp_path: Path, kept: Change, words: str) -> None:
    results = told(tmp_path / "r", "megatron", kept, tensor_parallel=2)
    assert copies(slices(results, "run")) == "half 1 on ranks 0, 2, half 2 on ranks 1, 3"
    assert master_words(results, "run") == f"{words} (main_param, float32)"
    assert sum(k.numel for s in slices(results, "run") for k in s.kept) == sum(kept.values())


def test_a_weight_that_is_not_split_has_no_halves(tmp_path: Path) -> None:
    results = told(tmp_path / "r", "megatron", {0: 3600, 1: 3600})
    assert copies(slices(results, "run")) == "on ranks 0-3"
    assert (
        master_words(results, "run") == "all of the matrix each on ranks 0-1; none on ranks 2-3 (main_param, float32)"
    )


def test_replicas_keep_the_same_again(tmp_path: Path) -> None:
    results = told(tmp_path / "r", "torchtitan", dict.fromkeys(range(8), 900), replicas=2)
    assert master_words(results, "run") == (
        "1/4 of the matrix each on ranks 0-3 and again on ranks 4-7, in that order (param, float32, the weight itself)"
    )


def test_the_last_part_of_a_padded_weight_ends_with_the_weight(tmp_path: Path) -> None:
    """Eight parts of 451 are 8 more than the weight: the last holds 443 of it."""
    results = told(tmp_path / "r", "deepspeed", {**dict.fromkeys(range(7), 451), 7: 443})
    assert master_words(results, "run").endswith("elements 3,157 to 3,599 on rank 7 (main_param, float32)")


def test_parts_that_are_no_copy_are_counted_and_not_placed(tmp_path: Path) -> None:
    results = told(tmp_path / "r", "deepspeed", {0: 100, 5: 200})
    assert master_words(results, "run") == (
        "of the matrix 100 elements on rank 0, 200 elements on rank 5; none on ranks 1-4, 6-7 (main_param, float32)"
    )


def test_no_master_at_all(tmp_path: Path) -> None:
    assert master_words(told(tmp_path / "r", "deepspeed", {}), "run") == "on no rank that followed the weight"


def test_narrow_panels_tell_runs_apart_by_their_batch(tmp_path: Path) -> None:
    batch = {"torchtitan-a": 8, "torchtitan-b": 16}

    def change(prediction: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        prediction["config"] = {"global_batch": batch.get(prediction["run"], 16)}

    runs = {"deepspeed-x": "deepspeed", **dict.fromkeys(batch, "torchtitan")}
    results = read_results(make_results(tmp_path / "r", runs, change))
    assert batch_titles(results, list(runs)) == {
        "deepspeed-x": "DeepSpeed",
        "torchtitan-a": "torchtitan, batch 8",
        "torchtitan-b": "torchtitan, batch 16",
    }
    batch["torchtitan-b"] = 8
    results = read_results(make_results(tmp_path / "s", runs, change))
    assert batch_titles(results, list(runs))["torchtitan-b"] == "torchtitan b"
