"""The verdict, and the answer to the question of the page, computed from the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from train_ledger.plot.data import Results, framework_title, run_size
from train_ledger.plot.lifeline import Lane, kept_apart, lanes
from train_ledger.plot.placement import master_words, part_of_matrix, slices
from train_ledger.plot.text import plural
from train_ledger.reconcile.rows import CLEAN, UNCLAIMED
from train_ledger.spec.placement import copies, equal_copies
from train_ledger.spec.registry import FRAMEWORKS

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


@dataclass(frozen=True)
class Tally:
    """What was compared and what is left unexplained; tallies add up."""

    runs: int = 0
    ranks: int = 0
    n_bytes: int = 0
    calls: int = 0
    layout: int = 0
    exact: bool = True

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            *(self.runs + other.runs, self.ranks + other.ranks, self.n_bytes + other.n_bytes),
            *(self.calls + other.calls, self.layout + other.layout, self.exact and other.exact),
        )

    def __str__(self) -> str:
        text = (
            f"{'all ' if self.runs > 1 else ''}{plural(self.runs, 'run')}, {plural(self.ranks, 'rank')}: "
            f"{plural(self.n_bytes, 'byte')}, {plural(self.calls, 'call')} unexplained"
        )
        if self.layout:
            text += f", {plural(self.layout, 'coordinate or group', 'coordinates or groups')} differ"
        return text


def tally(results: Results) -> Tally:
    """The counts of one results folder."""
    layout, resident, calls = results["layout"], results["resident"], results["collectives"]
    ranks = len(pd.concat([f[["run", "rank"]] for f in (layout, resident, calls)]).drop_duplicates())
    bad = [differing(frame) for frame in (resident, calls, layout)]
    delta = (bad[1]["measured_count"] - bad[1]["predicted_count"]).abs()
    return Tally(
        *(len(results.runs), ranks, int(bad[0]["residual_bytes"].abs().sum())),
        *(int(delta.where(delta > 0, bad[1]["measured_count"]).sum()), len(bad[2]), all(f.empty for f in bad)),
    )


def verdict(results: Results) -> Verdict:
    """One line: how many runs and ranks, and what is left unexplained."""
    if not results.runs:
        return Verdict("predicted", f"{plural(len(results.predictions), 'run')} predicted, nothing measured")
    found = tally(results)
    return Verdict("exact" if found.exact else "differs", str(found))


def gpu_verdict(evidence: Sequence[Results]) -> Verdict | None:
    """The same line over all measurements on GPUs; None where there are none."""
    measured = [each for each in evidence if each.runs]
    if not measured:
        return None
    found = sum((tally(each) for each in measured), Tally())
    names = dict.fromkeys(str(d.get("name", "GPU")) for each in measured for r in each.runs for d in r["devices"])
    return Verdict("exact" if found.exact else "differs", f"on {', '.join(names)}: {found}")


def unsettled(results: Results, evidence: Sequence[Results]) -> list[str]:
    """Why the page is not clean, a line each: what strict fails on. Empty where all is exact."""
    why = []
    for each in (results, *evidence):
        found = verdict(each)
        if found.state == "predicted":
            why.append(f"{each.name}: nothing was measured")
        elif found.state != "exact":
            why.append(f"{each.name}: not everything is exact: {found.text}")
        if each.parity is not None and each.parity.summary["verdict"] != "equal":
            why.append(f"{each.name}: the losses are not equal: {each.parity.summary['verdict']}")
    return why


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
    """Where the weight lives, when it is gathered and released, where its master is; runs that agree share a row."""
    return _answers("answer", "The answer, read from the recorded step of one weight", [results])


def gpu_answer_table(evidence: Sequence[Results]) -> Table:
    """The same of the runs whose weight was followed on GPUs; smaller models and worlds than the largest are out."""
    sizes = {id(e): max(map(run_size, e.runs), default=(0, 0)) for e in evidence}
    largest = max(sizes.values(), default=(0, 0))
    return _answers(
        "gpu_answer",
        "The same at full size on GPUs: what is kept or released depends on the shape and on thresholds",
        [e for e in evidence if sizes[id(e)] == largest],
    )


def _answers(name: str, caption: str, sources: Sequence[Results]) -> Table:
    alike: dict[tuple[str, ...], list[str]] = {}
    weights: dict[str, None] = {}
    for results in sources:
        for lane in lanes(results):
            weights.setdefault(lane.weight)
            answer = (
                framework_title(lane.framework),
                _lives(results, lane),
                _changes(lane, to_whole=True) or _refreshed(results, lane),
                _changes(lane, to_whole=False) or "never",
                master_words(results, lane.run),
            )
            alike.setdefault(answer, []).append(lane.run if len(sources) == 1 else f"{results.name}/{lane.run}")
    keys = ("framework", "lives", "gathered", "released", "master")
    rows = [{**dict(zip(keys, answer, strict=True)), "run": ", ".join(runs)} for answer, runs in alike.items()]
    titles = [f.title for f in FRAMEWORKS.values()]
    rows.sort(key=lambda row: titles.index(row["framework"]) if row["framework"] in titles else len(titles))
    return Table(
        name,
        f"{caption}{', ' if weights else ''}{', '.join(weights)}.",
        [
            Column("framework", "framework"),
            Column("lives", "between steps the weight is"),
            Column("gathered", "made whole (of its tensor-parallel part)"),
            Column("released", "released"),
            Column("master", "its fp32 master"),
            Column("run", "run", "code"),
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
    frame = results.of("calls", lane.run)
    frame = frame[(frame["rank"] == lane.rank) & (frame["op"] == "all_gather")]
    others = [
        " " in ranks and "tp" not in names.split(" = ")
        for names, ranks in zip(frame["group"], frame["ranks"], strict=True)
    ]
    frame = frame[pd.Series(others, index=frame.index, dtype=bool)]
    told = [
        f"{plural(int(n), 'all-gather')} of the {group} group in the {phase} phase"
        for (group, phase), n in frame.groupby(["group", "phase"])["count"].sum().items()
    ]
    return "it is always whole" + (f"; {', '.join(told)} bring what other ranks updated" if told else "")


def _lives(results: Results, lane: Lane) -> str:
    """What is there between two steps, on which ranks."""
    event = lane.slots[0][1]
    parts = slices(results, lane.run)
    where = copies(parts)
    part = part_of_matrix(event["numel"], lane.full_numel, lane.matrix_numel)
    if event["state"] == "empty":
        kept = kept_apart(results, lane)
        apart = kept or "elements are in a shard that the framework keeps apart"
        return f"an empty tensor {where}; its {apart}"
    if event["state"] != "view":
        kind = "a whole tensor" if part in {"whole", "whole matrix"} else f"{part} a rank"
        return f"{kind}, in {event['dtype']}: {where}"
    told = f"whole, in {event['dtype']}, in a buffer that stays allocated: {where}. {equal_copies(parts)}"
    return told.strip()


def _changes(lane: Lane, *, to_whole: bool) -> str:
    """Events at which the weight becomes whole, or ceases to be, in words; each told once, micro-batches together."""
    found: list[str] = []
    whole = lane.slots[0][1]["state"] in {"full", "view"}
    for _, event in lane.slots[1:]:
        now = event["state"] in {"full", "view"}
        if now != whole and now == to_whole:
            found.append(_WHEN[str(event["event"])])
        whole = now
    each = ", in each micro-batch" if found and len(lane.kinds) == 1 else ""
    return " and ".join(dict.fromkeys(found)) + each
