"""Compares what the runs of a comparison trained; what differs is written down here, and fails in the rule `verdict`.

By hand: python workflow/scripts/parity.py "$(cat resolved-runs.json)" LAUNCH_DIR REFERENCE.json WEIGHTS OUT_DIR
"""

import json
from pathlib import Path

import stage

from train_ledger.commands.parity import make, verdict_line
from train_ledger.spec.io import write_text
from train_ledger.spec.run import Run


def main(runs_json: str, launch_dir: str | Path, reference: str, weights: str, out_dir: str | Path) -> None:
    """Writes the tables, `parity.json`, and `differences.txt`: the verdict, then a line a difference."""
    runs = {run["name"]: Run.from_dict(run) for run in json.loads(runs_json)}
    dirs = {name: Path(launch_dir) / name for name in runs}
    summary = make(runs, dirs, Path(reference), Path(weights), Path(out_dir))
    write_text(Path(out_dir) / "differences.txt", "\n".join([verdict_line(summary), *summary["failures"]]) + "\n")


if __name__ == "__main__":
    stage.run(
        main,
        globals().get("snakemake"),
        lambda job: (
            job.params.runs,
            Path(job.input.launches[0]).parents[1],
            job.input.reference,
            job.input.weights,
            Path(job.output[0]).parent,
        ),
    )
