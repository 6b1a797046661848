"""Before a workflow starts: is it alone here, and what did an earlier one leave behind?

`begin` is called once, when Snakemake expands its targets, and only by a workflow that is going to run jobs.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train_ledger.spec.errors import DataError, LedgerError

from . import machine, seal, slurm, twins
from .aside import set_aside
from .plan import Plan

LOCK = Path(".snakemake/train-ledger.lock")

_held: list[Any] = []  # the lock's file stays open, and so held, for the life of this process


class AnotherWorkflow(LedgerError):
    """A living Snakemake works in this folder."""


def begin(
    plan: Plan, environments: Mapping[str, str], executor: str, sealed: Sequence[str] = (), own_python: bool = True
) -> None:
    """Takes the working copy for this workflow and puts in order what a dead one left.

    Jobs of ours that still run or wait on Slurm are waited for when they do what the plan wants, else cancelled. A
    launch that finished after its workflow had died is kept. One that was made from another configuration or
    environment is set aside, and so is an output that somebody else wrote over.

    Args:
        sealed: outputs whose rules left a record of what they wrote (`seal`).
        own_python: whether launches run in this Python, so that it can tell what they find on this machine.

    Raises:
        LedgerError: another workflow runs here; Slurm does not answer; this machine has too few GPUs.
    """
    if _held:
        return
    wanted = {
        (of, name): twins.request(run.sha256(), environments[run.framework])
        for (of, name), run in plan.runs.items()
        if of == plan.comparison.name
    }
    # Before the lock, too: a refusal must not wipe out what a dead workflow left in it.
    if executor != "slurm" and own_python:
        machine.check(plan, [plan.runs[key] for key, request in wanted.items() if not _measured(key, request)])
    before = _lock(executor)
    if before is not None or executor == "slurm":
        if before is not None:
            for stale in Path(".snakemake/locks").glob("*"):  # whoever wrote them held our lock, and is gone
                stale.unlink(missing_ok=True)
        if executor == "slurm" or ((before or {}).get("executor") == "slurm" and slurm.available()):
            slurm.settle(wanted)
    for file in strangers(plan):
        say(f"{file} is of no run of the plan; it is set aside as {set_aside(file)}")
    for output in sealed:
        if changed := seal.broken(output):
            say(f"{changed[0]} is not as the workflow wrote it; {output} is set aside as {set_aside(output)}")
    finished = []
    for (of, name), request in wanted.items():
        folder = Path("results") / of / "launch" / name
        _wait_for(folder)
        if not (folder / "run.json").is_file():
            continue
        if not twins.same(twins.asked(folder), request):
            say(f"{folder} is of another configuration or environment; it is set aside as {set_aside(folder)}")
        elif before is not None and (folder / "run.json").stat().st_mtime >= before.get("since", 0):
            finished.append(folder / "run.json")
    if finished:
        _adopt(finished)


def foretell(sealed: Sequence[str]) -> None:
    """What `begin` would set aside, for a dry run: Snakemake's own list of jobs does not show that they follow."""
    for output in sealed:
        if changed := seal.broken(output):
            say(f"{changed[0]} is not as the workflow wrote it; a run sets {output} aside and makes it anew")


def _measured(key: tuple[str, str], request: Mapping[str, Any]) -> bool:
    folder = Path("results") / key[0] / "launch" / key[1]
    return (folder / "run.json").is_file() and twins.same(twins.asked(folder), request)


def strangers(plan: Plan) -> list[Path]:
    """Predictions and tables in the plan's result folders that no run of the plan makes; the report would show them."""
    runs = plan.runs
    folders = {of for of, _ in runs}
    files = [f for of in folders for stage in ("predict", "probe") for f in Path("results", of, stage).glob("[!.]*.*")]
    return sorted(f for f in files if (f.parent.parent.name, f.stem) not in runs)


def _wait_for(folder: Path) -> None:
    """A launch on this machine that outlived its workflow: its result is worth waiting for."""
    told = False
    while who := twins.held(folder):
        if not told:
            say(f"waiting for the launch of {folder.name} that {who} is still doing")
        told = True
        time.sleep(0.5)


def _lock(executor: str) -> dict[str, Any] | None:
    """Takes the lock. Returns what a workflow that died here without a farewell had written into it, or None."""
    try:
        LOCK.parent.mkdir(exist_ok=True)
        file = open(LOCK, "a+b", buffering=0)  # noqa: SIM115
    except OSError as e:
        raise DataError(f"cannot be written: {e.strerror or e}", file=LOCK) from e
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = _read(file) or {}
        raise AnotherWorkflow(
            f"another snakemake (process {who.get('pid', '?')} on {who.get('host', '?')}) works in this folder; "
            "wait for it to end, or stop it",
            file=LOCK,
        ) from None
    except OSError as e:
        say(f"no locks on this file system ({e.strerror}); Snakemake's own lock must do")
        _held.append(file)
        return None
    before = _read(file)
    record = {"pid": os.getpid(), "host": os.uname().nodename, "since": time.time(), "executor": executor}
    try:
        file.truncate(0)
        file.write(json.dumps(record).encode())
    except OSError as e:
        raise DataError(f"cannot be written: {e.strerror or e}", file=LOCK) from e
    _held.append(file)
    atexit.register(_farewell, file)
    return before


def _read(file: Any) -> dict[str, Any] | None:
    file.seek(0)
    try:
        data = json.loads(file.read())
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def _farewell(file: Any) -> None:
    with contextlib.suppress(OSError, ValueError):
        file.truncate(0)


def _adopt(files: list[Path]) -> None:
    """Makes Snakemake take these files as finished: its records of them are those of the workflow that died."""
    for file in files:
        say(f"{file.parent} was finished after its workflow had died; it is kept")
    command = [sys.executable, "-m", "snakemake", "--cleanup-metadata", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = " ".join(done.stderr.split())[-300:]
        say(f"Snakemake could not forget its old records ({why}); these launches are made anew")


def damaged(launch_dir: str | Path) -> list[str]:
    """Rank files of a finished launch that are gone, or were changed after it; by name, from their times alone."""
    launch_dir = Path(launch_dir)
    try:
        done_ns = (launch_dir / "run.json").stat().st_mtime_ns
        entries = json.loads((launch_dir / "run.json").read_text(encoding="utf-8"))["ranks"]
        names = [str(entry["file"]) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    out = []
    for name in names:
        try:
            if (launch_dir / name).stat().st_mtime_ns > done_ns:
                out.append(name)
        except OSError:
            out.append(name)
    return out


def say(text: str) -> None:
    """One line on stderr."""
    print(f"train-ledger: {text}", file=sys.stderr, flush=True)
