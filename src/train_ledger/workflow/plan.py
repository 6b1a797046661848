"""What the workflow has to make, resolved and refused before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train_ledger.spec.config import Comparison, load_comparison
from train_ledger.spec.errors import ConfigError
from train_ledger.spec.io import fill_defaults, read_yaml, schema, validate
from train_ledger.spec.run import Run


@dataclass(frozen=True)
class Plan:
    """The comparison that is measured, the one that is only predicted (or None), and every run of both."""

    comparison: Comparison
    paper: Comparison | None
    launch_timeout_s: int
    gpus_per_node: int

    @property
    def runs(self) -> dict[tuple[str, str], Run]:
        """All runs by (comparison, run)."""
        known = [self.comparison] + ([self.paper] if self.paper else [])
        return {(c.name, name): run for c in known for name, run in c.runs.items()}

    def ranks_per_node(self, run: Run) -> int:
        """Ranks of a run on each host, one a GPU."""
        return min(run.world_size, self.gpus_per_node)

    def nodes(self, run: Run) -> int:
        """Hosts that a launch on a cluster takes: one rank a GPU, hosts filled up."""
        return -(-run.world_size // self.gpus_per_node)


def load_plan(config: Mapping[str, Any], config_dir: str | Path = "config") -> Plan:
    """Reads and checks all that the workflow would run.

    Args:
        config: what `config/config.yaml` and `--config` say.
        config_dir: the folder of comparisons, models and runs.

    Raises:
        ConfigError: an unknown key, a wrong value, a layout that cannot be or that the framework refuses.
    """
    from train_ledger.predict import framework

    file = Path(config_dir) / "config.yaml"
    worlds = [world for world in schema("config")["properties"]["world"]["enum"] if world]
    if config.get("world") not in (None, *worlds):  # JSON Schema's message would show null as a world
        known = ", ".join(worlds)
        raise ConfigError(f"{config['world']!r} is none of {known}", file=_said_in(config, "world", file), key="world")
    try:
        validate(dict(config), "config", file=file)
    except ConfigError as e:
        raise ConfigError(e.message, file=_said_in(config, e.key or "", file), key=e.key) from None
    filled = fill_defaults(config, schema("config"))
    comparison = load_comparison(filled["comparison"], config_dir, world=filled["world"])
    shown = filled["paper_comparison"]
    paper = load_comparison(shown, config_dir) if shown and shown != comparison.name else None
    plan = Plan(comparison, paper, filled["launch_timeout_s"], filled["gpus_per_node"])
    for (of, _), run in plan.runs.items():
        framework(run).check(run)
        if of == comparison.name and run.world_size > plan.gpus_per_node and run.world_size % plan.gpus_per_node:
            raise ConfigError(
                f"{plan.gpus_per_node} does not divide world_size {run.world_size} of {run.name}",
                file=_said_in(config, "gpus_per_node", file),
                key="gpus_per_node",
            )
    return plan


def _said_in(config: Mapping[str, Any], key: str, file: Path) -> Path | str:
    """Where a value of the workflow's configuration comes from: the file, unless that says otherwise."""
    try:
        said = read_yaml(file)
    except ConfigError:
        return file
    return "command line" if key in config and (key not in said or said[key] != config[key]) else file
