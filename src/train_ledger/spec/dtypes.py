"""Sizes of the element types that the ledger meets, by torch's name without the `torch.` prefix."""

from __future__ import annotations

ELEMENT_BYTES: dict[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint64": 8,
    "complex64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


def element_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype`.

    Raises:
        KeyError: the ledger does not know the type.
    """
    return ELEMENT_BYTES[dtype]
