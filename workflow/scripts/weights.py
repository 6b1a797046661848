"""Makes the canonical initial weights.

By hand: python workflow/scripts/weights.py "$(cat model.json)" SEED OUT.safetensors
"""

import json

import stage

from train_ledger.launch.weights import write_initial
from train_ledger.spec.model import ModelShape


def main(model_json: str, seed: str | int, out: str) -> None:
    """`model_json` is a resolved model (`ModelShape.to_dict`) as JSON text."""
    write_initial(ModelShape(**json.loads(model_json)), int(seed), out)


if __name__ == "__main__":
    stage.run(main, globals().get("snakemake"), lambda job: (job.params.model, job.wildcards.seed, job.output.weights))
