"""A resolved run, read from a file: what the workflow gives to `launch`, and `launch` to the ranks of torchrun."""

from __future__ import annotations

import json
from pathlib import Path

from train_ledger.spec.errors import ConfigError
from train_ledger.spec.io import SCHEMAS, check_name, schema, validate
from train_ledger.spec.registry import FRAMEWORKS
from train_ledger.spec.run import Run, check_layout


def read_resolved(path: Path) -> Run:
    """A run from a file with `Run.to_dict()` as JSON, held against the schemas of the files that it was made from.

    Raises:
        ConfigError: it cannot be read, or is not one.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        run = Run.from_dict(data, source=str(path))
        check_name(run.name, file=path, key="name")
        if run.framework not in FRAMEWORKS:
            raise ConfigError(f"{run.framework!r} is not a framework", file=path, key="framework")
        part = {k: data[k] for k in schema("run")["properties"] if k in data and k not in ("framework", "model")}
        validate({**part, "framework": next(iter(FRAMEWORKS))}, "run", file=path)
        validate({k: v for k, v in data["model"].items() if k != "name"}, "model", file=path, prefix="model")
        if (SCHEMAS / f"{run.framework}.yaml").is_file():
            validate(data["settings"], run.framework, file=path, prefix="settings")
        check_layout(run)
    except OSError as e:
        raise ConfigError(f"cannot be read: {e.strerror or e}", file=path) from e
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError, ArithmeticError) as e:
        raise ConfigError(f"is not a resolved run: {type(e).__name__}: {e}", file=path) from e
    return run
