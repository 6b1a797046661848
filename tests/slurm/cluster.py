"""A real Slurm of a few hosts with eight GPUs each, all on this machine; started and stopped by process id.

The GPUs are character devices that Slurm counts and hands out; nothing computes on them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scontrol", "scancel", "srun", "sinfo")
PACKAGES = "slurmctld slurmd slurm-client munge"
SYSTEM = Path("/etc/slurm")
GPUS = 8


def why_not() -> str | None:
    """Why a cluster cannot be started here, with what to do about it; None when it can."""
    missing = [p for p in PROGRAMS if not shutil.which(p, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")]
    if missing:
        return (
            f"{', '.join(missing)} not found; on Debian or Ubuntu: apt-get install --no-install-recommends {PACKAGES}"
        )
    if os.geteuid():
        return "the daemons start their jobs as other users, so the tests must run as root (in a container, say)"
    if (SYSTEM / "slurm.conf").exists() and not (SYSTEM / "slurm.conf").is_symlink():
        return f"{SYSTEM}/slurm.conf belongs to a Slurm of this machine, which the tests leave alone"
    return None


class Cluster:
    """The daemons and their files. Hosts `n1` and `n2` have GPUs; `c1`, in partition `cpu`, has none."""

    def __init__(self, root: Path) -> None:
        self.root, self.hosts = root, ["n1", "n2", "c1"]
        self.completions = root / "log" / "completed.txt"
        self.host = socket.gethostname().split(".")[0]

    def start(self) -> None:
        """Writes the configuration, starts the daemons, and waits until all hosts are idle."""
        for name in ("etc", "run", "log", "state", "dev"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o755)
        key = self.root / "etc/munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        for i in range(GPUS):
            os.mknod(self.root / f"dev/nvidia{i}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        self.completions.touch()
        (self.root / "etc/slurm.conf").write_text(self.configuration())
        (self.root / "etc/gres.conf").write_text(
            f"NodeName=n[1-2] Name=gpu File={self.root}/dev/nvidia[0-{GPUS - 1}]\n"
        )
        SYSTEM.mkdir(exist_ok=True)
        for name in ("slurm.conf", "gres.conf"):
            (SYSTEM / name).unlink(missing_ok=True)
            (SYSTEM / name).symlink_to(self.root / "etc" / name)
        run = self.root / "run"
        sh("munged", f"--key-file={key}", f"--socket={run}/munge.socket", f"--pid-file={run}/munged.pid", "--force",
           f"--log-file={self.root}/log/munged.log", f"--seed-file={self.root}/state/munge.seed")  # fmt: skip
        sh("slurmctld", "-i")
        for host in self.hosts:
            self.start_host(host)
        self.wait_idle()

    def configuration(self) -> str:
        """slurm.conf."""
        ports = free_ports(len(self.hosts) + 1)
        nodes = "".join(
            f"NodeName={host} NodeHostname={self.host} NodeAddr=127.0.0.1 Port={port} CPUs=64 RealMemory=500000 "
            f"{f'Gres=gpu:{GPUS} ' if host != 'c1' else ''}State=UNKNOWN\n"
            for host, port in zip(self.hosts, ports[1:], strict=True)
        )
        r = self.root
        return (
            f"ClusterName=test\nSlurmctldHost={self.host}(127.0.0.1)\nSlurmctldPort={ports[0]}\n"
            "SlurmUser=root\nSlurmdUser=root\nAuthType=auth/munge\nCredType=cred/munge\n"
            # A job that lost its host waits until its old credential has expired, two minutes unless told otherwise.
            f"AuthInfo=socket={r}/run/munge.socket,cred_expire=10\nStateSaveLocation={r}/state/controller\nSlurmdSpoolDir={r}/state/%n\n"
            f"SlurmctldPidFile={r}/run/slurmctld.pid\nSlurmdPidFile={r}/run/slurmd-%n.pid\n"
            f"SlurmctldLogFile={r}/log/slurmctld.log\nSlurmdLogFile={r}/log/slurmd-%n.log\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSwitchType=switch/none\nMpiDefault=none\n"
            "SlurmdParameters=config_overrides\nReturnToService=2\nSchedulerType=sched/backfill\n"
            "SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0\n"
            "SelectType=select/cons_tres\nSelectTypeParameters=CR_Core_Memory\nGresTypes=gpu\n"
            "MinJobAge=3600\nKillWait=2\nSlurmdTimeout=10\nUnkillableStepTimeout=10\nCompleteWait=0\n"
            # The kernel's limits need cgroups; a job over its memory is found by looking, every second.
            "AccountingStorageType=accounting_storage/none\nJobAcctGatherType=jobacct_gather/linux\n"
            "JobAcctGatherFrequency=task=1\nJobAcctGatherParams=OverMemoryKill\n"
            f"JobCompType=jobcomp/filetxt\nJobCompLoc={self.completions}\n{nodes}"
            "PartitionName=gpu Nodes=n1,n2 Default=YES MaxTime=2-00:00:00 State=UP\n"
            "PartitionName=cpu Nodes=c1 MaxTime=2-00:00:00 State=UP\n"
        )

    def start_host(self, host: str) -> None:
        """Starts a host's slurmd."""
        sh("slurmd", "-N", host)

    def kill_host(self, job: str) -> str:
        """The host of a job loses its power: SIGKILL to its slurmd and to the job. Returns the host."""
        host = sh("squeue", "--noheader", "--job", job, "--format", "%N").strip()
        pid = self.pid(f"slurmd-{host}")
        steps = [p for p, words in processes().items() if words and words[0].startswith(f"slurmstepd: [{job}.")]
        for victim in [pid, *steps, *(d for s in steps for d in descendants(s))]:
            with contextlib.suppress(ProcessLookupError):
                if victim:
                    os.kill(victim, signal.SIGKILL)
        return host

    def pid(self, name: str) -> int | None:
        """Process id of a daemon."""
        try:
            return int((self.root / "run" / f"{name}.pid").read_text())
        except (OSError, ValueError):
            return None

    def wait_idle(self, timeout_s: float = 60) -> None:
        """Until no job is left and every host is idle."""

        def idle() -> bool:
            nodes = sh("sinfo", "--noheader", "--Node", "--format", "%t", check=False).split()
            return nodes == ["idle"] * len(self.hosts) and not sh("squeue", "--noheader").strip()

        wait(idle, timeout_s, lambda: f"the cluster does not come to rest: {sh('sinfo')}{sh('squeue')}")

    def completed(self) -> list[dict[str, str]]:
        """Slurm's job completion log: one record a job that ended, in order."""
        return [
            dict(word.split("=", 1) for word in line.split() if "=" in word)
            for line in self.completions.read_text().splitlines()
        ]

    def stop(self) -> None:
        """Cancels what is left and ends the daemons, each by its process id."""
        sh("scancel", "--user", "root", check=False)
        with contextlib.suppress(AssertionError):
            self.wait_idle(15)
        pids = [self.pid(f"slurmd-{h}") for h in self.hosts] + [self.pid("slurmctld"), self.pid("munged")]
        for pid in filter(None, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        wait(lambda: not any(p and alive(p) for p in pids), 20, lambda: "a daemon does not end")
        for name in ("slurm.conf", "gres.conf"):
            if (SYSTEM / name).is_symlink():
                (SYSTEM / name).unlink()


def sh(*words: str, check: bool = True) -> str:
    """Output of a command of the cluster."""
    env = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def wait(condition: object, timeout_s: float, why: object) -> None:
    """Until `condition()` holds; fails with `why()` when it does not in time."""
    until = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until, why()  # type: ignore[operator]
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses right now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def processes() -> dict[int, list[str]]:
    """Command lines of all processes."""
    out = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                out[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
    return out


def descendants(pid: int) -> Iterator[int]:
    """All processes below `pid`."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield child
                yield from descendants(child)


def alive(pid: int) -> bool:
    """Whether a process still runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
