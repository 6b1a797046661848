"""Is what the workflow shows still what it wrote? Figures, tables and the page can also be made by hand, over them.

Snakemake sees of a file that it became newer, which makes again only what comes after it, and of a folder nothing. So
the rules that write them leave a record of every file's hash beside Snakemake's own records. Before the first job
`resume.begin` sets aside what is no longer as recorded, and the rule makes it anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from train_ledger.spec.errors import DataError
from train_ledger.spec.io import write_json
from train_ledger.spec.tensorfile import file_sha256

RECORDS = Path(".snakemake/train-ledger")


def write(output: str | Path, parts: Iterable[str | Path]) -> None:
    """Records the hashes of all files of an output.

    Args:
        output: the rule's output that is set aside when one of them changes.
        parts: files and folders that the rule wrote.

    Raises:
        DataError: a file cannot be read. OSError: the record cannot be written.
    """
    files = sorted(file for part in map(Path, parts) for file in ([part] if part.is_file() else part.rglob("*")))
    kept = [f for f in files if f.is_file() and "unusable" not in f.parts and f.name != ".snakemake_timestamp"]
    write_json(_record(output), {"files": {str(f): file_sha256(f) for f in kept}})


def broken(output: str | Path) -> list[str]:
    """Files that are gone or changed since `write`. None without a record, and none where the output itself is gone:
    Snakemake makes that anyway."""
    try:
        files = json.loads(_record(output).read_text(encoding="utf-8"))["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [file for file, sha256 in files if _sha256(Path(file)) != sha256] if Path(output).exists() else []


def _sha256(file: Path) -> str:
    try:
        return file_sha256(file)
    except DataError:
        return ""


def _record(output: str | Path) -> Path:
    return RECORDS / f"{'-'.join(Path(output).parts)}.json"
