"""Names of each framework that need no model, kept as data beside this module: what is ignored, and why."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml


@functools.cache
def _read(name: str) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    data: dict[str, Any] = yaml.load(
        (Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8"), Loader=loader
    )
    return data


def ignored(name: str) -> frozenset[str]:
    """Names that change neither bytes nor calls: of `megatron`, `deepspeed`, `torchtitan` or `huggingface`."""
    return frozenset(flag for flags in _read(name)["ignored"].values() for flag in flags)


def neutral(name: str) -> dict[str, frozenset[str]]:
    """Names that are accepted with the values that change nothing, as text; with any other they are refused."""
    return {flag: frozenset(values) for flag, values in _read(name).get("neutral", {}).items()}
