"""Where the figures come from: versions, machines, hashes. The only part of the report that names them."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train_ledger import __version__
from train_ledger.plot.data import Results, framework_title
from train_ledger.plot.text import plural
from train_ledger.spec.registry import FRAMEWORKS

from .tables import Column, Table


@dataclass(frozen=True)
class Source:
    """The checkout that a report was made from. Empty where it is not known.

    `commit` is the git commit, with `, with changes` behind it where tracked files differ from it;
    `environment_sha256` the hash of the pinned requirements.
    """

    commit: str = ""
    environment_sha256: str = ""


def find_source(root: str | Path = ".") -> Source:
    """The git commit and the hash of `envs/requirements.txt` of a checkout; what is not there stays empty."""
    root = Path(root)
    requirements = root / "envs" / "requirements.txt"
    pins = hashlib.sha256(requirements.read_bytes()).hexdigest() if requirements.is_file() else ""
    commit = _git(root, "rev-parse", "HEAD")
    changed = commit and _git(root, "status", "--porcelain", "--untracked-files=no")
    return Source(f"{commit}{', with changes' if changed else ''}", pins)


def _git(root: Path, *args: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def provenance_table(sources: Sequence[Results]) -> Table:
    """A row a run that was measured."""
    rows = []
    for where, r in ((results.name, r) for results in sources for r in results.runs):
        framework = FRAMEWORKS.get(r["framework"])
        versions = r["versions"]
        rows.append(
            {
                "where": where,
                "run": r["run"],
                "framework": framework_title(r["framework"]),
                "version": versions.get(framework.distribution if framework else "", ""),
                "torch": versions.get("torch", ""),
                "python": versions.get("python", ""),
                "world": f"{r['world']}, {plural(r['world_size'], 'rank')}",
                "device": "; ".join(_device(d) for d in r["devices"]),
                "config_sha256": r.get("config_sha256", ""),
            }
        )
    return Table(
        "provenance",
        "What was measured with what.",
        [
            Column("where", "results", "code"),
            Column("run", "run", "code"),
            Column("framework", "framework"),
            Column("version", "version", "code"),
            Column("torch", "torch", "code"),
            Column("python", "Python", "code"),
            Column("world", "world"),
            Column("device", "device"),
            Column("config_sha256", "SHA-256 of the run's config", "hash"),
        ],
        rows,
    )


def _device(device: Mapping[str, Any]) -> str:
    if device.get("type") != "cuda":
        return str(device.get("type", ""))
    memory = f", {device['memory_bytes'] / 2**30:.1f} GiB" if device.get("memory_bytes") else ""
    driver = f", driver {device['driver']}" if device.get("driver") else ""
    return f"{device.get('name', 'cuda')}{memory}{driver}"


def machines(sources: Sequence[Results]) -> list[str]:
    """The machines that were measured on, each once: kind, CPUs, memory."""
    found = []
    for r in (r for results in sources for r in results.runs):
        for h in r["hosts"]:
            memory = f", {h['memory_bytes'] / 2**30:.1f} GiB of memory" if h.get("memory_bytes") else ""
            found.append(f"{h.get('machine', 'unknown')}, {h.get('cpus', '?')} CPUs{memory}")
    return list(dict.fromkeys(found))


def facts(sources: Sequence[Results], source: Source) -> list[tuple[str, str]]:
    """What holds for the whole report, as pairs of words. The first of `sources` is the comparison of the page."""
    return [
        ("comparison", sources[0].name),
        ("train-ledger", __version__),
        ("git commit", source.commit or "not recorded"),
        ("SHA-256 of envs/requirements.txt", source.environment_sha256 or "not recorded"),
        ("machine", "; ".join(machines(sources)) or "nothing was measured"),
    ]
