"""Trains the plain reference of a comparison.

By hand: python workflow/scripts/reference.py "$(cat problem.json)" WEIGHTS.safetensors OUT_DIR [cuda]
"""

import json
from pathlib import Path

import stage

from train_ledger.commands.reference import make
from train_ledger.parity.problem import Problem


def main(problem_json: str, weights: str, out_dir: str | Path, device: str = "cpu") -> None:
    """`problem_json` is what the runs train (`Problem.to_dict`) as JSON text."""
    make(Problem.from_dict(json.loads(problem_json)), Path(weights), Path(out_dir), device=device)


if __name__ == "__main__":
    stage.run(
        main,
        globals().get("snakemake"),
        lambda job: (job.params.problem, job.input.weights, Path(job.output[0]).parent, job.params.device),
    )
