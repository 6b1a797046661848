"""Where a comparison stands: each launch done, running, waiting, failed (and why), out of date, or not started."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from train_ledger.spec.errors import LaunchError

from . import resume, slurm, twins
from .plan import Plan

#: What a job of ours says last when it fails (workflow/scripts).
FAILED = re.compile(r"^train-ledger \w+: ")


@dataclass(frozen=True)
class State:
    """One line of `train-ledger status`."""

    what: str
    state: str
    detail: str


def known_jobs() -> tuple[list[slurm.Job], str]:
    """Jobs of this working copy that Slurm knows, and why it told none where it does not answer ("" where it does)."""
    try:
        return (slurm.ours() if slurm.available() else []), ""
    except LaunchError as e:
        return [], str(e)


def states(plan: Plan, environments: Mapping[str, str], jobs: Sequence[slurm.Job]) -> list[State]:
    """One state a launch, from the files and Slurm's jobs, then the later stages and the verdict."""
    of = plan.comparison.name
    found = []
    for name, run in plan.comparison.runs.items():
        wanted = twins.request(run.sha256(), environments[run.framework])
        comments = [slurm.comment(rule, of, name) for rule in slurm.RULES]
        found.append(_launch(of, name, wanted, next((j for j in jobs if j.comment in comments), None)))
    for stage in ("reconcile", "parity", "plot", "report"):
        if line := _last_line(Path(f"logs/{of}/{stage}.log")):
            found.append(State(stage, "failed", line))
    verdict = Path(f"results/{of}/verdict.txt")
    differences = Path(f"results/{of}/reconcile/differences.txt")
    if all(s.state == "done" for s in found) and verdict.is_file():
        found.append(State("verdict", "reconciled", verdict.read_text(encoding="utf-8").splitlines()[0]))
    elif differences.is_file() and len(lines := differences.read_text(encoding="utf-8").splitlines()) > 1:
        found.append(State("verdict", "not reconciled", lines[0]))
    else:
        found.append(State("verdict", "open", "the report is not made yet"))
    return found


def _launch(of: str, name: str, wanted: Mapping[str, str], job: slurm.Job | None) -> State:
    folder = Path("results") / of / "launch" / name
    log = Path("logs") / of / "launch" / f"{name}.log"
    if job:
        why = f"{job.reason}, " if job.waits else ""
        return State(name, "waiting" if job.waits else "running", f"Slurm job {job.job}: {why}{job.elapsed}")
    if who := twins.held(folder):
        return State(name, "running", f"{who}: {_last_line(log, None)}")
    if (folder / "run.json").is_file():
        if not twins.same(twins.asked(folder), wanted):
            return State(name, "out of date", "its configuration or environment has changed since")
        if damaged := resume.damaged(folder):
            return State(name, "damaged", f"{', '.join(damaged)} missing or changed")
        data = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        return State(name, "done", f"{len(data['ranks'])} ranks in {data['wall_s']:.0f} s")
    if line := _last_line(log):
        return State(name, "failed", line)
    return State(name, "not started", "")


def _last_line(log: Path, pattern: re.Pattern[str] | None = FAILED) -> str:
    """The last line of a log; with a pattern, only if it matches, without what matched."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    last = lines[-1] if lines else ""
    if pattern is None:
        return last
    return pattern.sub("", last) if pattern.match(last) else ""


def table(found: Sequence[State]) -> str:
    """The states in columns."""
    wide = max(len(s.what) for s in found)
    return "\n".join(f"{s.what:{wide}}  {s.state:14}  {s.detail}".rstrip() for s in found)
