"""A user's own settings for a cluster: `profiles/slurm/site.yaml`, which git ignores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from train_ledger.spec.io import fill_defaults, read_yaml, schema, validate


@dataclass(frozen=True)
class Site:
    """What a launch asks Slurm for, besides GPUs and hosts."""

    account: str | None
    partition: str | None
    qos: str | None
    constraint: str | None
    reservation: str | None
    gpu: str
    cpus_per_task: int
    mem_mb: int
    runtime_min: int | None

    @property
    def resources(self) -> dict[str, str]:
        """Snakemake resources for what is set, by the names of its Slurm executor."""
        named = {
            "slurm_account": self.account,
            "slurm_partition": self.partition,
            "qos": self.qos,
            "constraint": self.constraint,
        }
        return {key: value for key, value in named.items() if value is not None}


def load_site(path: str | Path) -> Site:
    """The site file, or what holds without one.

    Raises:
        ConfigError: an unknown key or a wrong value.
    """
    data = read_yaml(path) if Path(path).exists() else {}
    validate(data, "site", file=path)
    return Site(**fill_defaults(data, schema("site")))
