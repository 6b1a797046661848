"""Slurm as the workflow needs it: which jobs are ours, what became of them, and why."""

from __future__ import annotations

import getpass
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train_ledger.spec.errors import LaunchError

from . import twins

POLL_S = 2.0
MIN_JOB_AGE_S = 200

#: Rules whose jobs are Slurm's.
RULES = ("launch", "launch_hosts")


@dataclass(frozen=True)
class Job:
    """A job that Slurm knows. `comment` is what the executor plugin wrote: the rule and its wildcards."""

    job: str
    state: str
    comment: str
    reason: str
    elapsed: str

    @property
    def waits(self) -> bool:
        """Whether it has not begun, or has to begin again."""
        return self.state in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "PREEMPTED")


def prefix(folder: str | Path = ".") -> str:
    """Name prefix of the jobs of this working copy: no other copy's jobs, nor anybody else's, begin with it."""
    return f"tl-{hashlib.sha256(str(Path(folder).resolve()).encode()).hexdigest()[:16]}"


def comment(rule: str, *wildcards: str) -> str:
    """The comment of a rule's job (snakemake_executor_plugin_slurm `__init__.py:run_job`)."""
    return f"rule_{rule}_wildcards_{'_'.join(wildcards)}"


def available() -> bool:
    """Whether there are Slurm commands on this machine."""
    return bool(shutil.which("sbatch") and shutil.which("squeue"))


def ask(*command: str) -> str:
    """The output of a Slurm command.

    Raises:
        LaunchError: it is not there, fails, or does not answer within a minute.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        raise LaunchError(
            f"{command[0]} is not on PATH: this is no machine from which jobs can be sent to Slurm"
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{command[0]} does not answer: is Slurm's controller up?") from None
    if done.returncode:
        raise LaunchError(f"{command[0]}: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
    return done.stdout


def ours() -> list[Job]:
    """Jobs of this working copy that run or wait.

    Raises:
        LaunchError: squeue fails.
    """
    found = []
    for line in ask("squeue", "--noheader", "--user", getpass.getuser(), "--format", "%i|%j|%T|%r|%M|%k").splitlines():
        job, name, state, reason, elapsed, text = (line.strip().split("|", 5) + [""] * 6)[:6]
        if name.startswith(prefix()):
            found.append(Job(job, state, text, reason, elapsed))
    return found


def configure(settings: Any, reservation: str | None) -> None:
    """Settles what the executor plugin would guess: the jobs' names, and which command tells what became of a job.

    With accounting off, sacct never answers and Snakemake would wait for ever; without it squeue must remember finished
    jobs for longer than the plugin's longest pause between two looks (180 s).

    Raises:
        LaunchError: no Slurm here, or neither command can tell.
    """
    if not available():
        raise LaunchError("sbatch and squeue are not on PATH: this is no machine from which jobs can be sent to Slurm")
    settings.jobname_prefix = prefix()
    settings.reservation = reservation or settings.reservation
    if accounting():
        settings.status_command = "sacct"
        return
    words = next((line for line in ask("scontrol", "show", "config").splitlines() if line.startswith("MinJobAge")), "")
    age_s = int("".join(c for c in words.partition("=")[2] if c.isdigit()) or 0)
    if age_s < MIN_JOB_AGE_S:
        raise LaunchError(
            f"Slurm's accounting is off, and it forgets finished jobs after {age_s} s (MinJobAge), so nothing can tell "
            f"how a job ended; accounting, or a MinJobAge of {MIN_JOB_AGE_S} s or more, is needed"
        )
    settings.status_command = "squeue"


def accounting() -> bool:
    """Whether sacct answers."""
    try:
        return subprocess.run(["sacct", "-n", "-X"], capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def nodes_of_this_job() -> int:
    """Hosts of the Slurm job that this process is in; 0 outside of any.

    Raises:
        LaunchError: scontrol fails.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return 0
    words = ask("scontrol", "show", "job", "--oneliner", os.environ["SLURM_JOB_ID"]).split()
    return int(next((w.removeprefix("NumNodes=") for w in words if w.startswith("NumNodes=")), "0").split("-")[0])


def settle(wanted: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
    """Jobs that an earlier workflow left: those that do what is wanted now are waited for, the others are cancelled.

    A waiting job reads the configuration when it starts, so it does what is wanted as long as its run is in the plan.
    A running one wrote down what it was asked for (`twins.REQUEST`).

    Raises:
        LaunchError: Slurm does not answer.
    """
    if not available():
        raise LaunchError("sbatch and squeue are not on PATH: this is no machine from which jobs can be sent to Slurm")
    runs = {comment(rule, *key): key for key in wanted for rule in RULES}
    shown: dict[str, str] = {}
    cancelled: set[str] = set()
    while jobs := ours():
        for job in jobs:
            key = runs.get(job.comment)
            asked = twins.asked(Path("results") / key[0] / "launch" / key[1]) if key else None
            told = not job.waits and asked is not None and asked.get("slurm_job") == job.job
            stale = key is None or (told and not twins.same(asked, wanted[key]))
            if stale and job.job not in cancelled and job.state != "COMPLETING":
                say(f"cancelling Slurm job {job.job} ({job.comment}): an earlier snakemake's, no longer wanted")
                ask("scancel", job.job)
                cancelled.add(job.job)
            elif job.job not in cancelled and shown.get(job.job) != job.state:
                shown[job.job] = job.state
                name = "/".join(key) if key else job.comment
                why = f", {job.reason}" if job.waits else f", {job.elapsed}"
                say(f"waiting for Slurm job {job.job} ({name}: {job.state}{why}) that an earlier snakemake started")
        time.sleep(POLL_S)


def say(text: str) -> None:
    """One line on stderr."""
    print(f"train-ledger: {text}", file=sys.stderr, flush=True)
