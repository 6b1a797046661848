"""`train-ledger reference`: the comparison's problem in one process, in several orders of sums, to measure rounding."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from train_ledger.parity.problem import Problem

TYPES = ("float32", "bfloat16")
HELP = "train the plain single-process reference of a comparison, in fp32 and bf16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("comparison", metavar="COMPARISON", help="name of a file in config/comparisons, or its path")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder for reference.json and weights")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="canonical weights; made on the fly if not given")
    parser.add_argument("--config", type=Path, default=Path("config"), metavar="DIR", help="folder of comparisons/")
    parser.add_argument(
        "--types", nargs="+", default=list(TYPES), choices=TYPES, help="types it computes in (default both)"
    )
    parser.add_argument("--no-weights", action="store_true", help="losses and gradient norms only")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where it computes")


def main(args: argparse.Namespace) -> int:
    """Trains and writes; progress goes to stderr."""
    from train_ledger.parity.problem import select
    from train_ledger.spec.config import load_comparison

    comparison = load_comparison(args.comparison, args.config)
    make(
        select(comparison.runs).problem,
        args.weights,
        args.out,
        device=args.device,
        with_weights=not args.no_weights,
        types=args.types,
    )
    return 0


def make(
    problem: Problem,
    weights: Path | None,
    out_dir: Path,
    *,
    device: str = "cpu",
    with_weights: bool = True,
    types: Sequence[str] = TYPES,
) -> dict[str, Any]:
    """Train every reference run of a problem and write `reference.json`, last, beside the weights of the plain ones.

    Args:
        weights: the canonical checkpoint, or None to generate the same values.
        types: types of the compute. Without float32 nothing is compared with it.
        with_weights: keep and compare the trained weights too (24 bytes a parameter on disk and in memory).
        device: cpu or cuda. On cpu with one thread, so that the order of sums does not depend on the machine.

    Raises:
        DataError: weights that do not fit the model. LaunchError: a loss that is not finite.
    """
    import numpy as np
    import torch

    from train_ledger.launch.cuda import cuda_device
    from train_ledger.launch.reference import Order, train
    from train_ledger.launch.weights import generate, open_weights, write_weights
    from train_ledger.parity.difference import difference
    from train_ledger.spec.errors import DataError
    from train_ledger.spec.io import write_json

    if device == "cpu":
        torch.set_num_threads(1)
    else:
        cuda_device(0)
    read = open_weights(weights, problem.model) if weights else generate(problem.model, problem.seed)
    # Where nothing can be written, that is known before anything trains.
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out_dir).close()
    except OSError as e:
        raise DataError(f"cannot be written: {e.strerror or e}", file=out_dir) from e
    plan = [
        ("fp32", torch.float32, Order()),
        ("bf16", torch.bfloat16, Order()),
        ("bf16-2-parts", torch.bfloat16, Order(parts=2, backwards=True, kernels=True)),
        ("bf16-3-parts", torch.bfloat16, Order(micro_batch=2, parts=3)),
        ("bf16-4-parts", torch.bfloat16, Order(micro_batch=2, parts=4, backwards=True, kernels=True)),
        ("fp32-2-parts", torch.float32, Order(micro_batch=2, parts=2, backwards=True, kernels=True)),
        ("fp32-3-parts", torch.float32, Order(parts=3)),
    ]
    plan = [entry for entry in plan if str(entry[1]).removeprefix("torch.") in types]
    kept: dict[str, dict[str, torch.Tensor]] = {}
    runs: list[dict[str, Any]] = []
    for name, dtype, order in plan:
        done = train(
            problem.model,
            read,
            seed=problem.seed,
            seq_length=problem.seq_length,
            global_batch=problem.global_batch,
            steps=problem.steps,
            optimizer=problem.optimizer,
            dtype=dtype,
            order=order,
            device=device,
            progress=_teller(name, problem.steps),
        )
        plain = with_weights and name in ("bf16", "fp32")
        if plain:  # the others are compared and dropped
            kept[name] = done.weights
            write_weights(out_dir / f"{name}.safetensors", done.weights)
        first = next(iter(kept), "")  # fp32 if it is trained
        compared: dict[str, dict[str, list[float]]] = {}
        for base in [b for b in kept if b != name and (dtype == torch.bfloat16 or b == "fp32")]:
            compared[base] = {}
            for tensor, trained in done.weights.items():
                four = (trained, kept[base][tensor], read(tensor), kept[first][tensor])
                d = difference(*(t.numpy().reshape(-1) for t in four))
                compared[base][tensor] = [d.update, d.along, d.max_abs]
        runs.append(
            {
                "name": name,
                "dtype": str(dtype).removeprefix("torch."),
                "order": asdict(order),
                "losses": done.losses,
                "grad_norms": done.grad_norms,
                "weights": f"{name}.safetensors" if plain else None,
                "compared_to": compared,
            }
        )
    record = {
        "schema": "train-ledger/reference/1",
        "problem": problem.to_dict(),
        "problem_sha256": problem.sha256(),
        "device": device,
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "runs": runs,
    }
    write_json(out_dir / "reference.json", record)
    return record


def _teller(name: str, steps: int) -> Callable[[int, float], None]:
    """Says how far a training is: after its last step, and before that every ten seconds."""
    told = time.monotonic()

    def tell(step: int, loss: float) -> None:
        nonlocal told
        if step == steps or time.monotonic() > told + 10:
            told = time.monotonic()
            print(f"reference {name}: step {step} of {steps}, loss {loss:.4f}", file=sys.stderr, flush=True)

    return tell
