"""What a command's RUN argument means: a run file, a run file as a comparison has it, or a resolved run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from train_ledger.spec.config import load_run, merge
from train_ledger.spec.errors import ConfigError
from train_ledger.spec.io import check_name, fill_defaults, read_yaml, schema, validate
from train_ledger.spec.registry import FRAMEWORKS
from train_ledger.spec.run import Run, check_layout

from .worlds import WORLDS


def find_run(
    path: str | Path,
    *,
    comparison: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    world: str | None = None,
) -> Run:
    """The run that a person names on the command line, resolved.

    Args:
        path: `config/runs/<name>.yaml`, or a file with `Run.to_dict()` as JSON.
        comparison: name of a file in `comparisons/` beside the run file's folder; goes before the run file.
        overrides: keys that go before both; nested mappings are merged.
        world: goes before everything.

    Raises:
        ConfigError: names file and key.
    """
    path = Path(path)
    if world is not None and world not in WORLDS:
        raise ConfigError(f"there is no world {world!r}; known: {', '.join(WORLDS)}", key="world")
    over = dict(overrides or {})
    if path.suffix == ".json":
        if comparison or over:
            raise ConfigError("is resolved and takes no further settings; give the .yaml file", file=path)
        run = read_resolved(path)
    elif comparison is None:
        run = load_run(path, overrides=over)
    else:
        config_dir = path.absolute().parent.parent
        file = config_dir / "comparisons" / f"{check_name(comparison, key='comparison')}.yaml"
        data = read_yaml(file)
        validate(data, "comparison", file=file)
        if path.stem not in data["runs"]:
            raise ConfigError(f"holds no run {path.stem!r}; its runs: {', '.join(data['runs'])}", file=file, key="runs")
        data = fill_defaults(data, schema("comparison"))
        defaults = {key: data[key] for key in ("model", "world", "steps", "seed") if key not in over}
        overrides = merge(data["runs"][path.stem] or {}, over)
        run = load_run(path, config_dir=config_dir, overrides=overrides, defaults=defaults)
    return replace(run, world=world) if world else run


def read_resolved(path: Path) -> Run:
    """A run from a file that holds `Run.to_dict()` as JSON.

    Raises:
        ConfigError: it cannot be read, or is not one.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        run = Run.from_dict(data, source=str(path))
        check_name(run.name, file=path, key="name")
        if run.framework not in FRAMEWORKS:
            raise ConfigError(f"{run.framework!r} is not a framework", file=path, key="framework")
        check_layout(run)
    except OSError as e:
        raise ConfigError(f"cannot be read: {e.strerror or e}", file=path) from e
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError, ArithmeticError) as e:
        raise ConfigError(f"is not a resolved run: {type(e).__name__}: {e}", file=path) from e
    return run
