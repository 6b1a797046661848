"""Checks what the ranks of a launch wrote and keeps it as one tidy table.

By hand: python workflow/scripts/probe.py LAUNCH_DIR OUT.parquet
"""

from pathlib import Path

import stage

from train_ledger.reconcile.tidy import write_tidy
from train_ledger.spec.launched import read_launch


def main(launch_dir: str | Path, out: str) -> None:
    """Every rank file must be whole, of this run, and the one that run.json hashed."""
    write_tidy(read_launch(launch_dir), out)


if __name__ == "__main__":
    stage.run(main, globals().get("snakemake"), lambda job: (Path(job.input.launch).parent, job.output[0]))
