"""Fails when the reconciliation found a difference.

By hand: python workflow/scripts/verdict.py DIFFERENCES.txt OUT.txt
"""

import sys
from pathlib import Path

import stage

from train_ledger.spec.errors import LedgerError
from train_ledger.spec.io import write_text


def main(differences: str, out: str) -> None:
    """Prints the verdict, and each difference; writes the verdict only when there is none.

    Raises:
        LedgerError: something is not explained.
    """
    verdict, *lines = Path(differences).read_text(encoding="utf-8").splitlines()
    for line in lines:
        print(f"differs: {line}", file=sys.stderr)
    if lines:
        raise LedgerError(f"not reconciled: {verdict}; the report shows what differs")
    print(f"reconciled: {verdict}", file=sys.stderr)
    write_text(out, verdict + "\n")


if __name__ == "__main__":
    stage.run(main, globals().get("snakemake"), lambda job: (job.input.differences, job.output[0]))
