"""`launch`: run a world, check what its ranks wrote, and publish it: rank files first, `run.json` last.

Each launch writes into a folder of its own inside the target and moves its files out when all are complete, so that a
launch that was thought dead (a job whose workflow was killed) never overwrites the files of the one that replaced it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from train_ledger.spec.errors import ConfigError, DataError, LaunchError
from train_ledger.spec.io import check_name, read_json, validate, write_json, write_text
from train_ledger.spec.run import Run

from .signals import deferred, interruptible
from .weights import open_weights
from .worlds import WORLDS, Job, world

SCHEMA = "train-ledger/launch/1"
RANK_SCHEMA = "train-ledger/rank/1"
CLAIM = ".launch-id"
LOG_TAIL_LINES = 20
MAX_TIMEOUT_S = 10**9
#: What a launch leaves, a rank each. Only these are ours to remove, and of data only that of this launch's ranks and of
#: those that an older run.json names: the folder may hold other things, the initial weights for one.
PUBLISHED = re.compile(r"(?:rank|weights)(\d+)\.(json|log|safetensors)")


def launch(
    run: Run,
    out_dir: str | Path,
    timeout_s: float = 900,
    weights: Path | None = None,
    *,
    export: bool = False,
    ranks: Sequence[int] | None = None,
    device: str = "cpu",
    at_once: int | None = None,
) -> None:
    """Runs a world and writes `rank<r>.json`, `rank<r>.log` and, last, `run.json` into `out_dir`.

    Args:
        run: resolved; `run.world` says how ranks start.
        out_dir: where the files go; made if missing.
        timeout_s: the launch is ended and fails after so many seconds.
        weights: canonical weights to start from.
        export: also write `weights<r>.safetensors`, what each rank holds of the trained weights, by canonical name.
        ranks: only these (world `fake`); None means all.
        device: `cpu` or `cuda` (world `fake`).
        at_once: how many ranks of world `fake` run at the same time; None leaves it to the world.

    Raises:
        LaunchError: a rank died, hung, failed or lost its numerics; no process is left.
        ConfigError: a world or a setting that cannot be.
        DataError: weights that are missing or of another model.
    """
    check_name(run.name, file=run.source or None, key="name")
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ConfigError(f"{timeout_s} is not between 0 and {MAX_TIMEOUT_S:,} seconds", key="timeout")
    if at_once is not None and at_once < 1:
        raise ConfigError(f"{at_once} is less than 1 rank at a time", key="at-once")
    chosen = _chosen(run, ranks)
    module = world(run.world)
    if weights:
        open_weights(weights, run.model)  # each rank would say the same, after the frameworks were loaded
    with interruptible() as check:  # before ranks start too, while a store or a framework is awaited
        attempt = Attempt.begin(run, Path(out_dir))
        try:
            began = time.monotonic()
            module.run_ranks(Job(run, chosen, attempt.directory, timeout_s, weights, export, device, at_once))
            check()
            attempt.publish(chosen, time.monotonic() - began)
        except LaunchError as e:
            raise attempt.keep_logs(e) from None
        except KeyboardInterrupt:  # Ctrl-C, or a scheduler's SIGTERM
            attempt.keep_logs(LaunchError("interrupted"))
            raise
        finally:
            attempt.discard()


def _chosen(run: Run, ranks: Sequence[int] | None) -> tuple[int, ...]:
    everyone = tuple(range(run.world_size))
    if ranks is None or tuple(ranks) == everyone:
        return everyone
    if run.world != "fake":
        raise ConfigError(f"world {run.world} needs all its ranks; single ranks run in world fake", key="ranks")
    wrong = [r for r in ranks if r not in range(run.world_size)]
    if wrong or not ranks:
        raise ConfigError(f"{wrong} are not ranks of a world of {run.world_size}", file=run.source or None, key="ranks")
    return tuple(sorted(set(ranks)))


class Attempt:
    """One launch's private folder inside the target, and the claim that says which launch began last."""

    def __init__(self, run: Run, target: Path, identity: str) -> None:
        self.run, self.target, self.identity = run, target, identity
        self.directory = target / f".attempt-{identity}"

    @classmethod
    def begin(cls, run: Run, target: Path, identity: str = "") -> Attempt:
        """Claims `target` for a new launch.

        Raises:
            LaunchError: the folder cannot be written.
            ConfigError: it is a file.
        """
        attempt = cls(run, target, identity or f"{os.getpid()}-{uuid.uuid4().hex[:12]}")
        if target.exists() and not target.is_dir():
            raise ConfigError("is a file, not a folder", file=target)
        try:
            attempt.directory.mkdir(parents=True, exist_ok=True)
            write_text(target / CLAIM, attempt.identity + "\n")
            for old in target.glob(".attempt-*"):  # of launches that lost their claim now, dead or not
                if old != attempt.directory:
                    shutil.rmtree(old, ignore_errors=True)
        except OSError as e:
            raise LaunchError(f"cannot be written: {e.strerror or e}", file=target) from e
        return attempt

    @classmethod
    def join(cls, run: Run, target: Path, first: bool, identity: str) -> Attempt:
        """For ranks that start by themselves under one identity: the `first` claims, others make the folder only."""
        if first:
            return cls.begin(run, target, identity)
        attempt = cls(run, target, identity)
        attempt.directory.mkdir(parents=True, exist_ok=True)
        return attempt

    def wait_for_peers(self, ranks: Sequence[int], timeout_s: float) -> None:
        """Until every rank's file is there: ranks on other machines write at about the same time, file systems may lag.

        Raises:
            LaunchError: names the ranks whose files did not come.
        """
        until = time.monotonic() + timeout_s
        while missing := [r for r in ranks if not (self.directory / f"rank{r}.json").exists()]:
            if time.monotonic() > until:
                raise LaunchError(f"the files of ranks {missing} did not come", file=self.directory)
            time.sleep(0.2)

    def publish(self, ranks: Sequence[int], wall_s: float) -> None:
        """Checks every rank file, moves them to the target, and writes `run.json`.

        Raises:
            LaunchError: a file is missing, truncated or of another run; or a later launch has claimed the target.
        """
        entries = []
        for rank in ranks:
            file = self.directory / f"rank{rank}.json"
            check_rank_file(file, self.run, rank)
            sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
            entries.append({"rank": rank, "exit": 0, "file": file.name, "sha256": sha256})
        done = {
            "schema": SCHEMA,
            "run": self.run.name,
            "framework": self.run.framework,
            "world": self.run.world,
            "world_size": self.run.world_size,
            "config_sha256": self.run.sha256(),
            "wall_s": round(wall_s, 3),
            "ranks": entries,
        }
        validate(done, "launch", file=self.target / "run.json", error=DataError)
        self._check_claim()
        try:
            write_json(self.directory / "run.json", done)  # a full disk fails here, before an older launch is touched
            with deferred():  # half of a launch in the place of a whole one would be the end of both
                self._move(ranks)
        except OSError as e:
            raise LaunchError(f"cannot be written: {e.strerror or e}", file=e.filename or self.target) from e

    def _move(self, ranks: Sequence[int]) -> None:
        """Files of an older launch go, those of this one come."""
        older = _ranks_of(self.target / "run.json")
        (self.target / "run.json").unlink(missing_ok=True)
        for old in list(self.target.iterdir()):
            of = PUBLISHED.fullmatch(old.name)
            if not of or (self.directory / old.name).exists():
                continue
            # Ranks under a torchrun that was started by hand log here at once; a launch that failed leaves its logs.
            if int(of[1]) not in ranks if of[2] == "log" else int(of[1]) in older.union(ranks):
                old.unlink()
        (self.target / "torchrun.log").unlink(missing_ok=True)  # of an older launch that failed
        for file in sorted(self.directory.iterdir(), key=lambda f: (f.name == "run.json", f.name)):
            os.replace(file, self.target / file.name)

    def keep_logs(self, error: LaunchError) -> LaunchError:
        """After a failure: logs move to the target, the error that names one names it there, and its end is shown."""
        with contextlib.suppress(OSError, LaunchError):
            self._check_claim()
            for log in self.directory.glob("*.log"):
                os.replace(log, self.target / log.name)
            if error.file and Path(error.file).parent == self.directory:
                error = LaunchError(error.message, file=self.target / Path(error.file).name, key=error.key)
        if error.file and Path(error.file).suffix == ".log":
            show_log(Path(error.file))
        return error

    def discard(self) -> None:
        """Removes the private folder."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _check_claim(self) -> None:
        try:
            holder = (self.target / CLAIM).read_text(encoding="utf-8").strip()
        except OSError:
            holder = ""
        if holder != self.identity:
            raise LaunchError("a later launch of the same run has taken this folder; its files stand", file=self.target)


def _ranks_of(run_file: Path) -> set[int]:
    """The ranks of the launch that wrote this run.json; none where there is none that can be read."""
    try:
        return {entry["rank"] for entry in read_json(run_file, SCHEMA, "launch")["ranks"]}
    except DataError:
        return set()


def refuse_other(out_dir: str | Path, run: Run) -> None:
    """A finished measurement is not to be replaced by that of another run or configuration.

    Raises:
        ConfigError: the folder holds one.
    """
    run_file = Path(out_dir) / "run.json"
    if not run_file.is_file():
        return
    try:
        held = read_json(run_file, SCHEMA, "launch")
    except DataError:
        return  # nothing that could be read is lost
    if (held["run"], held["config_sha256"]) != (run.name, run.sha256()):
        what = f"run {held['run']!r}" if held["run"] != run.name else "this run in another configuration"
        raise ConfigError(f"holds a finished launch of {what}; take another folder, or move it away", file=out_dir)


def show_log(log: Path) -> None:
    """The end of a rank's log, on stderr."""
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print(f"--- the last lines of {log}", *lines[-LOG_TAIL_LINES:], "---", sep="\n", file=sys.stderr, flush=True)


def check_rank_file(file: Path, run: Run, rank: int) -> None:
    """A rank file must be whole, pass its schema, and be of this run and rank.

    Raises:
        LaunchError: names file and key.
    """
    try:
        data = read_json(file, RANK_SCHEMA, "rank")
    except DataError as e:
        raise LaunchError(e.message, file=e.file, key=e.key) from e
    for key, wanted in (("run", run.name), ("rank", rank), ("config_sha256", run.sha256())):
        if data[key] != wanted:
            raise LaunchError(f"is {data[key]!r}, expected {wanted!r}", file=file, key=key)


def with_world(run: Run, name: str | None) -> Run:
    """The run in another world.

    Raises:
        ConfigError: there is no such world.
    """
    if name is None or name == run.world:
        return run
    if name not in WORLDS:
        raise ConfigError(f"there is no world {name!r}; known: {', '.join(WORLDS)}", key="world")
    return replace(run, world=name)
