"""A working copy on the test cluster: its jobs by Slurm's own records."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

from cluster import Cluster, sh, wait
from working_copy import WorkingCopy

from train_ledger.workflow import slurm

TABLES = "results/small/reconcile/differences.txt"


class OnCluster(WorkingCopy):
    """A working copy whose launches are Slurm jobs."""

    def __init__(self, cluster: Cluster, folder: Path, runs: dict[str, int], steps: int = 2) -> None:
        super().__init__(folder, runs, steps)
        self.cluster = cluster
        self.write("profiles/slurm/site.yaml", "partition: gpu\nmem_mb: 16000\ncpus_per_task: 16\n")
        # A cluster's pace would be most of a test's time.
        self.edit("profiles/slurm/config.yaml", "^latency-wait: .*", "latency-wait: 10")
        self.edit(
            "profiles/slurm/config.yaml", "^slurm-init-seconds.*: .*", "slurm-init-seconds-before-status-checks: 1"
        )

    def run(self, *words: str, **env: str) -> tuple[int, str]:
        """A whole run of the workflow on the cluster; without words up to the tables."""
        return self.snakemake(*(words or (TABLES,)), profile="slurm", **env)

    def begin(self, *words: str) -> subprocess.Popen[str]:
        """Starts the workflow on the cluster."""
        return self.start(*(words or (TABLES,)), profile="slurm")

    def prefix(self) -> str:
        """What the names of this copy's jobs begin with."""
        return slurm.prefix(self.folder)

    def queued(self) -> list[tuple[str, str]]:
        """(job, state) of this copy's jobs that wait or run."""
        rows = [line.split("|") for line in sh("squeue", "--noheader", "--format", "%i|%T|%j").splitlines()]
        return [(job, state) for job, state, name in rows if name.startswith(self.prefix())]

    def ended(self) -> list[str]:
        """How this copy's jobs ended, from Slurm's completion log, in order."""
        return [c["JobState"] for c in self.cluster.completed() if c["Name"].startswith(self.prefix())]

    def wait_running(self, timeout_s: float = 120) -> str:
        """Until a job of this copy trains; returns it."""
        wait(lambda: any(s == "RUNNING" for _, s in self.queued()), timeout_s, lambda: f"no job runs: {sh('squeue')}")
        return next(job for job, state in self.queued() if state == "RUNNING")

    def wait_training(self, run: str = "ds", timeout_s: float = 120) -> str:
        """Until the launch in the job has begun; returns the job."""
        job = self.wait_running(timeout_s)
        begun = self.path(f"launch/{run}/request.json")
        wait(begun.exists, timeout_s, lambda: f"the launch in job {job} does not begin")
        return job

    def check(self, runs: tuple[str, ...] = ("ds",)) -> None:
        """The data are complete and right, and nothing is left over."""
        assert "0 bytes, 0 calls unexplained" in self.path("reconcile/differences.txt").read_text().splitlines()[0]
        assert len(self.path("reconcile/differences.txt").read_text().splitlines()) == 1
        for run in runs:
            folder = self.path(f"launch/{run}")
            ranks = json.loads((folder / "run.json").read_text())["ranks"]
            assert all((folder / r["file"]).is_file() for r in ranks)
            assert not list(folder.glob(".attempt*"))
        assert not self.queued()


def kill_later(process: subprocess.Popen[str], signal: int, group: bool = False) -> str:
    """Sends a signal to Snakemake (or to all of its group) and returns what it had said when it ended."""
    (os.killpg if group else os.kill)(process.pid, signal)
    out, _ = process.communicate(timeout=240)
    return out


def settle(seconds: float) -> None:
    """Lets the cluster move on."""
    time.sleep(seconds)
