"""Reads a prediction, and believes none of it until it is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from train_ledger.spec import ledger
from train_ledger.spec.dtypes import ELEMENT_BYTES
from train_ledger.spec.errors import DataError
from train_ledger.spec.io import read_json


def read_prediction(file: str | Path) -> dict[str, Any]:
    """A predict file whose sums hold.

    Raises:
        DataError: missing, truncated, of another schema, a rank that is there twice, or bytes that are not elements
            times their size.
    """
    data = read_json(file, ledger.SCHEMA, "predict")
    seen: set[int] = set()
    for i, rank in enumerate(data["ranks"]):
        if rank["rank"] in seen:
            raise DataError(f"rank {rank['rank']} is there twice", file=file, key=f"ranks[{i}].rank")
        seen.add(rank["rank"])
        for j, c in enumerate(rank["containers"]):
            at = f"ranks[{i}].containers[{j}]"
            if c["dtype"] not in ELEMENT_BYTES:
                raise DataError(f"{c['dtype']!r} is not a known element type", file=file, key=f"{at}.dtype")
            if c["bytes"] != (c["numel"] + c["pad_numel"]) * ELEMENT_BYTES[c["dtype"]]:
                raise DataError(f"{c['bytes']} is not elements times their size", file=file, key=f"{at}.bytes")
        if rank["resident_bytes"] != sum(c["bytes"] for c in rank["containers"]):
            raise DataError("is not the sum of the containers", file=file, key=f"ranks[{i}].resident_bytes")
    return data
