"""The verdict, and the answer to the question of the page, computed from the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from train_ledger.plot.data import Results, framework_title
from train_ledger.plot.lifeline import Lane, kept_apart, lanes, masters, part_of_matrix
from train_ledger.plot.text import plural
from train_ledger.reconcile.rows import CLEAN, UNCLAIMED

from .tables import Column, Table

QUESTION = (
    "Where does one bf16 parameter live in each framework, when is it all-gathered, when is it released, and on which "
    "GPU is its fp32 master copy?"
)


@dataclass(frozen=True)
class Verdict:
    """`state` is `exact`, `differs`, or `predicted` where nothing was measured; `text` the line that is printed."""

    state: str
    text: str


def verdict(results: Results) -> Verdict:
    """One line: how many runs and ranks, and what is left unexplained."""
    n_runs = len(results.runs)
    if not n_runs:
        return Verdict("predicted", f"{plural(len(results.predictions), 'run')} predicted, nothing measured")
    layout, resident, calls = results["layout"], results["resident"], results["collectives"]
    ranks = len(pd.concat([f[["run", "rank"]] for f in (layout, resident, calls)]).drop_duplicates())
    bad = {name: differing(frame) for name, frame in (("bytes", resident), ("calls", calls), ("layout", layout))}
    n_bytes = int(bad["bytes"]["residual_bytes"].abs().sum())
    delta = (bad["calls"]["measured_count"] - bad["calls"]["predicted_count"]).abs()
    n_calls = int(delta.where(delta > 0, bad["calls"]["measured_count"]).sum())
    text = (
        f"{'all ' if n_runs > 1 else ''}{plural(n_runs, 'run')}, {plural(ranks, 'rank')}: "
        f"{plural(n_bytes, 'byte')}, {plural(n_calls, 'call')} unexplained"
    )
    if not bad["layout"].empty:
        text += f", {plural(len(bad['layout']), 'coordinate or group', 'coordinates or groups')} differ"
    return Verdict("exact" if all(f.empty for f in bad.values()) else "differs", text)


def differing(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows that are not explained."""
    return frame[~frame["verdict"].isin(CLEAN)]


def summary_table(results: Results) -> Table:
    """A row a run: what was compared and what is left."""
    rows = []
    for run in results.run_names:
        resident, calls = results.of("resident", run), results.of("collectives", run)
        if resident.empty and calls.empty and not any(r["run"] == run for r in results.runs):
            rows.append(_predicted_only(results, run))
            continue
        per_rank = resident.groupby("rank")[["predicted_bytes", "measured_bytes"]].sum()
        owned = resident[resident["owner"] != UNCLAIMED].groupby("rank")["measured_bytes"].sum()
        bad = [differing(f) for f in (resident, calls, results.of("layout", run))]
        rows.append(
            {
                "run": run,
                "framework": framework_title(results.framework(run)),
                "world": next((str(r["world"]) for r in results.runs if r["run"] == run), ""),
                "ranks": len(per_rank),
                "predicted_bytes": int(per_rank["predicted_bytes"].max()) if len(per_rank) else None,
                "measured_bytes": int(owned.max()) if len(owned) else None,
                "containers": len(resident[resident["owner"] != UNCLAIMED]),
                "kinds": len(calls),
                "calls": int(calls["measured_count"].sum()),
                "residual_bytes": int(bad[0]["residual_bytes"].abs().sum()),
                "verdict": "exact" if all(f.empty for f in bad) else "differs",
            }
        )
    return Table(
        "summary",
        "What was compared, run by run, and what is left unexplained.",
        [
            Column("run", "run", "code"),
            Column("framework", "framework"),
            Column("world", "world"),
            Column("ranks", "ranks", "count"),
            Column("predicted_bytes", "fullest rank, predicted [B]", "bytes"),
            Column("measured_bytes", "fullest rank, measured [B]", "bytes"),
            Column("containers", "containers", "count"),
            Column("kinds", "kinds of call", "count"),
            Column("calls", "calls", "count"),
            Column("residual_bytes", "residual [B]", "bytes"),
            Column("verdict", "verdict", "verdict"),
        ],
        rows,
    )


def _predicted_only(results: Results, run: str) -> dict[str, Any]:
    p = results.predictions[run]
    return {
        "run": run,
        "framework": framework_title(str(p["framework"])),
        "world": "",
        "ranks": len(p["ranks"]),
        "predicted_bytes": max((r["resident_bytes"] for r in p["ranks"]), default=None),
        "verdict": "not measured",
    }


def answer_table(results: Results) -> Table:
    """A row a run: where the weight lives, when it is gathered and released, and where its fp32 master is."""
    rows = []
    for lane in lanes(results):
        rest = lane.slots[0][1]
        rows.append(
            {
                "framework": framework_title(lane.framework),
                "run": lane.run,
                "lives": _at_rest(results, rest, lane),
                "gathered": _changes(lane, to_whole=True) or _refreshed(results, lane),
                "released": _changes(lane, to_whole=False) or "never",
                "master": masters(results, lane.run),
            }
        )
    return Table(
        "answer",
        "The answer, read from the recorded step of one weight on one rank of each run.",
        [
            Column("framework", "framework"),
            Column("run", "run", "code"),
            Column("lives", "between steps it is"),
            Column("gathered", "made whole (with tensor parallelism: its slice)"),
            Column("released", "released"),
            Column("master", "fp32 master on each rank"),
        ],
        rows,
    )


_WHEN = {
    "before_forward": "before its forward",
    "forward": "for its forward",
    "after_forward": "after its forward",
    "before_backward": "before its backward",
    "backward": "for its backward",
    "after_backward": "after its backward",
    "before_optimizer": "before the optimizer step",
    "after_optimizer": "after the optimizer step",
    "step_end": "at the end of the step",
}


def _refreshed(results: Results, lane: Lane) -> str:
    """Of a weight that is always whole: the gathers that bring what other ranks have updated."""
    frame = results.of("collectives", lane.run)
    frame = frame[(frame["rank"] == lane.rank) & (frame["op"] == "all_gather")]
    frame = frame[~frame["group"].map(lambda names: "tp" in names.split(" = "))]
    told = [f"{plural(r['measured_count'], 'all-gather')} on {r['group']}" for r in frame.to_dict("records")]
    return "it is always whole" + (f"; {', '.join(told)} a step bring what other ranks updated" if told else "")


def _at_rest(results: Results, event: pd.Series, lane: Lane) -> str:
    if event["state"] == "empty":
        if kept := kept_apart(results, lane):
            return f"an empty tensor; its {kept}"
        return "an empty tensor; its elements are in a shard that the framework keeps apart"
    part = part_of_matrix(event["numel"], lane.full_numel, lane.matrix_numel)
    if event["state"] == "view":
        return f"{part}, in {event['dtype']}, as a view of a larger buffer that stays allocated"
    return f"{part}, in {event['dtype']}"


def _changes(lane: Lane, *, to_whole: bool) -> str:
    """Events at which the weight becomes whole, or ceases to be, in words; each told once, micro-batches together."""
    found: list[str] = []
    whole = lane.slots[0][1]["state"] in {"full", "view"}
    for _, event in lane.slots[1:]:
        now = event["state"] in {"full", "view"}
        if now != whole and now == to_whole:
            found.append(_WHEN[str(event["event"])])
        whole = now
    return ", ".join(dict.fromkeys(found))
