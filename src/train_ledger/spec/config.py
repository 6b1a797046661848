"""From the files under config/ to resolved runs. What goes before what: options, the comparison's entry, the run file, defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .io import check_name, fill_defaults, read_yaml, schema, validate
from .model import ModelShape
from .registry import FRAMEWORKS
from .run import Optimizer, Parallel, Probe, Run, check_layout


@dataclass(frozen=True)
class Comparison:
    """Runs that are compared, by name, resolved."""

    name: str
    model: ModelShape
    world: str
    runs: Mapping[str, Run]


def load_model(name_or_path: str, config_dir: str | Path, *, file: str | Path | None = None) -> ModelShape:
    """The model `config/models/<name>.yaml`, or the one in a file given by path (it ends in .yaml or .yml).

    Raises:
        ConfigError: no such model, an unknown key, a size that cannot be.
    """
    path = Path(name_or_path)
    if path.suffix not in {".yaml", ".yml"}:
        check_name(name_or_path, file=file, key="model")
        path = Path(config_dir) / "models" / f"{name_or_path}.yaml"
        if not path.is_file():
            known = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml"))) or "none"
            raise ConfigError(f"there is no model {name_or_path!r} in {path.parent}; known: {known}", file=file, key="model")
    data = read_yaml(path)
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
    return ModelShape(name=path.stem, **data)


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
    data = merge(read_yaml(path), overrides or {})
    defaults = dict(defaults or {})
    config_dir = Path(config_dir) if config_dir else path.resolve().parent.parent
    validate(data, "run", file=path)
    for key in ("model", "world"):
        if key in defaults and key not in (overrides or {}):
            data[key] = defaults[key]
    data = fill_defaults(data, schema("run"))
    framework = data["framework"]
    foreign = [f for f in FRAMEWORKS if f in data and f != framework]
    if foreign:
        raise ConfigError(f"settings of {foreign[0]} in a run of {framework}", file=path, key=foreign[0])
    settings = data.get(framework) or {}
    validate(settings, framework, file=path, prefix=framework)
    settings = fill_defaults(settings, schema(framework))
    model = load_model(data["model"], config_dir, file=path)
    steps = data["steps"] or defaults.get("steps") or 4
    seed = data["seed"] if data["seed"] is not None else defaults.get("seed", 1234)
    probe = data["probe"]
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


def _parallel(data: Mapping[str, Any], framework: str, path: Path) -> Parallel:
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
    path = Path(name_or_path)
    if path.suffix not in {".yaml", ".yml"}:
        check_name(str(name_or_path), key="comparison")
        path = Path(config_dir) / "comparisons" / f"{name_or_path}.yaml"
    data = read_yaml(path)
    validate(data, "comparison", file=path)
    data = fill_defaults(data, schema("comparison"))
    defaults = {k: data[k] for k in ("model", "world", "steps", "seed")}
    if world:
        defaults["world"] = world
    runs = {}
    for run_name, overrides in data["runs"].items():
        run_path = Path(config_dir) / "runs" / f"{check_name(run_name, file=path, key='runs')}.yaml"
        if not run_path.is_file():
            raise ConfigError(f"there is no file {run_path}", file=path, key=f"runs.{run_name}")
        runs[run_name] = load_run(run_path, config_dir=config_dir, overrides=overrides, defaults=defaults)
    model = load_model(data["model"], config_dir, file=path)
    return Comparison(check_name(path.stem, file=path), model, defaults["world"], runs)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over` on top; mappings are merged key by key, anything else is replaced."""
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out
