"""World `nccl`: one GPU a rank, one process a GPU, started by torchrun: by `launch` on one machine, by srun on many.

Under torchrun each process runs `python -m train_ledger.launch RUN.json OUT_DIR`. It serves world `cpu` too (gloo), so
that the same job script runs where there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from train_ledger.launch.cuda import cuda_device
from train_ledger.launch.failures import describe, rebuild
from train_ledger.launch.launcher import Attempt
from train_ledger.launch.loop import run_rank
from train_ledger.launch.processes import die_with, log_error, log_to
from train_ledger.launch.progress import Progress
from train_ledger.launch.session import Rank
from train_ledger.launch.signals import interruptible
from train_ledger.spec.errors import ConfigError, LaunchError, LedgerError
from train_ledger.spec.io import write_json
from train_ledger.spec.resolved import read_resolved
from train_ledger.spec.run import Run

from . import Job

#: Set by `run_ranks` for its processes: the folder of the launch. Without it (srun, torchrun by hand) rank 0 publishes.
FOLDER = "TRAIN_LEDGER_LAUNCH_FOLDER"
STEPS = "steps.txt"


def run_ranks(job: Job) -> None:
    """Starts all ranks on this machine under torchrun; see `worlds`."""
    found = torch.cuda.device_count()
    if found < job.run.world_size:
        raise LaunchError(f"{job.run.name}: world nccl needs {job.run.world_size} GPUs, this machine shows {found}")
    start_torchrun(job)


def start_torchrun(job: Job) -> None:
    """torchrun around the ranks of a job, watched until it ends or the time is up.

    Raises:
        LaunchError: what the rank that failed first said.
        ConfigError: what a rank refused.
    """
    resolved = job.directory / "resolved.json"
    write_json(resolved, job.run.to_dict())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(job.run.world_size), "-m", "train_ledger.launch"]
    command += [str(resolved), str(job.directory), "--timeout", str(job.timeout_s)]
    command += ["--weights", str(job.weights)] if job.weights else []
    command += ["--export"] if job.export else []
    shown = Progress(job.run.name, job.run.steps, 1)
    parent = os.getpid()
    with open(job.directory / "torchrun.log", "w") as log, interruptible() as check:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, FOLDER: str(job.directory)},
            start_new_session=True,
            preexec_fn=lambda: die_with(parent),
        )
        deadline = time.monotonic() + job.timeout_s
        try:
            while process.poll() is None:
                check()
                if time.monotonic() > deadline:
                    raise LaunchError(f"{job.run.name}: not done after {job.timeout_s:g} s, the time limit")
                time.sleep(0.2)
                _show(job.directory / STEPS, shown)
        finally:
            _end(process)
            shown.close()
    if process.returncode:
        raise _first_error(job, process.returncode)
    for extra in (resolved, job.directory / STEPS, job.directory / "torchrun.log"):
        extra.unlink(missing_ok=True)


def _show(steps: Path, shown: Progress) -> None:
    done = len(steps.read_text().splitlines()) - 1 if steps.is_file() else -1
    if done >= 0 and done != shown.done.get(0):
        shown.step(0, done)
    else:
        shown.tick()


def _end(process: subprocess.Popen[bytes]) -> None:
    """torchrun ends its ranks when it is asked to; its ranks die with it when it does not (processes.die_with)."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _first_error(job: Job, code: int) -> LedgerError:
    """The first cause: a rank that a signal ended, by torchrun's summary, else the error that was raised first."""
    text = (job.directory / "torchrun.log").read_text(encoding="utf-8", errors="replace")
    ended = {int(r): int(c) for r, c in re.findall(r"rank\s*:\s*(\d+) .*?\n\s*exitcode\s*:\s*(-?\d+)", text)}
    # SIGTERM is how torchrun ends the ranks that are left.
    by_signal = [(rank, -c) for rank, c in ended.items() if c < 0 and c != -signal.SIGTERM]
    if by_signal:
        rank, number = by_signal[0]
        how = f"was killed by signal {number} ({signal.Signals(number).name})"
        return LaunchError(f"{job.run.name}: rank {rank} {how}", file=job.directory / f"rank{rank}.log")
    said = [json.loads(f.read_text(encoding="utf-8")) for f in sorted(job.directory.glob("error*.json"))]
    if said:
        first = min(said, key=lambda e: e["at"])
        rank = first["rank"]
        return rebuild(job.run, rank, first["step"], first, job.directory / f"rank{rank}.log")
    codes = ", ".join(f"rank {rank} with {c}" for rank, c in sorted(ended.items()))
    log = job.directory / "torchrun.log"
    return LaunchError(f"{job.run.name}: torchrun ended with exit code {code} ({codes or 'no rank named'})", file=log)


def main(argv: list[str] | None = None) -> int:
    """What one process under torchrun does: train its rank; rank 0 publishes unless `launch` will."""
    parser = argparse.ArgumentParser(prog="python -m train_ledger.launch", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN.json", type=Path)
    parser.add_argument("out", metavar="OUT_DIR", type=Path)
    parser.add_argument(
        "--timeout", type=float, default=900, metavar="S", help="a rank ends itself after so many seconds"
    )
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--export", action="store_true")
    args = parser.parse_args(argv)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        parser.error("must be started by torchrun: RANK and WORLD_SIZE are not set")
    rank = int(os.environ["RANK"])
    die_with(os.getppid())
    try:
        run = _resolved(args.run)
    except LedgerError as e:
        print(f"train-ledger: {e}", file=sys.stderr)
        if FOLDER in os.environ:
            write_json(args.out / f"error{rank}.json", {"rank": rank, "step": -1, **describe(e)})
        return 2
    attempt = None if FOLDER in os.environ else Attempt.join(run, args.out, rank == 0, _identity())
    folder = attempt.directory if attempt else args.out
    shown = Progress(run.name, run.steps, 1, os.fdopen(os.dup(2), "w")) if attempt and rank == 0 else None
    log_to(args.out / f"rank{rank}.log")
    faulthandler.dump_traceback_later(args.timeout, exit=True)
    began, at = time.monotonic(), [-1]

    def on_step(step: int) -> None:
        at[0] = step
        if rank == 0:
            with open(folder / STEPS, "a") as f:
                f.write(f"{step}\n")
            if shown:
                shown.step(0, step)

    try:
        where = make_rank(run, rank)
        run_rank(run, where, folder, weights=args.weights, export=args.export, on_step=on_step)
        if attempt and rank == 0:
            (folder / STEPS).unlink()
            attempt.wait_for_peers(range(run.world_size), args.timeout - (time.monotonic() - began))
            attempt.publish(range(run.world_size), time.monotonic() - began)
            attempt.discard()
    except BaseException as e:
        with contextlib.suppress(OSError):
            write_json(folder / f"error{rank}.json", {"rank": rank, "step": at[0], **describe(e)})
        log_error(e)
        if shown:
            shown.say(str(e))
        return 1
    return 0


def _resolved(file: Path) -> Run:
    run = read_resolved(file)
    started = int(os.environ["WORLD_SIZE"])
    if started != run.world_size:
        raise ConfigError(f"is {run.world_size}, but torchrun started {started} ranks", file=file, key="world_size")
    return run


def _identity() -> str:
    """The same on all ranks of one launch, another in the next: torchrun's run id, restart count and port."""
    parts = (os.environ.get("TORCHELASTIC_RUN_ID", "none"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return re.sub(r"[^A-Za-z0-9_-]", "_", "-".join((*parts, os.environ.get("MASTER_PORT", "0"))))


def make_rank(run: Run, rank: int) -> Rank:
    """Where this process stands, from torchrun's environment."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if run.world == "cpu":
        torch.set_num_threads(1)
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        device, backend = torch.device("cpu"), "gloo"
    elif run.world == "nccl":
        device, backend = cuda_device(local), "nccl"
    else:
        raise ConfigError(f"{run.world!r} does not run under torchrun", file=run.source or None, key="world")

    def init(timeout: timedelta) -> None:
        dist.init_process_group(backend, timeout=timeout)

    return Rank(rank, local, run.world_size, run.world, device, init)
