"""A torchtitan run for tests that lay it out themselves: the laptop comparison's shape on one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from train_ledger.spec.config import load_comparison
from train_ledger.spec.io import fill_defaults, schema
from train_ledger.spec.run import Parallel, Run

CONFIG = Path(__file__).parents[1] / "config"


def on_one_rank(num_layers: int, settings: dict[str, Any] | None = None, **fields: Any) -> Run:
    """Three steps of micro-batches of one sequence; `fields` of the run and `settings` of torchtitan go before.

    Settings are filled in: a run without pipeline stages has no keys of theirs.
    """
    run = load_comparison("laptop", CONFIG).runs["torchtitan-fsdp4-tp2-matched"]
    whole = fill_defaults(run.settings, schema("torchtitan")) | (settings or {})
    model = replace(run.model, num_layers=num_layers, tie_embeddings=False)
    fields = {"world_size": 1, "micro_batch": 1, "steps": 3, "parallel": Parallel(), **fields}
    return replace(run, model=model, settings=whole, **fields)
