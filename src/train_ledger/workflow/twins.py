"""One launch of a run at a time, wherever it was started from, and no measurement made twice.

A launch holds `results/<comparison>/launch/.<run>.lock` while it works. One that outlives the workflow that started it
(SIGKILL, a lost login node) is waited for by the next, which then takes its result instead of measuring again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from train_ledger.spec.errors import LaunchError
from train_ledger.spec.io import write_json

REQUEST = "request.json"


def request(config_sha256: str, env: str) -> dict[str, str]:
    """What a launch is asked for: the run's and its environment's identity. The same request measures the same."""
    return {"config_sha256": config_sha256, "env": env}


def same(one: Mapping[str, Any] | None, other: Mapping[str, Any]) -> bool:
    """Whether two requests ask for the same measurement."""
    return one is not None and all(one.get(key) == other[key] for key in ("config_sha256", "env"))


def asked(launch_dir: str | Path) -> dict[str, Any] | None:
    """The request of the launch in a folder, and the Slurm job that took it; None where none can be read."""
    try:
        data = json.loads((Path(launch_dir) / REQUEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


@contextlib.contextmanager
def alone(launch_dir: Path, config_sha256: str, env: str) -> Iterator[bool]:
    """Waits until no other launch works on this folder. Yields whether one that was waited for did this request.

    Raises:
        LaunchError: the folder cannot be written.
    """
    wanted = request(config_sha256, env)
    lock = launch_dir.parent / f".{launch_dir.name}.lock"
    try:
        launch_dir.mkdir(parents=True, exist_ok=True)
        holder = open(lock, "a+b", buffering=0)  # noqa: SIM115 (unbuffered: closing must not fail on a full disk)
    except OSError as e:
        raise LaunchError(f"cannot be written: {e.strerror or e}", file=lock) from e
    with holder:
        if _wait(holder, launch_dir) and same(asked(launch_dir), wanted) and (launch_dir / "run.json").is_file():
            print(
                f"{launch_dir.name}: the launch that was waited for has measured this run", file=sys.stderr, flush=True
            )
            yield True
            return
        with contextlib.suppress(OSError):
            holder.truncate(0)
            holder.write(f"process {os.getpid()} on {os.uname().nodename}".encode())
        try:
            (launch_dir / "run.json").unlink(missing_ok=True)
            write_json(launch_dir / REQUEST, {**wanted, "slurm_job": os.environ.get("SLURM_JOB_ID")})
        except OSError as e:
            raise LaunchError(f"cannot be written: {e.strerror or e}", file=launch_dir) from e
        yield False


def _wait(holder: Any, launch_dir: Path) -> bool:
    """Takes the lock. Returns whether another launch had it."""
    try:
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        holder.seek(0)
        who = holder.read().decode(errors="replace").strip() or "another process"
        print(f"{launch_dir.name}: waiting for the launch that {who} is doing", file=sys.stderr, flush=True)
    except OSError:
        return False  # no locks on this file system; the launcher's own claim on the folder still keeps files apart
    while True:
        try:
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(1)


def held(launch_dir: str | Path) -> str | None:
    """Who works on a launch right now; None when nobody does."""
    launch_dir = Path(launch_dir)
    try:
        with open(launch_dir.parent / f".{launch_dir.name}.lock", encoding="utf-8") as holder:
            fcntl.flock(holder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return (launch_dir.parent / f".{launch_dir.name}.lock").read_text(encoding="utf-8").strip() or "another process"
    except OSError:
        return None
    return None
