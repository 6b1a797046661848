"""Writes the conda environments from the hashed requirements: all that each framework needs, exactly pinned.

Run by `make lock`. The versions are those of requirements.txt; what needs what is read from the installed packages.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent

# The package itself is not in here: rules take it from the checkout, and it needs pyyaml and jsonschema.
NEEDS = {
    "megatron": ["torch", "megatron-core", "numpy", "pyyaml", "jsonschema"],
    "deepspeed": ["torch", "deepspeed", "numpy", "pyyaml", "jsonschema"],
    "torchtitan": ["torch", "torchtitan", "numpy", "pyyaml", "jsonschema"],
    "workflow": [
        "snakemake",
        "snakemake-executor-plugin-slurm",
        "pandas",
        "seaborn",
        "pyarrow",
        "jinja2",
        "itables",
        "pyyaml",
        "jsonschema",
    ],
}
TITLES = {"workflow": "Snakemake, the Slurm executor, tables, figures and the report."}


def locked() -> dict[str, str]:
    """Versions of requirements.txt by canonical name."""
    text = (HERE / "requirements.txt").read_text(encoding="utf-8")
    return {canonicalize_name(n): v for n, v in re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", text, re.MULTILINE)}


def closure(names: list[str], versions: dict[str, str]) -> list[str]:
    """`name==version` of the packages and of everything that they require here, sorted."""
    found: dict[str, set[str]] = {}
    open_: list[tuple[str, str]] = [(canonicalize_name(n), "") for n in names]
    while open_:
        name, extra = open_.pop()
        if extra in found.setdefault(name, set()):
            continue
        found[name].add(extra)
        for text in metadata.requires(name) or []:
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                for wanted in ["", *need.extras]:
                    open_.append((canonicalize_name(need.name), wanted))
    missing = sorted(n for n in found if n not in versions)
    if missing:
        sys.exit(f"not in requirements.txt: {', '.join(missing)}")
    return [f"{name}=={versions[name]}" for name in sorted(found)]


def main() -> None:
    """Writes envs/<name>.yaml for each."""
    versions = locked()
    for name, needs in NEEDS.items():
        title = TITLES.get(name, f"{name}: the framework and PyTorch. The package itself comes from the checkout.")
        lines = [
            f"# {title} Written by `make lock`.",
            "channels:",
            "  - conda-forge",
            "  - nodefaults",
            "dependencies:",
        ]
        lines += ["  - python=3.12", "  - pip", "  - pip:"]
        lines += [f"      - {pin}" for pin in closure(needs, versions)]
        (HERE / f"{name}.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
