"""What a stage depends on beside its inputs: a framework's pins, and this package's own code, each by a hash."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path

from train_ledger.spec.errors import ConfigError
from train_ledger.spec.io import read_yaml

#: The packages whose code decides what a stage writes. Snakemake itself sees no further than workflow/scripts. A launch
#: is not among them: what was measured stays measured; its settings, seeds and pins decide.
CODE_OF = {
    "predict": ("spec", "predict"),
    "probe": ("spec", "reconcile"),
    "reconcile": ("spec", "reconcile"),
    "parity": ("spec", "parity"),
    "evidence": ("spec", "predict", "reconcile", "parity", "evidence"),
    "plot": ("spec", "reconcile", "parity", "plot"),
    "report": ("spec", "reconcile", "parity", "plot", "report"),
}


def code(stage: str, source: str | Path) -> str:
    """SHA-256 of the code that a stage of `CODE_OF` runs: names and contents of the files of its packages.

    Args:
        source: folder of the package, src/train_ledger.
    """
    digest = hashlib.sha256()
    for package in CODE_OF[stage]:
        for file in sorted((Path(source) / package).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                content = file.read_bytes()
                digest.update(f"{file.relative_to(source).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def use_this_python() -> None:
    """A rule's `python` is the one that runs Snakemake, unless the rule's own conda environment goes before it."""
    here = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([here, os.environ.get("PATH", os.defpath)])
    os.environ.setdefault("PYTHONHASHSEED", "0")
    if not re.fullmatch(r"[\w@%+=:,./-]+", sys.executable):
        # Snakemake puts it into a shell's command as it is (script/__init__.py:execute_script): a space would end it.
        sys.executable = Path(sys.executable).name


def pins(path: str | Path) -> list[str]:
    """The pins of a conda environment file, sorted: conda packages as written, `pip:` packages with their `==`.

    Raises:
        ConfigError: the file is not an environment, or a package is not pinned exactly.
    """
    found: list[str] = []
    for entry in read_yaml(path).get("dependencies") or []:
        for pin in entry.get("pip") or [] if isinstance(entry, dict) else [entry]:
            if pin == "pip":  # only the tool that installs the others
                continue
            if not isinstance(pin, str) or "=" not in pin or any(c in pin for c in "<>~!*"):
                raise ConfigError(f"{pin!r} is not an exact pin", file=path, key="dependencies")
            found.append("".join(pin.split()))
    if not found:
        raise ConfigError("pins nothing", file=path, key="dependencies")
    return sorted(found)


def identity(path: str | Path) -> str:
    """SHA-256 of the sorted pins: comments and order do not matter.

    Raises:
        ConfigError: as `pins`.
    """
    return hashlib.sha256("\n".join(pins(path)).encode()).hexdigest()
