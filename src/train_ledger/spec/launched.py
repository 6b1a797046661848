"""Reads a launch's folder, and believes none of it until it is checked."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import DataError
from .io import read_json
from .registry import FRAMEWORKS

LAUNCH_SCHEMA = "train-ledger/launch/1"
RANK_SCHEMA = "train-ledger/rank/1"

#: Fields of a rank file that say which launch it is from.
IDENTITY = ("run", "framework", "world", "world_size", "config_sha256")


@dataclass(frozen=True)
class Launch:
    """A finished launch: `meta` is run.json, `ranks` the rank files in rank order."""

    meta: Mapping[str, Any]
    ranks: tuple[Mapping[str, Any], ...]


def read_launch(launch_dir: str | Path) -> Launch:
    """run.json and every rank file that it names.

    Raises:
        DataError: run.json or a rank file is missing, truncated, of another schema, not the one that run.json hashed,
            of another run or config, or measured with a framework version that the rules were not verified with; a rank
            did not end well, is missing or trained other steps than the first. Names the file and the key.
    """
    run_file = Path(launch_dir) / "run.json"
    meta = read_json(run_file, LAUNCH_SCHEMA, "launch")
    ranks = []
    for i, entry in enumerate(meta["ranks"]):
        if entry["exit"] != 0:
            raise DataError(f"rank {entry['rank']} ended with {entry['exit']}", file=run_file, key=f"ranks[{i}].exit")
        if Path(entry["file"]).name != entry["file"] or not entry["file"]:
            raise DataError(f"{entry['file'][:120]!r} is not a plain file name", file=run_file, key=f"ranks[{i}].file")
        ranks.append(_read_rank(run_file, meta, entry))
    ranks.sort(key=lambda r: r["rank"])
    present = [r["rank"] for r in ranks]
    # A fake world starts the ranks that were asked for; every other world starts all of them.
    wanted = sorted(set(present)) if meta["world"] == "fake" else list(range(meta["world_size"]))
    if present != wanted or not present:
        gone = sorted(set(wanted) - set(present))
        what = f"ranks {gone} of {meta['world_size']} are missing" if gone else "a rank is there twice, or none is"
        raise DataError(what, file=run_file, key="ranks")
    for rank in ranks[1:]:
        if rank["versions"] != ranks[0]["versions"]:
            file = Path(launch_dir) / f"rank{rank['rank']}.json"
            raise DataError(f"other versions than on rank {ranks[0]['rank']}", file=file, key="versions")
        check_steps(ranks[0], rank, Path(launch_dir) / f"rank{rank['rank']}.json")
    for rank in ranks:
        check_references(rank, Path(launch_dir) / f"rank{rank['rank']}.json")
    return Launch(meta, tuple(ranks))


def _read_rank(run_file: Path, meta: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    file = run_file.parent / entry["file"]
    try:
        content = file.read_bytes()
    except OSError as e:
        raise DataError(f"cannot be read: {e.strerror or e} (rank {entry['rank']})", file=file) from e
    data = read_json(file, RANK_SCHEMA, "rank")
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise DataError(
            f"is not the file that {run_file.name} hashed; it was changed afterwards", file=file, key="sha256"
        )
    if data["rank"] != entry["rank"]:
        raise DataError(f"is {data['rank']}, but {run_file.name} says {entry['rank']}", file=file, key="rank")
    for key in IDENTITY:
        if data[key] != meta[key]:
            raise DataError(f"is {data[key]!r}, but {run_file.name} says {meta[key]!r}", file=file, key=key)
    check_version(data, file)
    return data


def check_steps(first: Mapping[str, Any], rank: Mapping[str, Any], file: str | Path) -> None:
    """All ranks of a run train the same steps; a rank that lost some would lower a mean over ranks without a word.

    Raises:
        DataError: the two do not list the same step numbers.
    """
    wanted, found = ([s["step"] for s in r["steps"]] for r in (first, rank))
    if found != wanted:
        raise DataError(
            f"rank {rank['rank']} has the steps {_some(found)}, rank {first['rank']} has {_some(wanted)}",
            file=file,
            key="steps",
        )


def check_references(rank: Mapping[str, Any], file: str | Path, prefix: str = "") -> None:
    """What a rank file says of groups, calls and storages is of ranks of its world and of steps that it trained.

    Raises:
        DataError: a rank outside of the world or twice in a group, a step that is none of the file's.
    """
    world, steps = range(rank["world_size"]), {s["step"] for s in rank["steps"]}
    for part in ("groups", "collectives"):
        for i, item in enumerate(rank[part]):
            if not all(r in world for r in item["ranks"]) or len(set(item["ranks"])) < len(item["ranks"]):
                what = f"{_some(item['ranks'])} are not different ranks of a world of {len(world)}"
                raise DataError(what, file=file, key=f"{prefix}{part}[{i}].ranks")
    for i, call in enumerate(rank["collectives"]):
        if call["step"] not in steps:
            what = f"{call['step']} is not a step of this rank: {_some(sorted(steps))}"
            raise DataError(what, file=file, key=f"{prefix}collectives[{i}].step")
    if rank["census"]["step"] not in steps:
        what = f"{rank['census']['step']} is not a step of this rank: {_some(sorted(steps))}"
        raise DataError(what, file=file, key=f"{prefix}census.step")


def _some(numbers: list[int], limit: int = 10) -> str:
    more = f" and {len(numbers) - limit} more" if len(numbers) > limit else ""
    return ", ".join(map(str, numbers[:limit])) + more


def check_version(data: Mapping[str, Any], file: str | Path) -> None:
    """Refuse a measurement of a framework version that the rules were not verified with.

    Raises:
        DataError: unknown framework, version not recorded, or another version.
    """
    if data["framework"] not in FRAMEWORKS:
        raise DataError(f"{data['framework']!r} is not one of {', '.join(FRAMEWORKS)}", file=file, key="framework")
    framework = FRAMEWORKS[data["framework"]]
    key = f"versions.{framework.distribution}"
    found = data["versions"].get(framework.distribution)
    if found is None:
        raise DataError("is missing", file=file, key=key)
    if found.split("+")[0] != framework.version:
        raise DataError(f"is {found}, the rules are those of {framework.version}", file=file, key=key)
