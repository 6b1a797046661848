"""Slurm as the workflow needs it: which jobs are ours, what became of them, and why."""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train_ledger.spec.errors import LaunchError

from . import twins

POLL_S = 2.0
MIN_JOB_AGE_S = 200

SITE = "profiles/slurm/site.yaml"

#: Where the executor keeps the jobs' logs (profiles/slurm/config.yaml).
LOGS = Path("logs/slurm")

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


def configure(settings: Any, account: str | None, reservation: str | None) -> None:
    """Settles what the executor plugin would guess: the jobs' names, and which command tells what became of a job.

    With accounting off, sacct never answers and Snakemake would wait for ever; without it squeue must remember finished
    jobs for longer than the plugin's longest pause between two looks (180 s).

    Raises:
        LaunchError: no Slurm here, neither command can tell, or the account is none of the user's.
    """
    if not available():
        raise LaunchError("sbatch and squeue are not on PATH: this is no machine from which jobs can be sent to Slurm")
    settings.jobname_prefix = prefix()
    settings.reservation = reservation or settings.reservation
    if accounting():
        settings.status_command = "sacct"
        known = sorted(set(ask("sacctmgr", "-nPs", "list", "user", getpass.getuser(), "format=account").split()))
        if account and known and account not in known:
            raise LaunchError(f"account {account!r} is none of yours; Slurm knows: {', '.join(known)}", file=SITE)
        return
    if account:
        raise LaunchError(f"account {account!r}: Slurm's accounting is off here, it knows no accounts", file=SITE)
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


@dataclass(frozen=True)
class Ended:
    """A job that did not end well, as Slurm tells it."""

    job: str
    state: str
    comment: str
    memory: str
    limit: str

    def why(self) -> str:
        """One line: what happened, from Slurm's own reason, and what to change."""
        what = {
            "TIMEOUT": f"ran into its time limit of {self.limit}; runtime_min in profiles/slurm/site.yaml sets it",
            "DEADLINE": "could not end before its deadline",
            "OUT_OF_MEMORY": f"needed more memory than its {self.memory}; mem_mb in profiles/slurm/site.yaml sets it",
            "NODE_FAIL": "lost its host",
            "BOOT_FAIL": "lost its host, which did not boot",
            "CANCELLED": "was cancelled",
            "PREEMPTED": "had to make room for another job",
        }.get(self.state, "failed")
        name = self.comment.partition("_wildcards_")[2] or self.comment
        return f"Slurm job {self.job} ({name}) {what} ({self.state})"


def ended_badly(since: float) -> list[Ended]:
    """Jobs of this working copy that were sent since then and failed, as far as Slurm still knows them."""
    found = []
    if accounting():
        fields = "JobIDRaw,JobName,State,Comment,ReqMem,Timelimit"
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since))
        rows = [line.split("|") for line in ask("sacct", "-X", "-n", "-P", "-S", start, "-o", fields).splitlines()]
    else:
        words = ["--noheader", "--states=all", "--user", getpass.getuser(), "--format", "%i|%j|%T|%k|%m|%l|%V"]
        rows = [line.split("|") for line in ask("squeue", *words).splitlines()]
        rows = [r for r in rows if len(r) == 7 and time.mktime(time.strptime(r[6], "%Y-%m-%dT%H:%M:%S")) >= since - 1]
    for row in rows:
        if len(row) >= 6 and row[1].startswith(prefix()):
            state = row[2].split()[0]
            if state not in ("COMPLETED", "RUNNING", "PENDING", "COMPLETING", "CONFIGURING", "REQUEUED"):
                found.append(Ended(row[0], _told_in_log(row[0]) or state, row[3], row[4], row[5]))
    return found


def _told_in_log(job: str) -> str | None:
    """Without cgroups a job over its memory is FAILED for Slurm; only its log says why (slurmstepd)."""
    for log in LOGS.glob(f"*/*/{job}.log"):
        text = log.read_text(encoding="utf-8", errors="replace")
        if re.search(r"slurmstepd\S*: error: .*(exceeded memory limit|oom.kill)", text, re.IGNORECASE):
            return "OUT_OF_MEMORY"
    return None


def refusals(log: str) -> list[str]:
    """Why sbatch took a job not, from what Snakemake logged, each reason once."""
    said = re.findall(r"SLURM sbatch failed\. The error message was '(.*?)'", log, re.DOTALL)
    return list(dict.fromkeys(" ".join(text.split()) for text in said))


def say_why(since: float, snakemake_logs: Iterable[str]) -> None:
    """A line on stderr for each job that Slurm refused or ended badly since then."""
    try:
        log = "\n".join(Path(name).read_text(encoding="utf-8", errors="replace") for name in snakemake_logs)
        lines = [f"Slurm refused a job: {reason}" for reason in refusals(log)]
        lines += [job.why() for job in ended_badly(since)]
    except (OSError, LaunchError) as e:
        lines = [str(e)]
    for line in lines:
        say(line)


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
