"""Unpacks what is kept under reference/ into results folders and reconciles it with today's prediction.

By hand: python workflow/scripts/evidence.py results/evidence
"""

from pathlib import Path

import stage

from train_ledger.commands.evidence import check
from train_ledger.spec.errors import DataError
from train_ledger.spec.io import write_text


def main(out: str | Path, root: str | Path = "reference") -> None:
    """A results folder for each comparison of each set, and the verdicts. A difference fails."""
    out = Path(out)
    lines, differs = check(root, out)
    if differs:
        raise DataError(f"{len(differs)} differences from today's prediction; the first: {differs[0]}", file=root)
    write_text(out / "verdict.txt", "\n".join(lines) + "\n")


if __name__ == "__main__":
    stage.run(
        main,
        globals().get("snakemake"),
        lambda job: (Path(job.output[0]).parent,),
        lambda job: (job.output[0], [str(Path(job.output[0]).parent)]),
    )
