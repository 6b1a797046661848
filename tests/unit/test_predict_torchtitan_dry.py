"""What torchtitan kept and called without memory (reference/dry-torchtitan), against today's prediction."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from train_ledger.predict import predict
from train_ledger.predict.distinct import rank_classes
from train_ledger.reconcile.core import reconcile_rank
from train_ledger.reconcile.layout import reconcile_layout
from train_ledger.reconcile.rows import CLEAN
from train_ledger.spec.io import validate
from train_ledger.spec.run import Run

KEPT = Path(__file__).parents[2] / "reference" / "dry-torchtitan"
FILES = sorted(KEPT.glob("*/rank*.json.gz"))


def resolved(folder: Path) -> Run:
    """The run of a folder."""
    return Run.from_dict(json.loads((folder / "resolved.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}-{f.name.split('.')[0]}")
def test_exact(file: Path) -> None:
    """Every container and call of a rank."""
    run = resolved(file.parent)
    measured = json.loads(gzip.decompress(file.read_bytes()))
    validate(measured, "rank", file=file)
    prediction = predict(run, [measured["rank"]]).to_dict()
    rows: list[Any] = [row for part in reconcile_rank(prediction, measured) for row in part]
    rows += reconcile_layout(prediction, measured)
    assert [row for row in rows if row.verdict not in CLEAN] == []
    assert {"param", "grad", "exp_avg", "exp_avg_sq", "step", "rope_cache"} <= {
        getattr(r, "container", "") for r in rows
    }
    assert {"all_gather", "reduce_scatter", "all_reduce"} <= {getattr(r, "op", "") for r in rows}


def test_every_kind_of_rank_is_there() -> None:
    """A folder that lost a file would still be exact."""
    folders = {f.parent for f in FILES}
    assert len(folders) == 3
    for folder in folders:
        kept = {int(f.name.split(".")[0][4:]) for f in FILES if f.parent == folder}
        assert all(kept & set(ranks) for ranks in rank_classes(resolved(folder)))
