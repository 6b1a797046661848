"""A resolved run, read from a file.

The workflow gives it to `launch`, `launch` to the ranks of torchrun, and the evidence keeps it beside what it measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .io import SCHEMAS, check_name, schema, validate
from .model import ModelShape
from .registry import FRAMEWORKS
from .run import Optimizer, Parallel, Probe, Run, check_layout

#: Parts of a resolved run that are mappings of their own.
_PARTS = {"model": ModelShape, "parallel": Parallel, "optimizer": Optimizer, "probe": Probe}


def read_resolved(path: Path) -> Run:
    """A run from a file with `Run.to_dict()` as JSON, held against the schemas of the files that it was made from.

    Raises:
        ConfigError: it cannot be read, or is not one; names the key.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"cannot be read: {e.strerror or e}", file=path) from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"is not a resolved run: it is not complete JSON ({e})", file=path) from e
    _has_fields(data, Run, path)
    for part, of in _PARTS.items():
        _has_fields(data[part], of, path, part)
    try:
        run = Run.from_dict(data, source=str(path))
        check_name(run.name, file=path, key="name")
        if run.framework not in FRAMEWORKS:
            raise ConfigError(f"{str(run.framework)[:50]!r} is not a framework", file=path, key="framework")
        own = {k: data[k] for k in schema("run")["properties"] if k in data and k not in ("framework", "model")}
        validate({**own, "framework": next(iter(FRAMEWORKS))}, "run", file=path)
        validate({k: v for k, v in data["model"].items() if k != "name"}, "model", file=path, prefix="model")
        if (SCHEMAS / f"{run.framework}.yaml").is_file():
            validate(data["settings"], run.framework, file=path, prefix="settings")
            _is_whole(data["settings"], schema(run.framework), path, "settings", data["parallel"])
        check_layout(run)
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError, ArithmeticError) as e:
        raise ConfigError(f"is not a resolved run: {type(e).__name__}: {e}", file=path) from e
    return run


def _has_fields(data: Any, of: type, path: Path, prefix: str = "") -> None:
    """Refuses what is no mapping of exactly the fields of a dataclass. `source` is never written."""
    if not isinstance(data, dict):
        raise ConfigError("is not a resolved run: must hold a mapping of keys to values", file=path, key=prefix or None)
    wanted = [f.name for f in fields(of) if f.name != "source"]
    for key in [k for k in wanted if k not in data]:
        raise ConfigError("is not a resolved run: is missing", file=path, key=f"{prefix}.{key}" if prefix else key)
    for key in [k for k in data if k not in wanted]:
        raise ConfigError("is not a resolved run: unknown key", file=path, key=f"{prefix}.{key}" if prefix else key)


def _is_whole(
    data: Mapping[str, Any], of: Mapping[str, Any], path: Path, prefix: str, parallel: Mapping[str, int]
) -> None:
    """Refuses settings that lack a key: resolving fills in every default that applies (`x-needs` names a degree)."""
    for key, sub in of.get("properties", {}).items():
        at = f"{prefix}.{key}"
        if key not in data and "default" in sub and parallel.get(sub.get("x-needs", ""), 2) > 1:
            raise ConfigError("is not a resolved run: is missing", file=path, key=at)
        if isinstance(data.get(key), Mapping):
            _is_whole(data[key], sub, path, at, parallel)
