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


def batch_titles(results: Results, runs: Sequence[str]) -> dict[str, str]:
    """Short titles for narrow panels: the framework, and where it occurs twice its global batch.

    Where that does not tell its runs apart, as `panel_titles`.
    """
    out = panel_titles([(results.framework(run), run) for run in runs])
    for framework in {results.framework(run) for run in runs}:
        own = [run for run in runs if results.framework(run) == framework]
        batch = [config_of(results, run).get("global_batch") for run in own]
        if len(own) > 1 and all(batch) and len(set(batch)) == len(own):
            out |= {run: f"{framework_title(framework)}, batch {b}" for run, b in zip(own, batch, strict=True)}
    return out


def config_of(results: Results, run: str) -> Mapping[str, Any]:
    """The resolved config of a run, empty where no file carries it."""
    for r in results.runs:
        if r["run"] == run and r.get("config"):
            config: Mapping[str, Any] = r["config"]
            return config
    found: Mapping[str, Any] = results.predictions.get(run, {}).get("config", {})
    return found
