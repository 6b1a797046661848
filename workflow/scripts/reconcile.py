"""Joins predictions with measurements; what differs is written down here, and fails in the rule `verdict`.

By hand: python workflow/scripts/reconcile.py RESULTS_OF_COMPARISON OUT_DIR
"""

from pathlib import Path

import stage

from train_ledger.reconcile.compare import difference_lines, reconcile_files, summary_line, write
from train_ledger.spec.io import write_text


def main(predict_files: list[str], probe_files: list[str], out_dir: str | Path) -> None:
    """Writes the tables, `runs.json`, and `differences.txt`: the verdict, then a line a difference."""
    result = reconcile_files(predict_files, probe_files)
    write(result, out_dir)
    write_text(Path(out_dir) / "differences.txt", "\n".join([summary_line(result), *difference_lines(result)]) + "\n")


def by_hand(results: str, out_dir: str) -> None:
    """All runs of a comparison's results folder."""
    tables = sorted(Path(results).glob("probe/*.parquet"))
    main([str(Path(results) / "predict" / f"{t.stem}.json") for t in tables], [str(t) for t in tables], out_dir)


if __name__ == "__main__":
    job = globals().get("snakemake")
    stage.run(
        main if job else by_hand, job, lambda j: (list(j.input.predict), list(j.input.probe), Path(j.output[0]).parent)
    )
