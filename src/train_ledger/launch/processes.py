"""Ranks as forked processes: imported once, watched together. When one dies, hangs or fails, all end."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from train_ledger.spec.errors import LaunchError, LedgerError

from .failures import describe, rebuild, where
from .progress import Progress
from .session import Rank
from .signals import interruptible
from .worlds import Job


@dataclass
class _Child:
    """A rank's process as its parent sees it. `error` is what failures.describe made of its last word."""

    rank: int
    pid: int
    pipe: int
    step: int = -1
    error: dict[str, Any] | None = None
    unread: bytes = b""
    status: int | None = None
    ended_at: float = 0.0


def run_forked(job: Job, make_rank: Callable[[int], Rank], at_once: int | None = None) -> None:
    """Imports the framework once, forks a process for each rank, and waits for all.

    On CUDA each rank imports by itself: some imports count the GPUs (megatron/core/tensor_parallel/random.py through
    torch/utils/cpp_extension.py, deepspeed/accelerator), which starts the driver, and a forked process cannot use a
    driver that its parent started.

    Args:
        job: what to run.
        make_rank: called in the child; sets the environment of that rank and says where it stands.
        at_once: how many ranks may run at the same time; all when None (they talk to each other).

    Raises:
        LaunchError: a rank was killed, failed, or the time was up; says which rank, how, and where its log is.
        ConfigError: a rank refused its settings.
    """
    from .loop import program

    deadline = time.monotonic() + job.timeout_s
    shown = Progress(job.run.name, job.run.steps, len(job.ranks))
    shown.tick()
    waiting, children = list(job.ranks), list[_Child]()
    with interruptible() as check:
        try:
            program(job.run.framework, warm=not on_cuda(job))
            while waiting or any(c.status is None for c in children):
                check()
                running = sum(c.status is None for c in children)
                while waiting and (at_once is None or running < at_once):
                    children.append(_start(job, make_rank, waiting.pop(0)))
                    running += 1
                _listen(children, shown)
                failed = [c for c in children if c.status not in (None, 0)]
                if failed:
                    _settle(children)
                    raise _failure(job, children)
                if time.monotonic() > deadline:
                    raise _timeout(job, children, waiting)
                shown.tick()
        finally:
            _kill(children)
            shown.close()


def on_cuda(job: Job) -> bool:
    """Whether the ranks of a forking world compute on a GPU."""
    return job.device == "cuda" or job.run.world == "shared"


def _start(job: Job, make_rank: Callable[[int], Rank], rank: int) -> _Child:
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as e:
        raise LaunchError(f"{job.run.name}: rank {rank} cannot be started: {e.strerror or e}") from e
    if pid == 0:
        os.close(read)
        _child(job, make_rank, rank, write, parent)
    os.close(write)
    os.set_blocking(read, False)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    return _Child(rank, pid, read)


def _child(job: Job, make_rank: Callable[[int], Rank], rank: int, pipe: int, parent: int) -> NoReturn:
    """Everything a rank's process does. It never returns into the parent's code."""
    code = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        die_with(parent)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        log_to(job.directory / f"rank{rank}.log")

        def report(**message: Any) -> None:
            os.write(pipe, (json.dumps(message) + "\n").encode())

        from .loop import run_rank

        try:
            run_rank(
                job.run,
                make_rank(rank),
                job.directory,
                weights=job.weights,
                export=job.export,
                on_step=lambda step: report(step=step),
            )
            code = 0
        except BaseException as e:
            report(**describe(e))
            log_error(e)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def log_to(file: Path) -> None:
    """Everything that this process writes goes to `file` from now on, its stack too when it crashes or gets SIGUSR1."""
    file.unlink(missing_ok=True)
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # pytest and others put objects of their own into sys; a rank's words belong in the rank's log.
    sys.stdout = open(1, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)


def log_error(error: BaseException) -> None:
    """The stack of an error into the log; the line alone of one of ours, which says all that there is to know."""
    if isinstance(error, LedgerError):
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)


def die_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies, however it dies: a rank must never outlive its launch."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _listen(children: list[_Child], shown: Progress, wait_s: float = 0.1) -> None:
    """Read what the ranks report, and reap those that ended."""
    alive = [c for c in children if c.status is None]
    with selectors.DefaultSelector() as selector:
        for child in alive:
            selector.register(child.pipe, selectors.EVENT_READ, child)
        for key, _ in selector.select(wait_s):
            _read(key.data, shown)
    for child in alive:
        if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            _read(child, shown)
            _reap(child)


def _read(child: _Child, shown: Progress) -> None:
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(child.pipe, 65536):
            child.unread += chunk
    *lines, child.unread = child.unread.split(b"\n")
    for line in lines:
        message = json.loads(line)
        if "step" in message:
            child.step = message["step"]
            shown.step(child.rank, child.step)
        else:
            child.error = message


def _settle(children: list[_Child], wait_s: float = 1.0) -> None:
    """When one rank ends, its peers soon fail too. Wait a moment, so that the first cause is told from the echoes."""
    until = time.monotonic() + wait_s
    silent = Progress("", 0, 0, open(os.devnull, "w"))  # noqa: SIM115
    while time.monotonic() < until and any(c.status is None for c in children):
        _listen(children, silent, 0.05)
    silent.stream.close()


def _failure(job: Job, children: list[_Child]) -> LedgerError:
    """The first cause: a rank that a signal ended, else the error that was raised first. Echoes are left out."""
    by_signal = [c for c in children if c.status is not None and c.status < 0]
    by_error = [c for c in children if c.error]
    if by_signal:
        child = min(by_signal, key=lambda c: c.ended_at)
        number = -(child.status or 0)
        how = f"was killed by signal {number} ({signal.Signals(number).name}) {where(job.run, child.step)}"
        if number == signal.SIGKILL:
            how += "; the kernel does that when memory runs out"
    elif by_error:
        child = min(by_error, key=lambda c: c.error["at"] if c.error else 0.0)
        return rebuild(job.run, child.rank, child.step, child.error or {}, _log(job, child))
    else:
        child = next(c for c in children if c.status)
        how = f"ended with exit code {child.status} and no word {where(job.run, child.step)}"
    return LaunchError(f"{job.run.name}: rank {child.rank} {how}", file=_log(job, child))


def _timeout(job: Job, children: list[_Child], waiting: list[int]) -> LaunchError:
    """Who has not answered: of the ranks that are furthest behind, one that does not merely wait for the others."""
    text = f"{job.run.name}: not done after {job.timeout_s:g} s, the time limit"
    late = [c for c in children if c.status is None]
    if not late:
        return LaunchError(f"{text}; ranks {waiting} were not started")
    for child in late:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGUSR1)  # faulthandler writes the rank's stack into its log
    time.sleep(0.5)
    behind = min(late, key=lambda c: (c.step, _waits(_log(job, c))))
    others = "" if len(late) == 1 else f" ({len(late)} ranks were still running)"
    return LaunchError(
        f"{text}; rank {behind.rank} has not answered {where(job.run, behind.step)}{others}", file=_log(job, behind)
    )


def _waits(log: Path) -> bool:
    """Whether the stack at the end of a log stands in a torch.distributed call."""
    with contextlib.suppress(OSError):
        stack = log.read_text(encoding="utf-8", errors="replace").rpartition("(most recent call first):\n")[2]
        return "torch/distributed/" in stack.partition("\n")[0]
    return False


def _log(job: Job, child: _Child) -> Path:
    return job.directory / f"rank{child.rank}.log"


def _kill(children: list[_Child]) -> None:
    """End what is left of every rank and reap it, with whatever it started (its process group)."""
    for child in children:
        if child.status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child.pid, signal.SIGKILL)
    for child in children:
        if child.status is None:
            _reap(child)


def _reap(child: _Child) -> None:
    """Wait for a rank that is ending. Until reaped its number stays taken, so the group that is killed is its own."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.status = 1
    with contextlib.suppress(ChildProcessError):
        child.status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
    child.ended_at = time.monotonic()
    os.close(child.pipe)
