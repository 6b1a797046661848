"""What dies on a cluster, and what the next run makes of it. Every fault is a real one, on a real Slurm.

The faults run side by side, each in a working copy of its own; the tests wait for their outcome. What was seen is
written into `docs/faults.md`.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster import Cluster, sh, wait
from jobs import OnCluster, kill_later
from working_copy import ROOT, clear_errors

AT_ONCE = 3


def sigkill(copy: OnCluster) -> None:
    """SIGKILL of Snakemake while a job trains.

    The job goes on; the next run waits for it and keeps its result.

    Jobs: 1 completed.
    """
    first = copy.begin()
    job = copy.wait_training()
    kill_later(first, signal.SIGKILL)
    code, out = copy.run()
    assert code == 0, out
    assert f"waiting for Slurm job {job}" in out or "finished after its workflow had died" in out, out
    assert "Training ds" not in out
    assert copy.ended() == ["COMPLETED"]


def sigterm(copy: OnCluster) -> None:
    """SIGTERM to Snakemake while a job trains.

    It waits for the job, then ends; the next run goes on from there.

    Jobs: 1 completed.
    """
    first = copy.begin()
    copy.wait_training()
    kill_later(first, signal.SIGTERM)
    code, out = copy.run()
    assert code == 0, out
    assert "Training ds" not in out
    assert copy.ended() == ["COMPLETED"]


def sigint(copy: OnCluster) -> None:
    """SIGINT (Ctrl-C) to Snakemake while a job trains.

    It cancels the job; the next run sends it again.

    Jobs: 1 cancelled, 1 completed.
    """
    first = copy.begin()
    copy.wait_training()
    kill_later(first, signal.SIGINT)
    wait(lambda: not copy.queued(), 60, lambda: "the job of an interrupted Snakemake goes on")
    assert copy.ended() == ["CANCELLED"]
    code, out = copy.run()
    assert code == 0, out
    assert copy.ended() == ["CANCELLED", "COMPLETED"]


def cancelled(copy: OnCluster) -> None:
    """`scancel` of a job.

    Snakemake sees it and sends the job once more; the next run has nothing to do.

    Jobs: 1 cancelled, 1 completed.
    """
    first = copy.begin()
    sh("scancel", copy.wait_training())
    out, _ = first.communicate(timeout=300)
    assert first.returncode == 0, out
    code, out = copy.run()
    assert code == 0, out
    assert "Nothing to be done" in out
    assert copy.ended() == ["CANCELLED", "COMPLETED"]


def memory(copy: OnCluster) -> None:
    """A job killed for memory.

    Twice as much is asked for, then it fails with the figure; with more the next run completes.

    Jobs: 2 failed, 1 completed.
    """
    copy.edit("profiles/slurm/site.yaml", "mem_mb: .*", "mem_mb: 1000")
    copy.edit(
        "workflow/rules/launch.smk",
        r"mem_mb=lambda w, attempt: attempt \* SITE.mem_mb",
        "mem_mb=lambda w, attempt: attempt * 60",
    )
    code, out = copy.run()
    assert code != 0
    assert any("needed more memory than its 120M" in line for line in clear_errors(out)), out
    assert "COMPLETED" not in copy.ended()
    copy.edit("workflow/rules/launch.smk", r"attempt \* 60", "attempt * 16000")
    code, out = copy.run()
    assert code == 0, out
    assert copy.ended().count("COMPLETED") == 1


def time_limit(copy: OnCluster) -> None:
    """A job over its time limit.

    It is sent again with twice the time, and fails with the limit when that does not do.

    Jobs: 1 timed out, 1 cancelled by the test, 1 completed.
    """
    copy.edit("profiles/slurm/site.yaml", "$", "\nruntime_min: 1\n")
    copy.edit("config/comparisons/small.yaml", "^  ds:$", "  ds: {steps: 100000}")
    first = copy.begin()
    wait(lambda: copy.ended() == ["TIMEOUT"], 200, lambda: f"no time-out: {sh('squeue')}")
    sh("scancel", copy.wait_running())
    out, _ = first.communicate(timeout=240)
    assert first.returncode != 0
    assert any("ran into its time limit of 1:00" in line for line in clear_errors(out)), out
    copy.edit("config/comparisons/small.yaml", "100000", "2")
    code, out = copy.run()
    assert code == 0, out
    assert copy.ended() == ["TIMEOUT", "CANCELLED", "COMPLETED"]


def fill(file: Path) -> None:
    """Writes until there is no space left."""
    with open(file, "wb", buffering=0) as f, contextlib.suppress(OSError):
        while f.write(b"\0" * 4096):
            pass


def disk_full(copy: OnCluster) -> None:
    """No space left under `results`.

    The launch fails and says so; with space the next run completes.

    Jobs: 2 failed, 1 completed.
    """
    results = copy.folder / "results"
    results.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(results)], check=True)
    try:
        code, out = copy.run("results/small/predict/ds.json", "results/small/weights/seed1234.safetensors")
        assert code == 0, out
        filler = results / "filler"
        fill(filler)
        code, out = copy.run()
        assert code != 0
        assert any("No space left on device" in line for line in clear_errors(out)), out
        filler.unlink()
        code, out = copy.run()
        assert code == 0, out
        assert copy.ended().count("COMPLETED") == 1
        copy.check()
        shutil.copytree(results, copy.folder / "kept")
    finally:
        subprocess.run(["umount", "--lazy", str(results)], check=True)
    shutil.rmtree(results)
    (copy.folder / "kept").rename(results)


def later_stages(copy: OnCluster) -> None:
    """SIGKILL of everything during reconcile, then during report.

    The next run goes on there; nothing is trained again.

    Jobs: 1 completed.
    """
    for stage in ("reconcile", "report"):
        log = copy.folder / f"logs/small/{stage}.log"
        first = copy.begin("all")
        wait(log.exists, 240, lambda stage=stage: f"{stage} does not begin")
        kill_later(first, signal.SIGKILL, group=True)
        assert not copy.path("verdict.txt").exists()
    code, out = copy.run("all")
    assert code == 0, out
    assert "</html>" in copy.path("report.html").read_text()
    assert copy.ended() == ["COMPLETED"]


def two_at_once(copy: OnCluster) -> None:
    """A second Snakemake in the same working copy.

    It is refused and names the first, which completes.

    Jobs: 1 completed.
    """
    first = copy.begin()
    copy.wait_running()
    code, out = copy.run()
    assert code == 1
    assert len(clear_errors(out)) == 1
    assert f"another snakemake (process {first.pid} on" in clear_errors(out)[0]
    out, _ = first.communicate(timeout=300)
    assert first.returncode == 0, out
    code, out = copy.run()
    assert "Nothing to be done" in out
    assert copy.ended() == ["COMPLETED"]


def edited_meanwhile(copy: OnCluster) -> None:
    """SIGKILL of Snakemake, then its run is edited.

    The running job is no longer wanted: cancelled, and the run sent anew.

    Jobs: 1 cancelled, 1 completed.
    """
    copy.edit("config/comparisons/small.yaml", "^  ds:$", "  ds: {steps: 100000}")
    first = copy.begin()
    copy.wait_training()
    kill_later(first, signal.SIGKILL)
    copy.edit("config/comparisons/small.yaml", "100000", "2")
    code, out = copy.run()
    assert code == 0, out
    assert "cancelling Slurm job" in out
    assert copy.ended() == ["CANCELLED", "COMPLETED"]


def host_lost(copy: OnCluster) -> None:
    """A host loses its power (slurmd and the job die).

    Slurm sends the job again, on another host; Snakemake waits.

    Jobs: 1 lost, 1 completed.
    """
    first = copy.begin()
    host = copy.cluster.kill_host(copy.wait_training())
    try:
        out, _ = first.communicate(timeout=300)
        assert first.returncode == 0, out
        code, out = copy.run()
        assert code == 0, out
        assert "Nothing to be done" in out
        assert copy.ended() == ["NODE_FAIL", "COMPLETED"]
    finally:
        copy.cluster.start_host(host)


Fault = Callable[[OnCluster], None]
SIDE_BY_SIDE: tuple[Fault, ...] = (
    time_limit,
    sigkill,
    sigterm,
    sigint,
    cancelled,
    memory,
    disk_full,
    later_stages,
    two_at_once,
    edited_meanwhile,
)
ALONE: tuple[Fault, ...] = (host_lost,)  # others' jobs may be on that host
Outcomes = dict[str, "Future[None]"]


@pytest.fixture(scope="module")
def outcomes(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """Every fault, begun; its test waits for it."""
    room = tmp_path_factory.mktemp("faults")

    def play(fault: Fault) -> None:
        copy = OnCluster(cluster, room / fault.__name__, {"ds": 2})
        fault(copy)
        copy.check()

    def play_alone(fault: Fault, others: list[Future[None]]) -> None:
        for other in others:
            other.exception()
        play(fault)

    with ThreadPoolExecutor(AT_ONCE) as pool, ThreadPoolExecutor(1) as alone:
        running = {fault.__name__: pool.submit(play, fault) for fault in SIDE_BY_SIDE}
        others = list(running.values())
        running |= {fault.__name__: alone.submit(play_alone, fault, others) for fault in ALONE}
        yield running


@pytest.mark.parametrize("fault", [f.__name__ for f in (*SIDE_BY_SIDE, *ALONE)])
def test_fault(outcomes: Outcomes, fault: str) -> None:
    """The next run completes, its data are right, and no launch was done twice."""
    outcomes[fault].result()


def test_the_table_of_faults(outcomes: Outcomes) -> None:
    """docs/faults.md says what was seen."""
    rows = []
    for fault in (*SIDE_BY_SIDE, *ALONE):
        outcomes[fault.__name__].result()
        assert fault.__doc__
        what, then, jobs = (" ".join(part.split()).rstrip(".") for part in fault.__doc__.split("\n\n"))
        rows.append(f"| {what} | {then} | {jobs.removeprefix('Jobs: ')} |")
    text = (
        "# What was tried on a real Slurm\n\n"
        "Written by `tests/slurm/test_faults.py`, which plays every fault on a Slurm of two GPU hosts that it starts\n"
        "itself. After each the data were complete and reconciled to the byte. Jobs are counted from Slurm's job\n"
        "completion log.\n\n"
        "| fault | what happens | jobs |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )
    file = ROOT / "docs" / "faults.md"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8")


REFUSED = {
    "partition that is not there": ("partition: nosuch", "invalid partition specified: nosuch"),
    "partition without GPUs": ("partition: cpu", "Requested node configuration is not available"),
    "account without accounting": ("account: paper", "account 'paper': Slurm's accounting is off here"),
    "unknown key": ("colour: red", "profiles/slurm/site.yaml: colour: unknown key"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_slurm_refuses(cluster: Cluster, tmp_path: Path, what: str) -> None:
    """One line with Slurm's own reason; nothing is left in the queue."""
    site, expected = REFUSED[what]
    copy = OnCluster(cluster, tmp_path / "copy", {"ds": 2})
    copy.write("profiles/slurm/site.yaml", site + "\n")
    code, out = copy.run()
    assert code != 0
    assert sum(expected in line for line in clear_errors(out)) == 1, out
    assert not copy.queued()
    assert "COMPLETED" not in copy.ended()


def test_no_slurm_commands(cluster: Cluster, tmp_path: Path) -> None:
    """A machine that cannot send jobs says so at once."""
    copy = OnCluster(cluster, tmp_path / "copy", {"ds": 2})
    others = tmp_path / "bin"
    others.mkdir()
    for program in Path("/usr/bin").iterdir():
        if program.name not in ("sbatch", "squeue", "sacct", "scontrol", "sinfo"):
            (others / program.name).symlink_to(program)
    code, out = copy.run(PATH=str(others))
    assert code == 1
    assert clear_errors(out) == [
        "train-ledger: sbatch and squeue are not on PATH: this is no machine from which jobs can be sent to Slurm"
    ]


def test_no_accounting_and_no_memory_of_jobs(cluster: Cluster, tmp_path: Path) -> None:
    """Where nothing can tell how a job ended, nothing is sent, and nothing hangs."""
    copy = OnCluster(cluster, tmp_path / "copy", {"ds": 2})
    configuration = cluster.root / "etc/slurm.conf"
    before = configuration.read_text()
    try:
        configuration.write_text(before.replace("MinJobAge=3600", "MinJobAge=60"))
        sh("scontrol", "reconfigure")
        wait(
            lambda: "MinJobAge               = 60 sec" in sh("scontrol", "show", "config"),
            20,
            lambda: "no new MinJobAge",
        )
        code, out = copy.run()
    finally:
        configuration.write_text(before)
        sh("scontrol", "reconfigure")
    assert code == 1
    assert "forgets finished jobs after 60 s (MinJobAge)" in clear_errors(out)[0]
    assert not copy.ended()
