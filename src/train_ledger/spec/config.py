"""From the files under config/ to resolved runs. What goes before what.

Options, the comparison's entry, the run file, defaults.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .io import check_name, fill_defaults, parse_yaml, read_yaml, schema, validate
from .model import ModelShape
from .registry import FRAMEWORKS
from .run import Optimizer, Parallel, Probe, Run, check_layout

#: Numbers in Hugging Face's rope_scaling, for the kinds that a framework here knows.
SCALING_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class Comparison:
    """Runs that are compared, by name, resolved."""

    name: str
    model: ModelShape
    world: str
    runs: Mapping[str, Run]


def load_model(name_or_path: str, config_dir: str | Path, *, file: str | Path | None = None) -> ModelShape:
    """The model `models/<name>.yaml` of a config folder, or the one in a file given by path (it ends in .yaml or .yml).

    A name is looked up in `config_dir`, then in ./config, then in the checkout's config/: a run file may be anywhere.

    Raises:
        ConfigError: no such model, an unknown key, a size that cannot be.
    """
    path = Path(name_or_path)
    if path.suffix not in {".yaml", ".yml"}:
        check_name(name_or_path, file=file, key="model")
        folders = _model_folders(config_dir)
        path = next((p for folder in folders if (p := folder / f"{name_or_path}.yaml").is_file()), Path())
        if not path.name:
            known = "; ".join(
                f"{', '.join(sorted(p.stem for p in folder.glob('*.yaml'))) or 'none'} in {folder}"
                for folder in folders
                if folder.is_dir() or folder == folders[0]
            )
            raise ConfigError(f"there is no model {name_or_path!r}; known: {known}", file=file, key="model")
    return model_shape(check_name(path.stem, file=path), read_yaml(path), path)


def _model_folders(config_dir: str | Path) -> list[Path]:
    """Where a model's name is looked up, first to last, each folder once."""
    checkout = Path(__file__).resolve().parents[3]
    folders = {(Path(c) / "models").resolve(): Path(c) / "models" for c in (config_dir, "config", checkout / "config")}
    return list(folders.values())


def model_shape(name: str, data: Mapping[str, Any], path: str | Path) -> ModelShape:
    """A model from the mapping that a model file holds; `path` is where it came from, for errors.

    Raises:
        ConfigError: an unknown key, a size that cannot be.
    """
    validate(data, "model", file=path)
    data = fill_defaults(data, schema("model"))
    data["num_query_groups"] = data["num_query_groups"] or data["num_attention_heads"]
    data["max_position_embeddings"] = data["max_position_embeddings"] or data["seq_length"]
    if not data["head_dim"]:
        if data["hidden_size"] % data["num_attention_heads"]:
            raise ConfigError(
                f"{data['num_attention_heads']} heads do not divide hidden_size {data['hidden_size']}; give head_dim",
                file=path,
                key="num_attention_heads",
            )
        data["head_dim"] = data["hidden_size"] // data["num_attention_heads"]
    if data["position_embedding"] == "rope" and data["head_dim"] % 2:
        raise ConfigError(f"{data['head_dim']} is odd; rotary positions turn pairs", file=path, key="head_dim")
    data["rope_scaling"] = _rope_scaling(data["rope_scaling"], path)
    return ModelShape(name=name, **data)


def _rope_scaling(scaling: Mapping[str, Any] | None, path: str | Path) -> Mapping[str, Any] | None:
    """Hugging Face's mapping; none for its kind `default`, which scales nothing. Which kinds a framework knows, its
    own module says.
    """
    if not scaling:
        return None
    kind = scaling.get("rope_type", scaling.get("type"))
    if not isinstance(kind, str):
        raise ConfigError("needs rope_type, the name of a kind of scaling", file=path, key="rope_scaling")
    if kind == "default":
        return None
    for key in SCALING_NUMBERS:
        value = scaling.get(key)
        if key in scaling and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12):
            raise ConfigError(f"{key} is {str(value)[:60]!r}, not a number above 0", file=path, key="rope_scaling")
    if kind == "linear" and "factor" not in scaling:
        raise ConfigError("linear scaling needs factor, a number above 0", file=path, key="rope_scaling")
    return scaling


def load_run(
    path: str | Path,
    *,
    config_dir: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Run:
    """A run file, resolved.

    Args:
        path: the run file; its stem names the run.
        config_dir: where `models/` is; by default the folder above the run file's folder.
        overrides: keys that go before the file's (nested mappings are merged).
        defaults: `model`, `world`, `steps`, `seed` of a comparison. They go before the schema's defaults; `model` and
            `world` also before the run file's own.

    Raises:
        ConfigError: unknown key, wrong value, impossible layout; names file and key.
    """
    path = Path(path)
    name = check_name(path.stem, file=path)
    config_dir = Path(config_dir) if config_dir else Path(os.path.abspath(path)).parent.parent
    return resolve_run(name, merge(read_yaml(path), overrides or {}), path, config_dir, overrides, defaults)


def resolve_run(
    name: str,
    data: Mapping[str, Any],
    path: str | Path,
    config_dir: str | Path,
    overrides: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    model: ModelShape | None = None,
) -> Run:
    """A run from the mapping that a run file holds (`overrides` already merged into it); `path` is named in errors.

    Args:
        model: goes before any model by name, for runs that were not read from a run file.

    Raises:
        ConfigError: as `load_run`.
    """
    data = dict(data)
    defaults = dict(defaults or {})
    validate(data, "run", file=path)
    for key in ("model", "world"):
        if key in defaults and key not in (overrides or {}):
            data[key] = defaults[key]
    weight_is_given = "lifeline_weight" in (data.get("probe") or {})
    data = fill_defaults(data, schema("run"))
    framework = data["framework"]
    foreign = [f for f in FRAMEWORKS if f in data and f != framework]
    if foreign:
        raise ConfigError(f"settings of {foreign[0]} in a run of {framework}", file=path, key=foreign[0])
    settings = data.get(framework) or {}
    validate(settings, framework, file=path, prefix=framework)
    settings = _that_apply(fill_defaults(settings, schema(framework)), settings, schema(framework), data["parallel"])
    steps = data["steps"] or defaults.get("steps") or 4
    seed = data["seed"] if data["seed"] is not None else defaults.get("seed", 1234)
    model = model or load_model(data["model"], config_dir, file=path)
    probe = data["probe"]
    if model.num_layers == 1 and not weight_is_given:
        # The schema's default is in layer 1, the second one.
        probe["lifeline_weight"] = probe["lifeline_weight"].replace(".layers.1.", ".layers.0.")
    run = Run(
        name=name,
        framework=framework,
        model=model,
        world=data["world"],
        world_size=data["world_size"],
        parallel=_parallel(data["parallel"], framework, path),
        seq_length=data["seq_length"] or model.seq_length,
        micro_batch=data["micro_batch"],
        global_batch=data["global_batch"],
        steps=steps,
        seed=seed,
        optimizer=Optimizer(**data["optimizer"]),
        probe=Probe(tuple(sorted(probe["collective_steps"])) or (steps,), probe["lifeline_weight"]),
        settings=settings,
        source=str(path),
    )
    check_layout(run)
    return run


def _that_apply(
    filled: Mapping[str, Any], given: Mapping[str, Any], of: Mapping[str, Any], parallel: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings without defaults that nothing reads, so that a run is the same run as before those keys were known.

    A key of a schema with `x-needs` belongs to that degree of the layout, and says nothing where the degree is 1.
    """
    keys = of["properties"]
    return {k: v for k, v in filled.items() if k in given or parallel.get(keys.get(k, {}).get("x-needs"), 2) > 1}


def _parallel(data: Mapping[str, Any], framework: str, path: str | Path) -> Parallel:
    replicate, shard = data["data_parallel_replicate"], data["data_parallel_shard"]
    if framework == "torchtitan":
        if data["data_parallel"] is not None and data["data_parallel"] != replicate * shard:
            raise ConfigError(
                f"{data['data_parallel']} is not data_parallel_replicate {replicate} x data_parallel_shard {shard}",
                file=path,
                key="parallel.data_parallel",
            )
    elif replicate * shard != 1:
        key = "data_parallel_shard" if shard != 1 else "data_parallel_replicate"
        raise ConfigError(f"is torchtitan's; {framework} takes data_parallel", file=path, key=f"parallel.{key}")
    total = data["data_parallel"] or replicate * shard
    return Parallel(**{**data, "data_parallel": total})


def load_comparison(name_or_path: str | Path, config_dir: str | Path, *, world: str | None = None) -> Comparison:
    """A comparison with all its runs, resolved.

    Args:
        name_or_path: name of a file in `config/comparisons`, or a path that ends in .yaml.
        config_dir: the folder that holds `comparisons/`, `models/` and `runs/`.
        world: goes before the comparison's own world.

    Raises:
        ConfigError: names file and key.
    """
    path, data = _read_comparison(name_or_path, config_dir)
    if world:
        data["world"] = world
    model = load_model(data["model"], config_dir, file=path)
    runs = {}
    for run_name in data["runs"]:
        run_path = Path(config_dir) / "runs" / f"{check_name(run_name, file=path, key='runs')}.yaml"
        if not run_path.is_file():
            raise ConfigError(f"there is no file {run_path}", file=path, key=f"runs.{run_name}")
        runs[run_name] = _compared_run(run_path, path, data, config_dir, {})
    return Comparison(path.stem, model, data["world"], runs)


def load_compared_run(
    run_path: str | Path,
    comparison: str | Path,
    *,
    config_dir: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Run:
    """One run as a comparison runs it; `overrides` go before the comparison.

    Raises:
        ConfigError: as `load_run`, and that the comparison does not hold the run.
    """
    run_path = Path(run_path)
    config_dir = Path(config_dir) if config_dir else Path(os.path.abspath(run_path)).parent.parent
    path, data = _read_comparison(comparison, config_dir)
    if run_path.stem not in data["runs"]:
        raise ConfigError(f"holds no run {run_path.stem!r}; its runs: {', '.join(data['runs'])}", file=path, key="runs")
    return _compared_run(run_path, path, data, config_dir, overrides or {})


def _read_comparison(name_or_path: str | Path, config_dir: str | Path) -> tuple[Path, dict[str, Any]]:
    path = Path(name_or_path)
    if path.suffix not in {".yaml", ".yml"}:
        check_name(str(name_or_path), key="comparison")
        path = Path(config_dir) / "comparisons" / f"{name_or_path}.yaml"
    data = read_yaml(path)
    validate(data, "comparison", file=path)
    check_name(path.stem, file=path)
    return path, fill_defaults(data, schema("comparison"))


def _compared_run(
    run_path: Path, path: Path, data: Mapping[str, Any], config_dir: str | Path, overrides: Mapping[str, Any]
) -> Run:
    own = data["runs"][run_path.stem] or {}
    defaults = {k: data[k] for k in ("model", "world", "steps", "seed")}
    try:
        run = load_run(run_path, config_dir=config_dir, overrides=merge(own, overrides), defaults=defaults)
    except ConfigError as e:
        if str(e.file) != str(run_path) or holds(overrides, e.key):
            raise
        if holds(own, e.key):
            raise ConfigError(e.message, file=path, key=f"runs.{run_path.stem}.{e.key}") from e
        raise ConfigError(e.message, file=f"{run_path} (as {path} runs it)", key=e.key) from e
    # A framework's own limits are met later; that error too must name the comparison: the run file may be right.
    return replace(run, source=f"{run_path} (as {path} runs it)")


def holds(overrides: Mapping[str, Any], key: str | None) -> bool:
    """Whether nested mappings hold the dotted `key` of an error."""
    held: Any = overrides
    for part in re.split(r"\.|\[", key or ""):
        if isinstance(held, list) and part.endswith("]"):
            return True
        if not isinstance(held, Mapping) or part not in held:
            return False
        held = held[part]
    return True


def override(assignments: Iterable[str], *, option: str = "--set") -> dict[str, Any]:
    """`["parallel.tensor_parallel=4", …]` as nested mappings, values read as YAML.

    Raises:
        ConfigError: no `=`, an empty part of a key, a value that is not YAML; names the option.
    """
    out: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        parts = key.split(".")
        if not equals or not all(parts):
            raise ConfigError(f"{assignment[:120]!r} is not key=value with a dotted key", key=option)
        nested: Any = parse_yaml(value, file=f"{option} {key}")
        for part in reversed(parts):
            nested = {part: nested}
        out = merge(out, nested)
    return out


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over` on top; mappings are merged key by key, anything else is replaced."""
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out
