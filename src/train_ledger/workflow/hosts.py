"""A launch across the hosts of a Slurm job: srun starts one torchrun a host, which meet on the first one.

`launch` drives it from the job's first host; on each host srun runs `python -m train_ledger.workflow.hosts`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from train_ledger.launch.failures import rebuild
from train_ledger.launch.launcher import Attempt
from train_ledger.launch.loop import program
from train_ledger.launch.signals import interruptible
from train_ledger.launch.worlds.nccl import FOLDER
from train_ledger.spec.errors import LaunchError, LedgerError
from train_ledger.spec.io import write_json
from train_ledger.spec.run import Run

from .slurm import ask

#: Ports of the meeting point: above the well-known ones, below the ephemeral ones, one a job.
PORT_FIRST, PORT_COUNT = 20000, 10000


def launch(run: Run, out_dir: Path, timeout_s: float, weights: Path | None, export: bool, hosts: int) -> None:
    """As `train_ledger.launch.launcher.launch`, on `hosts` hosts with `world_size / hosts` ranks each.

    Raises:
        LaunchError: a rank or a host failed, or the time is up; what the first rank said, if it could say anything.
    """
    program(run.framework)
    attempt = Attempt.begin(run, out_dir)
    try:
        began = time.monotonic()
        _srun(run, attempt.directory, timeout_s, weights, export, hosts)
        attempt.publish(range(run.world_size), time.monotonic() - began)
    except LaunchError as e:
        raise attempt.keep_logs(e) from None
    except KeyboardInterrupt:
        attempt.keep_logs(LaunchError("interrupted"))
        raise
    finally:
        attempt.discard()


def _srun(run: Run, folder: Path, timeout_s: float, weights: Path | None, export: bool, hosts: int) -> None:
    resolved = folder / "resolved.json"
    write_json(resolved, run.to_dict())
    command = ["srun", f"--nodes={hosts}", f"--ntasks={hosts}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    command += [f"--gres=gpu:{run.world_size // hosts}", "--cpu-bind=none", f"--output={folder / 'srun-%n.log'}"]
    command += [sys.executable, "-m", "train_ledger.workflow.hosts", str(run.world_size // hosts)]
    command += [str(resolved), str(folder), "--timeout", str(timeout_s)]
    command += ["--weights", str(weights)] if weights else []
    command += ["--export"] if export else []
    with interruptible():
        process = subprocess.Popen(command, env={**os.environ, FOLDER: str(folder)}, stdin=subprocess.DEVNULL)
        try:
            # A rank ends itself when the time is up; the margin is for hosts that died and cannot.
            code = process.wait(timeout_s + 60)
        except subprocess.TimeoutExpired:
            raise LaunchError(f"{run.name}: not done after {timeout_s:g} s, the time limit") from None
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if code:
        raise _first_error(run, folder, code)
    for extra in (resolved, folder / "steps.txt", *folder.glob("srun-*.log")):
        extra.unlink(missing_ok=True)


def _first_error(run: Run, folder: Path, code: int) -> LedgerError:
    said = [json.loads(f.read_text(encoding="utf-8")) for f in sorted(folder.glob("error*.json"))]
    if said:
        # Clocks of several hosts cannot be compared; a rank that lost its peers says so and is not the cause.
        first = min(said, key=lambda e: (_lost_a_peer(e["error"]), e["rank"]))
        return rebuild(run, first["rank"], first["step"], first, folder / f"rank{first['rank']}.log")
    lines = [line for log in sorted(folder.glob("srun-*.log")) for line in log.read_text(errors="replace").splitlines()]
    last = next((line.strip() for line in reversed(lines) if "error" in line.lower()), "no word")
    return LaunchError(f"{run.name}: srun ended with exit code {code}: {last[:300]}")


def _lost_a_peer(text: str) -> bool:
    return any(sign in text for sign in ("Connection reset", "Connection closed", "Broken pipe", "peer", "Timed out"))


def meeting_point() -> tuple[str, int]:
    """Address of the job step's first host and a port for this job, from what Slurm says.

    Raises:
        LaunchError: Slurm does not answer.
    """
    hosts = os.environ.get("SLURM_STEP_NODELIST") or os.environ["SLURM_JOB_NODELIST"]
    first = ask("scontrol", "show", "hostnames", hosts).split()[0]
    shown = ask("scontrol", "show", "node", "--oneliner", first).split()
    address = next((word.removeprefix("NodeAddr=") for word in shown if word.startswith("NodeAddr=")), first)
    return address, PORT_FIRST + int(os.environ["SLURM_JOB_ID"]) % PORT_COUNT


def main(argv: list[str]) -> int:
    """One host's share: torchrun with `argv[0]` ranks, which run `python -m train_ledger.launch` with the rest."""
    try:
        address, port = meeting_point()
    except LedgerError as e:
        print(f"train-ledger: {e}", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", os.environ["SLURM_STEP_NUM_NODES"]]
    command += ["--node-rank", os.environ["SLURM_NODEID"], "--nproc-per-node", argv[0]]
    command += ["--master-addr", address, "--master-port", str(port), "-m", "train_ledger.launch", *argv[1:]]
    os.execv(sys.executable, command)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
