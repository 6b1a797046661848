"""Fails when the reconciliation or the parity stage found a difference.

By hand: python workflow/scripts/verdict.py OUT.txt DIFFERENCES.txt ...
"""

import sys
from pathlib import Path

import stage

from train_ledger.spec.errors import DataError, LedgerError
from train_ledger.spec.io import write_text


def main(out: str, *differences: str) -> None:
    """Prints each stage's verdict, and each difference; writes the verdicts only when there is no difference.

    Args:
        differences: files of a verdict and a line a difference, from the stages `reconcile` and `parity`.

    Raises:
        DataError: a file holds no verdict.
        LedgerError: something is not explained.
    """
    verdicts, wrong = [], []
    for file in differences:
        verdict, *lines = Path(file).read_text(encoding="utf-8").splitlines() or [""]
        if not verdict:
            raise DataError("holds no verdict; it may be truncated", file=file)
        verdicts.append(verdict)
        wrong += [verdict] if lines else []
        for line in lines:
            print(f"differs: {line}", file=sys.stderr)
    if wrong:
        raise LedgerError(f"not reconciled: {'; '.join(wrong)}; the report shows what differs")
    for verdict in verdicts:
        print(verdict, file=sys.stderr)
    write_text(out, "\n".join(verdicts) + "\n")


if __name__ == "__main__":
    stage.run(main, globals().get("snakemake"), lambda job: (job.output[0], *job.input.differences))
