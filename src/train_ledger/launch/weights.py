"""The canonical initial weights: one set for a model and a seed, Hugging Face Llama names, fp32, made by one rule.

Every tensor has a generator of its own, keyed by (seed, name). So a file and `generate` give the same values, tensor by
tensor, in any order; at a size where a file is a burden, ranks generate what they load.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from train_ledger.spec.errors import DataError
from train_ledger.spec.io import read_json, write_json
from train_ledger.spec.model import CanonicalTensor, ModelShape, canonical_tensors
from train_ledger.spec.tensorfile import Entry, TensorFile, file_sha256, write

SCHEMA = "train-ledger/weights/1"

Read = Callable[[str], torch.Tensor]


def generate(model: ModelShape, seed: int) -> Read:
    """A reader that makes each tensor when it is asked for: `read(name)`, fp32, on CPU.

    Raises (the reader):
        DataError: the model has no tensor of that name.
    """
    shapes = {t.name: t for t in canonical_tensors(model)}

    def read(name: str) -> torch.Tensor:
        if name not in shapes:
            raise DataError(f"is no weight of model {model.name}", key=name)
        return torch.from_numpy(initial_values(model, seed, shapes[name]))

    return read


def initial_values(model: ModelShape, seed: int, tensor: CanonicalTensor) -> np.ndarray:
    """Initial values of one tensor, fp32.

    Matrices are normal with standard deviation 1/sqrt(columns) (0.022 at width 2048, the usual 0.02), so that attention
    is far from uniform at any width and a fault in it moves the first loss. The two projections that write to the
    residual stream are smaller by sqrt(2 x layers) (GPT-2; Megatron Core `utils.py:scaled_init_method_normal`);
    embeddings have deviation 1 unless they are the output head too. Norms lie around 1 and biases around 0, but not at
    it: a norm that was never loaded, or loaded in another's place, would otherwise not be seen.
    """
    key = hashlib.sha256(f"{seed}/{tensor.name}".encode()).digest()
    values = np.random.default_rng(int.from_bytes(key, "little")).standard_normal(tensor.shape, dtype=np.float32)
    module, kind = tensor.name.rsplit(".", 1)
    if len(tensor.shape) == 1:
        values *= np.float32(0.1)
        if kind == "weight":
            values += np.float32(1)
        return values
    deviation = tensor.shape[1] ** -0.5
    if module.endswith(("o_proj", "down_proj")):
        deviation /= (2 * model.num_layers) ** 0.5
    elif module.endswith("embed_positions") or (module.endswith("embed_tokens") and not model.tie_embeddings):
        deviation = 1.0
    values *= np.float32(deviation)
    return values


def write_initial(model: ModelShape, seed: int, path: str | Path) -> dict[str, Any]:
    """Write the canonical checkpoint, one tensor in memory at a time, and `<path>.json` beside it with its hash.

    Returns:
        The record: schema, model, seed, sha256 of the file, numpy's version (whose generator makes the values).
    """
    tensors = canonical_tensors(model)

    def entry(tensor: CanonicalTensor) -> Entry:
        return Entry(
            tensor.name, "F32", tensor.shape, lambda: memoryview(initial_values(model, seed, tensor)).cast("B")
        )

    digest = write(path, map(entry, tensors), {"format": "pt", "model": model.name, "seed": str(seed)})
    record = _record(model, seed, digest)
    write_json(f"{path}.json", record)
    return record


def write_record(model: ModelShape, seed: int, path: str | Path) -> Path:
    """Write `<path>.json` only: `open_weights` of it makes the values instead of reading them. Returns its path."""
    file = Path(f"{path}.json")
    write_json(file, _record(model, seed, None))
    return file


def _record(model: ModelShape, seed: int, sha256: str | None) -> dict[str, Any]:
    return {"schema": SCHEMA, "model": model.to_dict(), "seed": seed, "sha256": sha256, "numpy": np.__version__}


def open_weights(path: str | Path, model: ModelShape) -> Read:
    """A reader of a canonical checkpoint: `read(name)`, the whole fp32 tensor, on CPU, a copy.

    Names and shapes are checked at once, so that a file of another model fails before any rank has loaded half of it.

    Args:
        path: the safetensors file, or its record (`.json`), whose values are generated.

    Raises:
        DataError: the file is missing or no safetensors file; a tensor (named) that is missing, too many, truncated, or
            of another shape or type; a record of another model.
    """
    if Path(path).suffix == ".json":
        record = read_json(path, SCHEMA)
        if record.get("model") != model.to_dict() or not isinstance(record.get("seed"), int):
            raise DataError(f"is not a record of weights of model {model.name}", file=path, key="model")
        return generate(model, record["seed"])
    file = TensorFile(path)
    wanted = {t.name: t.shape for t in canonical_tensors(model)}
    for name, shape in wanted.items():
        file.data(name, "F32", shape)
    unknown = [name for name in file.names() if name not in wanted]
    if unknown:
        raise DataError(f"is no weight of model {model.name}", file=path, key=unknown[0])

    def read(name: str) -> torch.Tensor:
        if name not in wanted:
            raise DataError(f"is no weight of model {model.name}", file=path, key=name)
        data = bytearray(file.data(name, "F32", wanted[name]))
        return torch.frombuffer(data, dtype=torch.float32).view(wanted[name])

    return read


def write_weights(path: str | Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Write tensors as fp32, one copy in memory at a time. Returns the sha256 of the file."""

    def entry(name: str, tensor: torch.Tensor) -> Entry:
        def data() -> memoryview:
            return memoryview(tensor.detach().to("cpu", torch.float32).contiguous().numpy()).cast("B")

        return Entry(name, "F32", tuple(tensor.shape), data)

    return write(path, [entry(n, t) for n, t in tensors.items()], {"format": "pt"})


def check_hash(path: str | Path, sha256: str) -> None:
    """Compare a file with the hash that was recorded when it was made.

    Raises:
        DataError: it is another file.
    """
    found = file_sha256(path)
    if found != sha256:
        raise DataError(f"has sha256 {found}, recorded was {sha256}", file=path)
