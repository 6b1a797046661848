"""Named tensors in one file (the safetensors format), read and written without torch, with errors that name the tensor.

The format (github.com/huggingface/safetensors, "Format"): 8 bytes little-endian length of the header, a JSON header
`{name: {dtype, shape, data_offsets}}` padded with spaces, then the data of the tensors without gaps, row-major.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import DataError
from .io import whole_file

_ELEMENT_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U8": 1}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself


@dataclass(frozen=True)
class Entry:
    """One tensor to write. `data()` gives its bytes, row-major, only when its turn comes."""

    name: str
    dtype: str  # F32, BF16, ...
    shape: tuple[int, ...]
    data: Callable[[], bytes | bytearray | memoryview]

    @property
    def bytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * _ELEMENT_BYTES[self.dtype]


def write(path: str | Path, entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> str:
    """Write a file, one tensor in memory at a time, under a temporary name, then rename it.

    Returns:
        The sha256 of the file, hexadecimal.

    Raises:
        DataError: a name that comes twice, or data that is not as long as its shape says.
    """
    path, entries = Path(path), list(entries)
    header: dict[str, object] = {"__metadata__": dict(metadata or {})}
    at = 0
    for entry in entries:
        if entry.name in header:
            raise DataError("comes twice", file=path, key=entry.name)
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.bytes],
        }
        at += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of 8 bytes
    digest = hashlib.sha256()
    with whole_file(path) as f:
        for chunk in (len(text).to_bytes(8, "little"), text):
            f.write(chunk)
            digest.update(chunk)
        for entry in entries:
            data = entry.data()
            size = memoryview(data).nbytes
            if size != entry.bytes:
                raise DataError(f"{size} bytes of data for shape {list(entry.shape)}", file=path, key=entry.name)
            f.write(data)
            digest.update(data)
    return digest.hexdigest()


class TensorFile:
    """An open file. The header is read at once, the data when it is asked for.

    Raises:
        DataError: no such file, or a header that is not one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as f:
                self._size = os.fstat(f.fileno()).st_size
                length = int.from_bytes(f.read(8), "little")
                if self._size < 8 or length > min(_MAX_HEADER_BYTES, self._size - 8):
                    raise DataError("has no whole safetensors header; it may be truncated", file=self.path)
                raw = f.read(length)
                self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as e:
            raise DataError(f"cannot be read: {e.strerror or e}", file=self.path) from e
        try:
            header = json.loads(raw)
            self.metadata: dict[str, str] = dict(header.pop("__metadata__", {}))
            self._entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {
                name: (
                    str(e["dtype"]),
                    tuple(int(n) for n in e["shape"]),
                    int(e["data_offsets"][0]),
                    int(e["data_offsets"][1]),
                )
                for name, e in header.items()
            }
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as e:
            raise DataError(
                f"has a safetensors header that cannot be read ({type(e).__name__}: {str(e)[:100]})", file=self.path
            ) from e
        self._begin = 8 + length

    def names(self) -> list[str]:
        """Names in the order of the header."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor.

        Raises:
            DataError: there is no such tensor.
        """
        return self._entry(name)[1]

    def data(self, name: str, dtype: str, shape: tuple[int, ...] | None = None) -> memoryview:
        """The bytes of a tensor, row-major, read-only, backed by the file.

        Raises:
            DataError: the tensor is missing, truncated, or of another type or shape; names it.
        """
        found_dtype, found_shape, begin, end = self._entry(name)
        if found_dtype != dtype:
            raise DataError(f"is {found_dtype}, expected {dtype}", file=self.path, key=name)
        if shape is not None and found_shape != shape:
            raise DataError(f"has shape {list(found_shape)}, expected {list(shape)}", file=self.path, key=name)
        want = math.prod(found_shape) * _ELEMENT_BYTES[dtype]
        if begin < 0 or end - begin != want:
            raise DataError(
                f"has {end - begin} bytes for shape {list(found_shape)}, expected {want}", file=self.path, key=name
            )
        if self._begin + end > self._size:
            lost = self._begin + end - self._size
            raise DataError(
                f"is truncated: the file ends {min(lost, want)} bytes too early for it", file=self.path, key=name
            )
        return memoryview(self._map)[self._begin + begin : self._begin + end]

    def _entry(self, name: str) -> tuple[str, tuple[int, ...], int, int]:
        if name not in self._entries:
            raise DataError(f"is missing; the file holds {len(self._entries)} tensors", file=self.path, key=name)
        return self._entries[name]


def file_sha256(path: str | Path) -> str:
    """sha256 of a file, hexadecimal.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with Path(path).open("rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError as e:
        raise DataError(f"cannot be read: {e.strerror or e}", file=path) from e
