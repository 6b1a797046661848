"""Predicts one run. By hand: python workflow/scripts/predict.py "$(cat resolved-run.json)" OUT.json"""

import json

import stage

from train_ledger.predict import predict
from train_ledger.spec.io import write_json
from train_ledger.spec.run import Run


def main(run_json: str, out: str) -> None:
    """`run_json` is a resolved run (`Run.to_dict`) as JSON text."""
    write_json(out, predict(Run.from_dict(json.loads(run_json))).to_dict())


if __name__ == "__main__":
    stage.run(main, globals().get("snakemake"), lambda job: (job.params.run, job.output[0]))
