"""What a run is called in a figure, and the config that it was made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .data import Results, framework_title
from .text import shorten


def panel_titles(runs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Title of each run's panel, from (framework, run): the framework, and where it occurs twice what tells runs apart.

    That is the name of the run without the framework's at its front.
    """
    frameworks = [framework for framework, _ in dict.fromkeys(runs)]
    out = {}
    for framework, run in runs:
        out[run] = framework_title(framework)
        if frameworks.count(framework) > 1:
            out[run] += f" {shorten(run.removeprefix(framework).lstrip('-_ ') or run, 24)}"
    return out


def config_of(results: Results, run: str) -> Mapping[str, Any]:
    """The resolved config of a run, empty where no file carries it."""
    for r in results.runs:
        if r["run"] == run and r.get("config"):
            config: Mapping[str, Any] = r["config"]
            return config
    found: Mapping[str, Any] = results.predictions.get(run, {}).get("config", {})
    return found
